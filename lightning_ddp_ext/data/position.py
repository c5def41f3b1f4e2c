"""Find places in the epochs of a training loader, and continue an epoch at one.

The order of an epoch follows from (seed, epoch) and is drawn when the epoch begins, so
the place at which a run continues is one number:

====================  ===============  ==============================================
Loader                Place            A resumed run
====================  ===============  ==============================================
with one of our       items that all   draws the order again, and starts there, on
samplers              ranks have read  any number of ranks, unless the sampler's
                                       ``uneven`` is ``"exact"``
over another sampler  items that this  draws the order of this rank again, and starts
                      rank has read    there
with a state          batches of this  restores the state, whatever its sampler
                      rank
any other             unknown          starts the epoch again
====================  ===============  ==============================================

The place after some more batches is arithmetic, so nothing is recorded while training
runs. The exception is a loader with a state: it may be read ahead, so the states after
its latest batches are kept. The place is also unknown once a loader has begun again
beside a longer one, and after a hook has changed the batch size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler
from typing_extensions import override

from lightning_ddp_ext.data.inspection import (
    each_of,
    index_sampler_of,
    is_stateful,
    length_or_inf,
    yields_in_order,
)
from lightning_ddp_ext.data.proxy import read_instead
from lightning_ddp_ext.data.samplers import GlobalOrderSampler, RankOrderSampler


class Position(ABC):
    """Base class: finds places in the epochs of a loader.

    Problems are returned as the rest of a sentence about the loader, with the remedy.

    Args:
        loader: the loader that is read.
        world_size: the number of ranks.

    Attributes:
        loader: the argument.
        unknown_place: the problem of a saved place that is unknown.
        sampler: our sampler that yields the loader's items, if any.
        epoch: the epoch that is read; -1 before the first one.
        start: the place at which the epoch begins in this run.
        checksum: that of the latest order that was drawn; 0 if none was.
    """

    unknown_place: str = (
        "was not at a known place when the checkpoint was saved, because a rank failed, a hook"
        " changed the batch size, or it had begun again beside a longer loader; use a map-style"
        " dataset in loaders of the same length, or save at the end of an epoch"
    )
    sampler: GlobalOrderSampler | None = None

    def __init__(self, loader: Any, world_size: int) -> None:
        self.loader = loader
        self._world_size = world_size
        self.epoch = -1
        self.start = 0
        self.checksum = 0
        # Iterators that have started in this epoch. With a second one, the loader has begun
        # again beside a longer one.
        self._iterators = 0

    # What subclasses override.

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Return the properties, by name, with which a place has the same meaning."""

    @abstractmethod
    def _after(self, batches: int) -> tuple[int | None, Any]:
        """Return the place after some batches of an iterator from ``start`` on.

        ``None`` if it is unknown. The second value is the loader's state there, if any.
        """

    def _restore(self, state: Any, checksum: int) -> str | None:
        """Prepare the next iterator to begin at ``start``; return the problem, if any.

        It is not called if the place is unknown.
        """
        raise NotImplementedError

    # For all loaders.

    def start_epoch(self, epoch: int) -> None:
        """Make the next iterators start at the beginning of an epoch."""
        self.epoch = epoch
        self.start = 0
        self._iterators = 0

    def continue_epoch(self, epoch: int, saved: Mapping[str, Any], checksum: int) -> str | None:
        """Make the next iterator continue where another run was.

        Return the problem if that is impossible.

        Args:
            epoch: the epoch.
            saved: what :meth:`state_after` returned in that run.
            checksum: that of this rank's order in that run.
        """
        self.start_epoch(epoch)
        problem = _difference(saved["identity"], self._identity())
        if problem or saved["at"] is None:
            return problem or self.unknown_place
        self.start = saved["at"]
        return self._restore(saved["state"], checksum)

    def iterate(self) -> Iterator[Any]:
        """Start the next iterator of the epoch: at ``start``, then at the beginning."""
        self._iterators += 1
        return iter(self.loader)

    def left(self, place: int) -> float:
        """Return how many batches this rank reads from a place to an iterator's end."""
        return length_or_inf(self.loader) - place

    def state_after(self, batches: int) -> dict[str, Any]:
        """Return where this rank is after some batches of the epoch in this run.

        The entries are "identity", see :meth:`_identity`; "at", the place, or ``None`` if
        it is unknown; and "state", the loader's, which only this rank can use.
        """
        place, state = self._after(batches)
        return {
            "identity": self._identity(),
            "at": place if self._iterators <= 1 else None,
            "state": state,
        }


def _difference(before: Mapping[str, Any], identity: Mapping[str, Any]) -> str | None:
    """Return the problem if an identity differs from that in a checkpoint."""
    for name, now in identity.items():
        if now != before.get(name):
            return (
                f"has another {name} than when the checkpoint was saved ({before.get(name)},"
                f" now {now}); resume with the same"
            )
    return None


class UnknownPosition(Position):
    """No places, because the loader's order is unknown; a resumed epoch starts again."""

    unknown_place = (
        "yields batches in an order that cannot be drawn again; use a map-style dataset with a"
        " sampler that has a length and draws only from random, NumPy or torch, or a loader with a"
        " state, such as torchdata's StatefulDataLoader"
    )

    @override
    def _identity(self) -> dict[str, Any]:
        return {"kind": "unknown"}

    @override
    def _after(self, batches: int) -> tuple[None, None]:
        return None, None


class SamplerPosition(Position):
    """Places in a loader that reads one of our samplers, in items that its ranks have read.

    Args:
        loader: the loader.
        world_size: the number of ranks.
        sampler: our sampler.
        batches: groups the sampler's items; ``None`` if each of them is a batch.
    """

    sampler: GlobalOrderSampler

    def __init__(
        self,
        loader: Any,
        world_size: int,
        sampler: GlobalOrderSampler,
        batches: BatchSampler | None = None,
    ) -> None:
        super().__init__(loader, world_size)
        self.sampler = sampler
        self.sampler.drawn_order = None  # an interrupted run may have left one
        self._batches = batches
        # When the epoch began. If a hook has changed it since then, the place is unknown.
        self._size_at_start = self._batch_size

    @property
    def _batch_size(self) -> int:
        return 1 if self._batches is None else self._batches.batch_size

    @override
    def _identity(self) -> dict[str, Any]:
        # On other ranks, the shares of an uneven sampler would have different lengths.
        ranks = self._world_size if self.sampler.uneven == "exact" else "any"
        return {
            "kind": type(self.sampler).__name__,
            "number of ranks": ranks,
            **self.sampler.identity(),
        }

    @override
    def start_epoch(self, epoch: int) -> None:
        super().start_epoch(epoch)
        self.sampler.drawn_order = None
        self._size_at_start = self._batch_size

    @override
    def iterate(self) -> Iterator[Any]:
        self._draw_order()
        self.sampler.position = 0 if self._iterators else self.start
        return super().iterate()

    def _draw_order(self) -> None:
        """Draw the order that the next iterator reads, unless that is done."""
        self.sampler.epoch = self.epoch  # a hook may have set another number
        order = self.sampler.drawn_order or self.sampler.compute_order()
        self.sampler.drawn_order = order
        self.checksum = order.checksum

    @override
    def left(self, place: int) -> float:
        items = len(self.sampler.shard(place))
        drops_rest = getattr(self._batches, "drop_last", False)
        return items // self._batch_size if drops_rest else -(-items // self._batch_size)

    @override
    def _after(self, batches: int) -> tuple[int | None, None]:
        if self._batch_size != self._size_at_start:
            return None, None
        return self.sampler.shard(self.start).position_after(batches * self._batch_size), None

    @override
    def _restore(self, state: Any, checksum: int) -> str | None:
        self._draw_order()
        if self.checksum == checksum:
            return None
        return (
            "draws another order than before the checkpoint was saved; resume with the same data,"
            " and with a sampler that draws only from random, NumPy or torch"
        )


class StatePosition(Position):
    """Places in a loader with a state, in batches of this rank.

    The loader's state is that after the latest batch that was read. Batches may be read
    that are not done at a checkpoint, so the states before them are kept.

    Args:
        loader: the loader.
        world_size: the number of ranks.
        read_ahead: the number of batches that may be read, but not be done.
    """

    def __init__(self, loader: Any, world_size: int, read_ahead: int) -> None:
        super().__init__(loader, world_size)
        self._read_ahead = read_ahead
        self._states: dict[int, Any] = {}  # of the loader in this epoch, by place

    @override
    def _identity(self) -> dict[str, Any]:
        return {
            "kind": "state",
            "number of ranks": self._world_size,
            "number of samples": length_or_inf(getattr(self.loader, "dataset", None)),
            "number of workers": getattr(self.loader, "num_workers", 0),
        }

    @override
    def start_epoch(self, epoch: int) -> None:
        super().start_epoch(epoch)
        self._states = {}

    @override
    def iterate(self) -> Iterator[Any]:
        is_restored = self._iterators == 0 and self.start > 0
        if is_restored:
            self.loader.load_state_dict(self._states[self.start])
        return self._keeping_states(super().iterate(), is_restored=is_restored)

    def _keeping_states(self, batches: Iterator[Any], *, is_restored: bool) -> Iterator[Any]:
        """Yield batches, and keep the loader's states after those that may not be done."""
        whole = length_or_inf(self.loader)
        for place, batch in enumerate(each_of(batches), self.start + 1):
            self._states[place] = self.loader.state_dict()
            self._states.pop(place - self._read_ahead, None)
            if is_restored and place == whole:
                # Lightning does not request the end, and until then some loaders, such as
                # litdata's, begin again at a restored state.
                next(batches, None)
            yield batch

    @override
    def _after(self, batches: int) -> tuple[int, Any]:
        place = self.start + batches
        return place, self._states.get(place)

    @override
    def _restore(self, state: Any, checksum: int) -> str | None:
        self._states = {self.start: state}
        return self.unknown_place if state is None else None


def position_of(loader: Any, read_ahead: int, world_size: int) -> Position:
    """Return the position in a loader, of the class that the loader allows.

    The loader's index sampler may be replaced. ``read_ahead`` is the number of batches
    that may be read, but not be done, at a checkpoint.
    """
    if is_stateful(loader):
        return StatePosition(loader, world_size, read_ahead)
    index_sampler = index_sampler_of(loader)
    if not yields_in_order(loader) or length_or_inf(index_sampler) == float("inf"):
        return UnknownPosition(loader, world_size)
    if isinstance(index_sampler, GlobalOrderSampler):
        return SamplerPosition(loader, world_size, index_sampler)
    sampler = global_order_of(loader)
    if type(index_sampler) is BatchSampler and sampler is not None:
        return SamplerPosition(loader, world_size, sampler, index_sampler)
    # A user's sampler draws the order, or a user's batch sampler that may be over ours.
    drawn_by_rank = RankOrderSampler(index_sampler)
    read_instead(loader, drawn_by_rank)
    return SamplerPosition(loader, world_size, drawn_by_rank)


def global_order_of(loader: Any) -> GlobalOrderSampler | None:
    """Return our sampler that a loader or its batch sampler has, or ``None``."""
    index_sampler = index_sampler_of(loader)
    samplers = (index_sampler, getattr(index_sampler, "sampler", None))
    return next((each for each in samplers if isinstance(each, GlobalOrderSampler)), None)
