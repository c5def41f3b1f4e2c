"""Find places in the epochs of a training loader, and continue an epoch at one.

The order of an epoch follows from (seed, epoch) and is drawn when the epoch begins, so
the place at which a run continues is one number:

====================  ===============  ==============================================
Loader                Place            A resumed run
====================  ===============  ==============================================
with one of our       items that all   draws the order again, and starts there, on
samplers              ranks have read  any number of ranks
over another sampler  items that this  draws the order of this rank again, and starts
                      rank has read    there
with a state          batches of this  restores the state
                      rank
any other             unknown          starts the epoch again
====================  ===============  ==============================================

The place after some more batches is arithmetic, so nothing is recorded while training
runs. The exception is a loader with a state: it may be read ahead, so the states after
its latest batches are kept. The place is also unknown once a loader has begun again
beside a longer one, and after a hook has changed the batch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler
from typing_extensions import override

from lightning_ddp_ext.data.proxy import (
    each_of,
    index_sampler_of,
    is_stateful,
    length_or_inf,
    read_instead,
    yields_in_order,
)
from lightning_ddp_ext.data.samplers import GlobalOrderSampler, RankOrderSampler

# Why a place is not found again, and the remedy.
_OTHER_ORDER = (
    "draws another order than before the checkpoint was saved; resume with the same data, and"
    " with a sampler that draws only from random, NumPy or torch"
)
_UNKNOWN_PLACE = (
    "was not at a known place when the checkpoint was saved, because a rank failed, a hook"
    " changed the batch size, or it had begun again beside a longer loader; use a map-style"
    " dataset in loaders of the same length, or save at the end of an epoch"
)


class Position:
    """Finds places in the epochs of a loader whose order is unknown; base class of others.

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
    """

    unknown_place: str = (
        "yields batches in an order that cannot be drawn again; use a map-style dataset with a"
        " sampler that has a length and draws only from random, NumPy or torch, or a loader with a"
        " state, such as torchdata's StatefulDataLoader"
    )
    sampler: GlobalOrderSampler | None = None

    def __init__(self, loader: Any, world_size: int) -> None:
        self.loader = loader
        self._world_size = world_size
        self.start_epoch(-1)

    @property
    def checksum(self) -> int:
        """The checksum of the latest order that was drawn; 0 if none is."""
        return 0 if self.sampler is None else self.sampler.fingerprint

    def start_epoch(self, epoch: int) -> None:
        """Make the next iterators start at the beginning of an epoch."""
        self.epoch = epoch
        self.start = 0
        # Iterators that have started in this epoch. With a second one, the loader has begun
        # again beside a longer one.
        self._iterators = 0

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
        return {"identity": self._identity(), "at": None, "state": None}

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

    def _identity(self) -> dict[str, Any]:
        """Return the properties, by name, with which a place has the same meaning."""
        return {"kind": "unknown"}

    def _restore(self, state: Any, checksum: int) -> str | None:
        """Prepare the next iterator to begin at ``start``; return the problem, if any."""
        raise NotImplementedError


def _difference(before: Mapping[str, Any], identity: Mapping[str, Any]) -> str | None:
    """Return the problem if an identity differs from that in a checkpoint."""
    for name, now in identity.items():
        if now != before.get(name):
            return (
                f"has another {name} than when the checkpoint was saved ({before.get(name)},"
                f" now {now}); resume with the same"
            )
    return None


def position_of(loader: Any, read_ahead: int, world_size: int) -> Position:
    """Return the position in a loader, of the class that the loader allows.

    The loader's index sampler may be replaced. ``read_ahead`` is the number of batches
    that may be read, but not be done, at a checkpoint.
    """
    if is_stateful(loader):
        return StatePosition(loader, read_ahead, world_size)
    index_sampler = index_sampler_of(loader)
    if not yields_in_order(loader) or length_or_inf(index_sampler) == float("inf"):
        return Position(loader, world_size)
    batches = index_sampler if type(index_sampler) is BatchSampler else None
    sampler = global_order_of(loader)
    if sampler is None or (batches is None and index_sampler is not sampler):
        # The order is that of a user's sampler, or of a user's batch sampler over ours.
        batches = None
        sampler = RankOrderSampler(index_sampler)
        read_instead(loader, sampler)
    return SamplerPosition(loader, sampler, batches, world_size)


def global_order_of(loader: Any) -> GlobalOrderSampler | None:
    """Return our sampler that a loader or its batch sampler has, or ``None``."""
    index_sampler = index_sampler_of(loader)
    samplers = (index_sampler, getattr(index_sampler, "sampler", None))
    return next((each for each in samplers if isinstance(each, GlobalOrderSampler)), None)


class SamplerPosition(Position):
    """Places in a loader that reads one of our samplers, in items that its ranks have read.

    Args:
        loader: the loader.
        sampler: our sampler.
        batches: groups the sampler's items; ``None`` if each of them is a batch.
        world_size: the number of ranks.
    """

    unknown_place = _UNKNOWN_PLACE
    sampler: GlobalOrderSampler

    def __init__(
        self,
        loader: Any,
        sampler: GlobalOrderSampler,
        batches: BatchSampler | None,
        world_size: int,
    ) -> None:
        self.sampler = sampler
        self._batches = batches
        super().__init__(loader, world_size)

    @override
    def start_epoch(self, epoch: int) -> None:
        super().start_epoch(epoch)
        self.sampler.drawn_order = None
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
    def iterate(self) -> Iterator[Any]:
        self._draw_order()
        self.sampler.position = 0 if self._iterators else self.start
        return super().iterate()

    def _draw_order(self) -> None:
        """Draw the order that the next iterator reads, unless that is done."""
        self.sampler.epoch = self.epoch  # a hook may have set another number
        if self.sampler.drawn_order is None:
            self.sampler.drawn_order = self.sampler.compute_order()

    @override
    def left(self, place: int) -> float:
        items = len(self.sampler.shard(place))
        drops_rest = getattr(self._batches, "drop_last", False)
        return items // self._batch_size if drops_rest else -(-items // self._batch_size)

    @override
    def state_after(self, batches: int) -> dict[str, Any]:
        at = self.sampler.shard(self.start).position_after(batches * self._batch_size)
        is_known = self._iterators <= 1 and self._batch_size == self._size_at_start
        return {**super().state_after(batches), "at": at if is_known else None}

    @override
    def _restore(self, state: Any, checksum: int) -> str | None:
        self._draw_order()
        return None if self.checksum == checksum else _OTHER_ORDER


class StatePosition(Position):
    """Places in a loader with a state, in batches of this rank.

    The loader's state is that after the latest batch that was read. Batches may be read
    that are not done at a checkpoint, so the states before them are kept.

    Args:
        loader: the loader.
        read_ahead: the number of batches that may be read, but not be done.
        world_size: the number of ranks.
    """

    unknown_place = _UNKNOWN_PLACE

    def __init__(self, loader: Any, read_ahead: int, world_size: int) -> None:
        super().__init__(loader, world_size)
        self._read_ahead = read_ahead

    @override
    def start_epoch(self, epoch: int) -> None:
        super().start_epoch(epoch)
        self._states: dict[int, Any] = {}  # of the loader, by place

    @override
    def _identity(self) -> dict[str, Any]:
        return {
            "kind": "state",
            "number of ranks": self._world_size,
            "number of samples": length_or_inf(getattr(self.loader, "dataset", None)),
            "number of workers": getattr(self.loader, "num_workers", 0),
        }

    @override
    def iterate(self) -> Iterator[Any]:
        is_restored = self._iterators == 0 and self.start > 0
        if is_restored:
            self.loader.load_state_dict(self._states[self.start])
        return self._count(super().iterate(), is_restored)

    def _count(self, batches: Iterator[Any], is_restored: bool) -> Iterator[Any]:
        """Keep the state after each batch, since it may be read before it is done."""
        length = length_or_inf(self.loader)
        for read, batch in enumerate(each_of(batches), self.start + 1):
            self._states[read] = self.loader.state_dict()
            self._states.pop(read - self._read_ahead, None)
            if is_restored and read == length:
                # Lightning does not request the end, and until then some loaders, such as
                # litdata's, begin again at a restored state.
                next(batches, None)
            yield batch

    @override
    def state_after(self, batches: int) -> dict[str, Any]:
        at = self.start + batches
        return {
            **super().state_after(batches),
            "at": at if self._iterators <= 1 else None,
            "state": self._states.get(at),
        }

    @override
    def _restore(self, state: Any, checksum: int) -> str | None:
        self._states = {self.start: state}
        return self.unknown_place if state is None else None
