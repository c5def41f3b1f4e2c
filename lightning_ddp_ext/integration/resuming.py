"""Going on in the middle of an epoch: what a checkpoint says about data and random numbers, and what is made of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lightning_ddp_ext.data.random_state import RandomState
from lightning_ddp_ext.errors import ResumeError
from lightning_ddp_ext.integration.lightning_tree import Strategy, rank_zero_warn, refuse_missing
from lightning_ddp_ext.integration.restart import Restart, put_counts_right, settle
from lightning_ddp_ext.integration.training_data import TrainingData
from lightning_ddp_ext.integration.watching import Reads

KEY = "lightning_ddp_ext"
_VERSION = 1


class Resuming:
    """What the ranks of a strategy save about their data and random numbers, and how they go on from there.

    Args:
        strategy: whose ranks.

    Attributes:
        reads: whether it is the Trainer that reads the training loaders; what others read of them does not count.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.reads = Reads()
        self._trainer: Any = None
        self._quiet = ExitStack()
        self._is_between_batches = False
        self._is_validation_due = False
        self._before_validation: RandomState | None = None
        self._reset({})

    def _reset(self, section: Mapping[str, Any]) -> None:
        self._section = section
        self._restart: Restart | None = None
        self._data = TrainingData(self._trainer, getattr(self._strategy, "world_size", 1))
        self._last_step: RandomState | None = None
        self._after_iterators: RandomState | None = None
        self._has_new_iterators = False

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
        refuse_missing(type(epoch_loop), "_on_before_fetch", "update_lr_schedulers")
        refuse_missing(type(epoch_loop.val_loop), "run")

        def restore_loops() -> None:
            type(connector).restore_loops(connector)
            self._settle(connector._loaded_checkpoint)

        def on_before_fetch() -> None:
            self._before_fetch()
            type(epoch_loop)._on_before_fetch(epoch_loop)

        def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
            if self._restart is not None and self._restart.at == "end":
                if not update_plateau_schedulers:  # they were updated before the checkpoint was saved
                    return
                if not self._restart.is_validation_due:
                    self._restore_random()  # older versions of Lightning have validated once more
            type(epoch_loop).update_lr_schedulers(epoch_loop, interval, update_plateau_schedulers)

        def validate() -> Any:
            self._before_validation = RandomState.take(self._device)
            return type(epoch_loop.val_loop).run(epoch_loop.val_loop)

        epoch_loop.val_loop.run = validate
        connector.restore_loops = restore_loops
        epoch_loop._on_before_fetch = on_before_fetch
        epoch_loop.update_lr_schedulers = update_lr_schedulers

    def detach(self) -> None:
        """Leave the loaders, and what is warned of, as they were found."""
        self._quiet.close()
        self._data.put_back()
        self.reads.end()

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
            "loaders": self._data.own_state_dicts(),
            "stateful": self._data.states_after(self._stepped),
        }
        by_rank = None if to_rank_zero is None else to_rank_zero(own)
        checkpoint[KEY] = {
            "version": _VERSION,
            "world_size": self._world_size,
            "seed": seed,
            "accumulate_grad_batches": self._trainer.accumulate_grad_batches,
            "between_batches": self._is_between_batches,
            "validation_due": self._is_validation_due,
            "batches": None if loop.max_batches == float("inf") else loop.max_batches,
            "loaders": self._data.state_dicts(),
            "ranks": by_rank,  # None in the middle of an exception: other ranks may not be there
        }

    @contextmanager
    def between_batches(self) -> Iterator[None]:
        """A checkpoint that is saved in the block is saved after all that belongs to a batch, validation included.

        Nothing of Lightning's is ever saved there, so its counts are put as they are a little earlier.
        """
        loop = self._trainer.fit_loop.epoch_loop
        is_counted = 0 if loop._should_accumulate() else 1
        self._is_between_batches = True
        loop._batches_that_stepped -= is_counted
        try:
            yield
        finally:
            loop._batches_that_stepped += is_counted
            self._is_between_batches = False

    @contextmanager
    def amid_validation(self) -> Iterator[None]:
        """A checkpoint that is saved in the block is as if no batch had been validated since training went on."""
        self._is_validation_due = True
        try:
            yield
        finally:
            self._is_validation_due = False

    def _random(self) -> dict[str, Any]:
        """The generators where they were after the last optimiser step."""
        if self._is_validation_due and self._before_validation is not None:
            return self._before_validation.to_dict()
        is_stepped = self._stepped == self._batch_progress.current.processed
        state = RandomState.take(self._device) if is_stepped or self._last_step is None else self._last_step
        return state.to_dict()

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
        restart = settle(
            self._trainer.fit_loop,
            accumulated=accumulated,
            batches=self._section.get("batches"),
            is_between_batches=self._section.get("between_batches", False),
            is_validation_due=self._section.get("validation_due", False),
        )
        self._restart = restart
        if restart.at == "end" and self._saved_by != self._world_size:
            self._trainer.fit_loop._combined_loader_states_to_load = []  # nothing is left of what they are about
        elif restart.at != "begin":
            self._hand_out_loader_states(restart)
        self._forget_early_loaders()

    def _forget_early_loaders(self) -> None:
        """Have Lightning get its training loaders anew if it has them already, and begun to read epoch 0.

        It has if ``configure_optimizers`` asks for ``estimated_stepping_batches``: that is before anything is restored.
        """
        loop = self._trainer.fit_loop
        if loop._combined_loader is None:
            return
        if loop._data_fetcher is not None:
            loop._data_fetcher.teardown()
            loop._data_fetcher = None  # Lightning 2.4 can tear it down only once, and may be about to
        loop._combined_loader = None

    def _hand_out_loader_states(self, restart: Restart) -> None:
        """Loaders with a state of their own get this rank's, where Lightning has only rank 0's for all."""
        loop, own = self._trainer.fit_loop, self._of_this_rank("stateful")
        if not loop._combined_loader_states_to_load:
            return
        if own is not None and self._saved_by == self._world_size:
            loop._combined_loader_states_to_load = own
        elif self._saved_by != self._world_size:
            raise ResumeError(
                f"the training loader keeps its own state, which {self._saved_by} ranks have saved in the middle of "
                f"epoch {restart.epoch}, and these are {self._world_size}; resume with as many ranks, or from a "
                "checkpoint at the end of an epoch"
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

    # From there to the first batch.

    def before_iterator(self, index: int, epoch: int) -> None:
        """The training loader with this number is about to be iterated over, in this epoch."""
        if not self._data.is_begun(epoch):
            try:
                self._begin_epoch(epoch)
            except Exception:
                self._trainer.fit_loop._data_fetcher = None  # whose teardown would fail, and hide this error
                raise
        self._data.begin_pass(index)

    def _begin_epoch(self, epoch: int) -> None:
        self._data.begin_epoch(epoch)
        restart = self._restart
        if restart is None or epoch != restart.epoch:
            return
        if restart.at == "begin":
            self._restore_random()
        elif restart.at == "end":
            self._data.leave_nothing(restart.done)
        elif not self._data.must_replay:
            self._data.go_on(restart.done, self._section, self._of_this_rank("loaders"))

    def after_iterator(self) -> None:
        """A training loader's iterator has been made, which may have drawn random numbers."""
        self._has_new_iterators = True
        restart = self._restart
        if restart is not None and restart.at == "begin":
            self._after_iterators = RandomState.take(self._device)
        self._data.remember_first_states(restart.done if restart is not None and restart.at == "within" else 0)

    def on_train_start(self) -> None:
        """The iterators are there, and training begins."""
        self._has_new_iterators = False
        restart = self._restart
        if restart is None:
            return
        if restart.at == "within" and self._data.must_replay:
            self._data.replay(restart.done, self._saved_by)
        if restart.at != "within" or restart.is_validation_due:
            self._restore_random()
        # Lightning says next that the loaders cannot be resumed.
        self._quiet.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*resuming from a checkpoint that ended before the epoch ended")

    def _before_fetch(self) -> None:
        """The next batch is about to be fetched, and nobody else comes before it."""
        if self._restart is not None:
            self._quiet.close()
            self._arrive(self._restart)
            self._restart = None
        accumulated = self._trainer.accumulate_grad_batches
        if accumulated > 1 and self._batch_progress.current.ready % accumulated == 0:
            self._last_step = RandomState.take(self._device)
        if self._data.count_drawn is None:
            self._data.remember_states(self._data.drawn)

    # Where batches are drawn from the loaders before Lightning fetches them.

    @property
    def entered_at(self) -> int:
        """Batches of the epoch that lie before what the iterators give that are made now."""
        restart = self._restart
        return restart.done if restart is not None and restart.at == "within" and not self._data.must_replay else 0

    def draw_ahead(self, count_drawn: Callable[[], int] | None) -> None:
        """From now on ``count_drawn`` says how many batches of the epoch have been drawn; ``None``: those fetched."""
        self._data.count_drawn = count_drawn

    def before_draw(self, number: int) -> None:
        """The loaders are about to be asked for the batch of the epoch with this number, from 0."""
        self._data.remember_states(number)

    def _arrive(self, restart: Restart) -> None:
        put_counts_right(self._trainer.fit_loop, restart)
        own = self._of_this_rank("random")
        if own is None:
            return
        if restart.at == "within":
            if not restart.is_validation_due:
                self._restore_random()
        elif restart.at == "begin" and restart.epoch > 0 and not self._has_new_iterators:
            self._draw_as_iterators_did(RandomState.from_dict(own))

    def _draw_as_iterators_did(self, before: RandomState) -> None:
        """After a restore the iterators were made first; else they would have been made now, after the hooks.

        Older versions of Lightning make them once more now, and then this is not called.
        """
        is_undisturbed = not self._data.has_persistent_workers and RandomState.take(self._device) == before
        if self._after_iterators is not None and is_undisturbed:
            self._after_iterators.restore(self._device)
        else:
            self._data.draw_base_seeds()

    def _restore_random(self) -> None:
        own = self._of_this_rank("random")
        if own is not None:
            RandomState.from_dict(own).restore(self._device)

    # What the Trainer and the strategy have.

    @property
    def _world_size(self) -> int:
        return self._strategy.world_size  # type: ignore[attr-defined,no-any-return]

    @property
    def _saved_by(self) -> int:
        """How many ranks the checkpoint is of; as many as there are now, if it does not say."""
        return int(self._section.get("world_size", self._world_size))

    @property
    def _device(self) -> torch.device:
        return self._strategy.root_device

    @property
    def _batch_progress(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.batch_progress
