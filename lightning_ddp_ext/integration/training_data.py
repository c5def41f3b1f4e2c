"""The loaders of a training epoch, begun or entered in the middle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from lightning_ddp_ext.data.place import Place, draw_base_seed, has_place, is_stateful
from lightning_ddp_ext.errors import ResumeError
from lightning_ddp_ext.integration.lightning_tree import rank_zero_info


class TrainingData:
    """What a Trainer's training loaders read in an epoch, and how far they are.

    Args:
        trainer: whose.
        world_size: number of ranks.

    Attributes:
        count_drawn: counts the epoch's batches that loaders have given; ``None``: as many as Lightning has fetched.
    """

    def __init__(self, trainer: Any, world_size: int) -> None:
        self._trainer = trainer
        self._world_size = world_size
        self._places: list[Place | None] = []
        self._epoch: int | None = None
        self._unread: set[int] = set()
        self._is_last_first_pass = False
        self._has_other_lengths = False
        self._states: dict[int, list[Any]] = {}
        self.count_drawn: Callable[[], int] | None = None

    # Iterators.

    def is_begun(self, epoch: int) -> bool:
        """Whether some loader is iterated over in this epoch already."""
        return self._epoch == epoch

    def begin_epoch(self, epoch: int) -> None:
        """The loaders are about to be iterated over, from their start."""
        self.put_back()
        self._epoch = epoch
        self._unread = set(range(len(self._loaders)))
        self._states = {}
        remembered = self._trainer.accumulate_grad_batches + 2
        self._places = [Place(loader, remembered=remembered) if has_place(loader) else None for loader in self._loaders]
        for place in self._places:
            if place is not None:
                place.begin(begun_at=0, epoch=epoch)
        if self._has_other_lengths:
            self._put_lengths_right()

    def begin_pass(self, index: int) -> None:
        """One loader is about to be iterated over: for the first time in the epoch, or once more, from its start."""
        place = self._places[index]
        if index not in self._unread and place is not None:
            assert self._epoch is not None
            place.begin(begun_at=self.drawn, epoch=self._epoch)
        self._is_last_first_pass = self._unread == {index}
        self._unread.discard(index)

    def put_back(self) -> None:
        """Leave the loaders as they were found."""
        for place in self._places:
            if place is not None:
                place.put_back()

    def draw_base_seeds(self) -> None:
        """Draw what new iterators draw."""
        for loader in self._loaders:
            if isinstance(loader, DataLoader) and not loader.persistent_workers:
                draw_base_seed(loader)

    @property
    def has_persistent_workers(self) -> bool:
        """Whether some loader's next iterator is not a new one, and draws nothing."""
        return any(getattr(loader, "persistent_workers", False) for loader in self._loaders)

    # What is saved.

    def state_dicts(self) -> list[dict[str, Any] | None]:
        """By loader, what all ranks have in common."""
        return [None if place is None else place.state_dict(self._world_size) for place in self._places]

    def own_state_dicts(self) -> list[dict[str, Any] | None]:
        """By loader, what only this rank knows."""
        return [None if place is None else place.own_state_dict() for place in self._places]

    @property
    def drawn(self) -> int:
        """Batches of the epoch that the loaders have given; ``count_drawn`` knows better than Lightning's fetcher."""
        fetched: int = self._fetcher.fetched
        return fetched if self.count_drawn is None else self.count_drawn()

    def remember_first_states(self, done: int) -> None:
        """The epoch's iterators have been made, after so many batches: some fetchers fetch before they say so."""
        if self._is_last_first_pass and any(is_stateful(loader) for loader in self._loaders):
            self._states[done] = self._combined._state_dicts()

    def remember_states(self, drawn: int) -> None:
        """Before a draw: what loaders with a state of their own say now, for when only later batches count less."""
        if any(is_stateful(loader) for loader in self._loaders):
            self._states[drawn] = self._combined._state_dicts()
            self._states.pop(drawn - self._trainer.accumulate_grad_batches - 4, None)

    def states_after(self, batches: int) -> list[Any] | None:
        """What loaders with a state of their own have said after so many batches of the epoch."""
        now = self._combined._state_dicts()
        return self._states.get(batches, now) if now else None

    # Going on in the middle.

    @property
    def must_replay(self) -> bool:
        """Whether some loader can neither be entered in the middle, nor keeps a state of its own."""
        return not all(has_place(loader) or is_stateful(loader) for loader in self._loaders)

    def go_on(self, done: int, section: Mapping[str, Any], own: Sequence[Any] | None) -> None:
        """Have the loaders, which are about to be iterated over, go on where a checkpoint has left them.

        Args:
            done: batches of the epoch that are done.
            section: what was saved of the data; empty in a checkpoint that has nothing, taken for one of as many ranks.
            own: what this rank has saved, by loader.

        Raises:
            ResumeError: these are other loaders, or data that another number of ranks cannot share.
        """
        states = self._saved_places(done, section)
        left = None if section.get("batches") is None else section["batches"] - done
        lengths = [batches_of(loader) for loader in self._loaders]
        for index, place in enumerate(self._places):
            if place is None:
                continue
            self._has_other_lengths |= states[index]["samples"] != place.samples(self._world_size)
            lengths[index] = place.go_on(
                states[index],
                own[index] if own else None,
                epoch=self._epoch or 0,
                done=done,
                left=left,
                world_size=self._world_size,
            )
        if self._has_other_lengths:
            self._combined.limits[:] = lengths

    def leave_nothing(self, done: int) -> None:
        """All batches of the epoch are done; Lightning asks for one more where no validation is due any longer."""
        for place in self._places:
            if place is not None:
                place.leave_nothing(done)
        if any(batches_of(loader) != limit for loader, limit in zip(self._loaders, self._combined.limits, strict=True)):
            self._has_other_lengths = True
            self._combined.limits[:] = [batches_of(loader) for loader in self._loaders]

    def _saved_places(self, done: int, section: Mapping[str, Any]) -> list[Any]:
        saved: list[Any] | None = section.get("loaders")
        if saved is None:
            return [self._assumed(place, done) for place in self._places]
        if [state is None for state in saved] != [place is None for place in self._places]:
            raise ResumeError(
                f"the checkpoint is of the middle of epoch {self._epoch} over {len(saved)} training loaders, and there "
                f"are {len(self._places)}, or of other kinds; resume with the same ones, or from a checkpoint at the "
                "end of an epoch"
            )
        return saved

    def _assumed(self, place: Place | None, done: int) -> dict[str, Any] | None:
        if place is None:
            return None
        whole = place.length
        begun_at = done - done % whole if self._combined._mode == "max_size_cycle" and whole else 0
        return {**place.state_dict(self._world_size), "passes": [[begun_at, 0, begun_at == 0]]}

    def _put_lengths_right(self) -> None:
        """The rest of an epoch had another number of batches; now come whole ones."""
        self._has_other_lengths = False
        trainer, loop = self._trainer, self._trainer.fit_loop
        limit = trainer.limit_train_batches
        lengths = [batches_of(loader) for loader in self._loaders]
        limited = [min(length, limit) if isinstance(limit, int) else int(length * limit) for length in lengths]
        self._combined.limits[:] = limited
        loop.max_batches = min(limited) if self._combined._mode == "min_size" else max(limited)
        put_validation_right(trainer)

    def replay(self, done: int, saved_by: int) -> None:
        """Read the batches that are done, where nothing less leads to those that are not.

        Raises:
            ResumeError: another number of ranks has read them, or there are not so many.
        """
        names = ", ".join(type(loader).__name__ for loader in self._loaders)
        if saved_by != self._world_size:
            raise ResumeError(
                f"the rest of epoch {self._epoch} cannot be shared out: the training data ({names}) have no sampler, "
                f"the checkpoint is of {saved_by} ranks, and these are {self._world_size}; resume with as many ranks, "
                "or from a checkpoint at the end of an epoch"
            )
        rank_zero_info(f"reading {done} batches that are done, as the training data ({names}) have no sampler")
        for number in range(done):
            try:
                next(self._fetcher)
            except StopIteration:
                raise ResumeError(
                    f"epoch {self._epoch} cannot be continued after {done} batches: the training data ({names}) end "
                    f"after {number}; resume with the same data"
                ) from None
        self._fetcher.fetched -= done  # the loop counts these itself

    # What the Trainer has.

    @property
    def _combined(self) -> Any:
        return self._trainer.fit_loop._combined_loader

    @property
    def _loaders(self) -> list[Any]:
        return self._combined.flattened  # type: ignore[no-any-return]

    @property
    def _fetcher(self) -> Any:
        return self._trainer.fit_loop._data_fetcher


def batches_of(loader: Any) -> float:
    """How many batches a loader says that it has; ``inf`` if it does not say."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return float("inf")


def validates_after(trainer: Any) -> float | None:
    """So many batches; ``None``: the clock says when, or older versions of Lightning have not got the loaders yet."""
    batches: float | None = getattr(trainer, "val_check_batch", None)
    return batches


def put_validation_right(trainer: Any) -> None:
    """Validate after the given part of an epoch that has another number of batches than Lightning has counted."""
    if isinstance(trainer.val_check_interval, float) and validates_after(trainer) not in (None, float("inf")):
        trainer.val_check_batch = max(1, int(trainer.fit_loop.max_batches * trainer.val_check_interval))
