"""Start an iterator in the middle of an epoch as quickly as the loader allows.

A loader with a state restores that state, because it may include more than an order,
such as the state of its dataset. There are three other ways, from quick to slow: one of
our samplers starts at a position in the global order, on any number of ranks; another
sampler with a length skips indices; with anything else, batches are read and dropped,
see ``position``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from math import inf
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from typing_extensions import override

from lightning_ddp_ext.data.epochs import samplers_below
from lightning_ddp_ext.data.fingerprints import Trace, fingerprint_of_data
from lightning_ddp_ext.data.global_order import GlobalOrderSampler
from lightning_ddp_ext.data.loader import batches_of, index_sampler_of, is_stateful, make_permanent
from lightning_ddp_ext.data.position import IteratorStart, LoaderPosition, LoaderState
from lightning_ddp_ext.data.seeding import workers_seeded_apart
from lightning_ddp_ext.data.shortest import AHEAD

DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def position_of(loader: Any, *, world_size: int, remembered: int) -> LoaderPosition:
    """Return a loader's position, of the class that resumes its epoch.

    Args:
        loader: one of our loaders, whose index sampler may be replaced.
        world_size: see :class:`LoaderPosition`.
        remembered: see :class:`LoaderPosition`.
    """
    kind: type[LoaderPosition] = LoaderPosition
    if is_stateful(loader):
        kind = StatePosition
    elif (
        batches_of(index_sampler_of(loader)) < inf and type(loader).__iter__ is DataLoader.__iter__
    ):
        # A class with another ``__iter__`` may not use its sampler, and the wrapper that
        # skips indices has a length.
        kind = IndexPosition if global_order_of(loader) is None else OrderPosition
    return kind(loader, world_size=world_size, remembered=remembered)


def global_order_of(loader: Any) -> GlobalOrderSampler | None:
    """Return the sampler that a loader reads if it is one of ours, or ``None``."""
    sampler = index_sampler_of(loader)
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return sampler if isinstance(sampler, GlobalOrderSampler) else None


def rewind(loader: Any) -> None:
    """Move our samplers in a loader to the beginning of the epoch."""
    for sampler in samplers_below(index_sampler_of(loader)):
        if isinstance(sampler, GlobalOrderSampler):
            sampler.resume_at(sampler.epoch, 0)


class OrderPosition(LoaderPosition):
    """Global position in a loader with one of our samplers, for any number of ranks."""

    kind = "order"

    def __init__(self, loader: Any, **options: Any) -> None:
        super().__init__(loader, **options)
        sampler = global_order_of(loader)
        assert sampler is not None
        self._sampler = sampler
        index_sampler = index_sampler_of(loader)
        self._batches = None if index_sampler is sampler else index_sampler
        self._data = fingerprint_of_data(loader.dataset)

    @property
    def _batch_size(self) -> int:
        """The number of items in a batch, which users may change in an epoch."""
        return 1 if self._batches is None else int(self._batches.batch_size)

    @override
    def _begin(self, start: IteratorStart) -> Iterator[Any]:
        return self._redraw(start)()

    @override
    def _redraw(self, start: IteratorStart) -> Callable[[], Iterator[Any]]:
        order, start.order = self._sampler.draw(self.epoch)
        start.drawn = self._trace()

        def read() -> Iterator[Any]:
            self._sampler.resume_at(self.epoch, start.at)
            self._sampler.next_order = order
            # With drop_last, torch reads the batch size once, when an epoch begins.
            is_fixed = getattr(self._batches, "drop_last", True)
            fixed_size = self._batch_size if is_fixed else None
            self._sampler.next_size = partial(self._record_next_size, start, fixed_size)
            return iter(self.loader)

        return read

    def _record_next_size(self, start: IteratorStart, fixed_size: int | None) -> int:
        """Record the size of the batch that begins, and return it."""
        return start.drawn.add_size(fixed_size or self._batch_size)

    @override
    def _drawn_by(self, start: IteratorStart, position: int) -> int | None:
        return start.order

    @override
    def _position(self, start: IteratorStart, batches: int) -> int:
        items = start.drawn.size_after(batches)
        return self._sampler.shard(start.at).position_after(
            batches * self._batch_size if items is None else items
        )

    @override
    def shared(self) -> dict[str, Any]:
        order = self._starts[-1].order if self._starts else None
        return {**self._sampler.identity(), "order": order, "data": self._data}

    @override
    def left_after(self, position: int) -> float:
        left = len(self._sampler.shard(position))
        is_cut = getattr(index_sampler_of(self.loader), "drop_last", False)
        return left // self._batch_size if is_cut else -(-left // self._batch_size)

    @override
    def _description(self) -> dict[str, Any]:
        return {"loader": self.kind, **self._sampler.identity()}


class IndexPosition(LoaderPosition):
    """Position in a loader with another sampler that has a length.

    Indices are skipped without reading samples.
    """

    kind = "indices"

    def __init__(self, loader: Any, **options: Any) -> None:
        super().__init__(loader, **options)
        self.is_by_rank = any(
            isinstance(each, DRAWING) for each in samplers_below(index_sampler_of(loader))
        )
        self._sampler = make_permanent(loader)

    @override
    def _begin(self, start: IteratorStart) -> Iterator[Any]:
        def draw() -> Iterator[Any]:
            self._record(start)
            return start.drawn.follow_indices(iter(self._sampler.batch_sampler))

        self._sampler.draw_next_by(draw)
        return iter(self.loader)

    @override
    def _redraw(self, start: IteratorStart) -> Callable[[], Iterator[Any]]:
        self._restore(start.random)
        start.drawn = self._trace()
        order = start.drawn.follow_indices(iter(self._sampler.batch_sampler))
        self._drop(order, start.at)
        # Drawn before the random states were saved; the rest was not.
        ahead = list(islice(order, start.own or 0))

        def read() -> Iterator[Any]:
            self._sampler.draw_next_by(lambda: chain(ahead, order))
            with workers_seeded_apart(self.loader, self.epoch, self.given):
                # The sampler may draw more numbers later.
                return iter(self.loader)

        return read

    @override
    def state_dict(self, done: int, given: int) -> dict[str, Any]:
        start, batches = self._start_before(done)
        if given < start.after + batches:
            # Recorded before this position, as when the first loader ended earlier.
            given = self.given
        # The batches that the iterator had drawn when the random states were recorded,
        # less those that are done.
        ahead = given + self.ahead - start.after - batches + self._prefetched
        return {**super().state_dict(done, given), "own": ahead}


class StatePosition(LoaderPosition):
    """Position in a loader with a state, which each save reads.

    By then the loader may have drawn more batches than training has used. A checkpoint
    therefore records an earlier state and the number of batches to drop after it, or
    from the beginning if it has no earlier state.
    """

    kind = "state"
    is_by_rank = True
    # Number of batches drawn from the newest iterator; ``None`` after its end.
    _drawn: int | None = None
    # The newest iterator, if it continues from a restored state.
    _restored: Iterator[Any] | None = None
    # Number of batches that it yields.
    _left = inf

    @override
    def state_dict(self, done: int, given: int) -> dict[str, Any]:
        start, batches = self._start_before(done)
        if self._starts and self._drawn is not None:  # some loaders start again after their end
            latest = self._starts[-1]
            fingerprint = latest.drawn.fingerprint_after(latest.at + self._drawn)
            latest.states.append(LoaderState(self._drawn, self.loader.state_dict(), fingerprint))
        known = [each for each in start.states if each.drawn <= batches]
        last = known[-1] if known else LoaderState(-start.at, None, 0)
        # No later checkpoint needs an older state.
        start.states = [each for each in start.states if each.drawn >= last.drawn]
        own = {
            "state": last.content,
            "dropped": batches - last.drawn,
            "drawn": last.fingerprint,
        }
        return {**super().state_dict(done, given), "own": own}

    @override
    def _begin(self, start: IteratorStart) -> Iterator[Any]:
        if self._restored is not None and self._drawn == self._left:
            # Some loaders, such as litdata's, forget a restored state only at the end.
            next(self._restored, None)
        self._restored = None
        rewind(self.loader)  # an earlier iterator of this epoch may have continued in the middle
        return self._count_drawn(super()._begin(start))

    @override
    def _redraw(self, start: IteratorStart) -> Callable[[], Iterator[Any]]:
        # Without a saved state of this rank, Lightning has loaded rank 0's or none.
        own = {"state": None, "dropped": 0, **(start.own or {})}
        dropped = own["dropped"]
        start.drawn = Trace(self._remembered + AHEAD, start.at - dropped, own.get("drawn") or 0)
        if own["state"] is None:
            rewind(self.loader)
        else:
            start.states = [LoaderState(-dropped, own["state"], own.get("drawn"))]
            start.random = []
            self.loader.load_state_dict(own["state"])
        batches = self._count_drawn(self._read_again(start, dropped))
        if own["state"] is not None:
            self._restored = batches
            self._left = batches_of(self.loader) - start.at
        return lambda: batches

    def _count_drawn(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._drawn = 0
        for drawn, batch in enumerate(batches, start=1):
            self._drawn = drawn
            yield batch
        self._drawn = None
