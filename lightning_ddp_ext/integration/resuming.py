"""Going on in the middle of an epoch: what a checkpoint says about data, and what is done with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_ddp_ext.errors import ResumeError
from lightning_ddp_ext.integration.lightning_tree import Strategy, rank_zero_info, rank_zero_warn, refuse_missing
from lightning_ddp_ext.integration.restart import Restart, put_counts_right, settle
from lightning_ddp_ext.sampling.place import Place, draw_base_seed, has_place, is_stateful
from lightning_ddp_ext.sampling.random_state import RandomState

KEY = "lightning_ddp_ext"
_VERSION = 1


class Resuming:
    """What the ranks of a strategy save about their data, and how they go on from there.

    Args:
        strategy: whose ranks.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._trainer: Any = None
        self._reset({})

    def _reset(self, section: Mapping[str, Any]) -> None:
        self._section = section
        self._restart: Restart | None = None
        self._places: list[Place | None] = []
        self._epoch: int | None = None
        self._fresh: set[int] = set()
        self._has_other_lengths = False
        self._window: RandomState | None = None
        self._states: dict[int, list[Any]] = {}
        self.count_drawn: Callable[[], int] | None = None  # where batches are drawn before Lightning fetches them

    @property
    def seed(self) -> int | None:
        """The seed of the run that is resumed."""
        return self._section.get("seed")

    def attach(self, trainer: Any) -> None:
        """Hear of what the Trainer restores, and of each batch that it is about to fetch."""
        self._trainer = trainer
        self._reset({})
        connector, epoch_loop = trainer._checkpoint_connector, trainer.fit_loop.epoch_loop
        refuse_missing(type(connector), "restore_loops")
        refuse_missing(type(epoch_loop), "_on_before_fetch")

        def restore_loops() -> None:
            type(connector).restore_loops(connector)
            self._settle(connector._loaded_checkpoint)

        def on_before_fetch() -> None:
            self._before_fetch()
            type(epoch_loop)._on_before_fetch(epoch_loop)

        connector.restore_loops = restore_loops
        epoch_loop._on_before_fetch = on_before_fetch

    # Saving.

    def add_to(
        self, checkpoint: dict[str, Any], *, seed: int | None, to_rank_zero: Callable[[Any], Any] | None
    ) -> None:
        """Put into a checkpoint where each rank's data are. Collective, unless ``to_rank_zero`` is ``None``.

        Args:
            checkpoint: what Lightning has put together.
            seed: of the orders of samples, if there are any.
            to_rank_zero: gives rank 0 the objects of all ranks, by rank.
        """
        loop = self._trainer.fit_loop
        if "loops" not in checkpoint or loop._combined_loader is None:
            return
        own = {
            "random": self._random(),
            "loaders": [place and place.own_state_dict() for place in self._places],
            "stateful": self._loader_states(),
        }
        by_rank = None if to_rank_zero is None else to_rank_zero(own)
        checkpoint[KEY] = {
            "version": _VERSION,
            "world_size": self._world_size,
            "seed": seed,
            "accumulate_grad_batches": self._trainer.accumulate_grad_batches,
            "batches": None if loop.max_batches == float("inf") else loop.max_batches,
            "loaders": [place and place.state_dict(self._world_size) for place in self._places],
            "ranks": by_rank,  # None in the middle of an exception: other ranks may not be there
        }

    def _random(self) -> dict[str, Any]:
        """The generators where they were after the last optimiser step."""
        is_stepped = self._stepped == self._batch_progress.current.processed
        state = RandomState.take(self._device) if is_stepped or self._window is None else self._window
        return state.to_dict()

    def _loader_states(self) -> list[Any] | None:
        """What loaders with a state of their own have said after the batch of the last optimiser step."""
        now = self._trainer.fit_loop._combined_loader._state_dicts()
        return self._states.get(self._stepped, now) if now else None

    @property
    def _stepped(self) -> int:
        """Batches of the epoch that an optimiser step has followed."""
        batch = self._batch_progress
        processed: int = batch.current.processed
        return processed if batch.is_last_batch else processed - processed % self._trainer.accumulate_grad_batches

    # Restoring.

    def _settle(self, checkpoint: Mapping[str, Any]) -> None:
        if "loops" not in checkpoint or self._trainer.state.fn != "fit":
            return
        self._reset(checkpoint.get(KEY) or {})
        accumulated = self._section.get("accumulate_grad_batches", self._trainer.accumulate_grad_batches)
        restart = settle(self._trainer.fit_loop, accumulated=accumulated, batches=self._section.get("batches"))
        self._restart = restart
        if restart.at == "within":
            self._hand_out_loader_states(restart)

    def _hand_out_loader_states(self, restart: Restart) -> None:
        """Loaders with a state of their own get this rank's, where Lightning has only rank 0's for all."""
        loop, own = self._trainer.fit_loop, self._of_this_rank("stateful")
        if not loop._combined_loader_states_to_load:
            return
        saved_by = self._section.get("world_size")
        if own is not None and saved_by == self._world_size:
            loop._combined_loader_states_to_load = own
        elif saved_by not in (None, self._world_size):
            raise ResumeError(
                f"the training loader keeps its own state, which {saved_by} ranks have saved in the middle of epoch "
                f"{restart.epoch}, and these are {self._world_size}; resume with as many ranks, or from a checkpoint "
                "at the end of an epoch"
            )
        elif self._world_size > 1:
            rank_zero_warn(
                "the checkpoint has only rank 0's state of the training loader, and every rank gets that one: ranks "
                "that read data of their own do not go on where they were; save with strategy='ddp_ext'"
            )

    def _of_this_rank(self, name: str) -> Any:
        ranks = self._section.get("ranks") or []
        rank = self._strategy.global_rank  # type: ignore[attr-defined]
        return ranks[rank][name] if rank < len(ranks) else None

    # Before an iterator of a training loader is made.

    def before_iterator(self, index: int, epoch: int) -> None:
        """The training loader with this number is about to be iterated over, in this epoch."""
        if epoch != self._epoch:
            self._begin_epoch(epoch)
        elif index not in self._fresh and (place := self._places[index]) is not None:
            place.begin(begun_at=self._drawn, epoch=epoch)
        self._fresh.discard(index)

    def _begin_epoch(self, epoch: int) -> None:
        self.put_back()
        loaders = self._loaders
        self._epoch = epoch
        self._fresh = set(range(len(loaders)))
        self._states = {}
        remembered = self._trainer.accumulate_grad_batches + 2
        self._places = [Place(loader, remembered=remembered) if has_place(loader) else None for loader in loaders]
        for place in self._places:
            if place is not None:
                place.begin(begun_at=0, epoch=epoch)
        if self._has_other_lengths:
            self._put_lengths_right([_length_of(loader) for loader in loaders])
        restart = self._restart
        if restart is not None and restart.at == "begin":
            self._restore_random()
        if restart is not None and restart.at == "within" and not self._must_replay:
            self._go_on(restart)

    def _go_on(self, restart: Restart) -> None:
        states, own = self._saved_places(restart), self._of_this_rank("loaders")
        batches = self._section.get("batches")
        left = None if batches is None else batches - restart.done
        lengths: list[float] = []
        for index, place in enumerate(self._places):
            if place is None:
                lengths.append(_length_of(self._loaders[index]))
                continue
            length = place.go_on(
                states[index],
                own[index] if own else None,
                epoch=restart.epoch,
                done=restart.done,
                left=left,
                world_size=self._world_size,
            )
            self._has_other_lengths |= states[index]["samples"] != place.state_dict(self._world_size)["samples"]
            lengths.append(length)
        if self._has_other_lengths:
            self._combined.limits[:] = lengths

    def _saved_places(self, restart: Restart) -> list[Any]:
        """Where the loaders were; a checkpoint that does not say is taken for one of as many ranks."""
        saved: list[Any] | None = self._section.get("loaders")
        if saved is None:
            return [self._assumed(place, restart.done) for place in self._places]
        if [state is None for state in saved] != [place is None for place in self._places]:
            raise ResumeError(
                f"the checkpoint is of the middle of epoch {restart.epoch} over {len(saved)} training loaders, and "
                f"there are {len(self._places)}, or others; resume with the same ones, or from a checkpoint at the end "
                "of an epoch"
            )
        return saved

    def _assumed(self, place: Place | None, done: int) -> dict[str, Any] | None:
        if place is None:
            return None
        whole = place.length
        begun_at = done - done % whole if self._combined._mode == "max_size_cycle" and whole else 0
        return {**place.state_dict(self._world_size), "passes": [[begun_at, 0, begun_at == 0]]}

    @property
    def _must_replay(self) -> bool:
        """Whether some loader can neither be entered in the middle, nor keeps a state of its own."""
        return not all(has_place(loader) or is_stateful(loader) for loader in self._loaders)

    @property
    def entered_at(self) -> int:
        """Batches of the epoch that lie before what the iterators give that are made now."""
        restart = self._restart
        return restart.done if restart is not None and restart.at == "within" and not self._must_replay else 0

    def _put_lengths_right(self, lengths: list[float]) -> None:
        """The rest of an epoch had another number of batches; now come whole ones."""
        self._has_other_lengths = False
        trainer, loop = self._trainer, self._trainer.fit_loop
        limit = trainer.limit_train_batches
        limited = [min(length, limit) if isinstance(limit, int) else int(length * limit) for length in lengths]
        self._combined.limits[:] = limited
        loop.max_batches = min(limited) if self._combined._mode == "min_size" else max(limited)
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch not in (None, float("inf")):
            trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))

    def put_back(self) -> None:
        """Leave the loaders as they were found."""
        for place in self._places:
            if place is not None:
                place.put_back()

    # Between the iterators and the first batch.

    def on_train_start(self) -> None:
        """The iterators are there, and training begins."""
        restart = self._restart
        if restart is None:
            return
        if restart.at == "within" and self._must_replay:
            self._replay(restart)
        if restart.at != "within":
            self._restore_random()

    def _replay(self, restart: Restart) -> None:
        """Read the batches that are done, where nothing less leads to those that are not."""
        saved_by = self._section.get("world_size", self._world_size)
        names = ", ".join(type(loader).__name__ for loader in self._loaders)
        if saved_by != self._world_size:
            raise ResumeError(
                f"the rest of epoch {restart.epoch} cannot be shared out: the training data ({names}) have no sampler, "
                f"the checkpoint is of {saved_by} ranks, and these are {self._world_size}; resume with as many ranks, "
                "or from a checkpoint at the end of an epoch"
            )
        rank_zero_info(f"reading {restart.done} batches that are done, as the training data ({names}) have no sampler")
        for number in range(restart.done):
            try:
                next(self._fetcher)
            except StopIteration:
                raise ResumeError(
                    f"epoch {restart.epoch} cannot be continued after {restart.done} batches: the training data "
                    f"({names}) end after {number}; resume with the same data"
                ) from None
        self._fetcher.fetched -= restart.done  # the loop counts these itself

    def _before_fetch(self) -> None:
        """The next batch is about to be fetched, and nobody else comes before it."""
        if self._restart is not None:
            self._arrive(self._restart)
            self._restart = None
        accumulated = self._trainer.accumulate_grad_batches
        if accumulated > 1 and self._batch_progress.current.ready % accumulated == 0:
            self._window = RandomState.take(self._device)
        if self.count_drawn is None:
            self.before_draw(self._fetcher.fetched)

    def before_draw(self, number: int) -> None:
        """The loaders are about to be asked for the batch with this number, from 0, of the epoch."""
        if any(is_stateful(loader) for loader in self._loaders):
            self._states[number] = self._combined._state_dicts()
            self._states.pop(number - self._trainer.accumulate_grad_batches - 4, None)

    def _arrive(self, restart: Restart) -> None:
        put_counts_right(self._trainer.fit_loop.epoch_loop, restart)
        if restart.at == "within":
            self._restore_random()
        elif restart.at == "begin" and restart.epoch > 0 and self._of_this_rank("random") is not None:
            for loader in self._loaders:
                if isinstance(loader, DataLoader) and not loader.persistent_workers:
                    draw_base_seed(loader)  # as the iterators would have done now, had there been no restore

    def _restore_random(self) -> None:
        own = self._of_this_rank("random")
        if own is not None:
            RandomState.from_dict(own).restore(self._device)

    # What the Trainer has.

    @property
    def _world_size(self) -> int:
        return self._strategy.world_size  # type: ignore[attr-defined,no-any-return]

    @property
    def _device(self) -> torch.device:
        return self._strategy.root_device

    @property
    def _batch_progress(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.batch_progress

    @property
    def _fetcher(self) -> Any:
        return self._trainer.fit_loop._data_fetcher

    @property
    def _drawn(self) -> int:
        """Batches of the epoch that the loaders have given."""
        fetched: int = self._fetcher.fetched
        return fetched if self.count_drawn is None else self.count_drawn()

    @property
    def _combined(self) -> Any:
        return self._trainer.fit_loop._combined_loader

    @property
    def _loaders(self) -> list[Any]:
        return self._combined.flattened  # type: ignore[no-any-return]


def _length_of(loader: Any) -> float:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return float("inf")
