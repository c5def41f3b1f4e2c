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
from math import inf
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from typing_extensions import override

from lightning_ddp_ext.data.epochs import samplers_below
from lightning_ddp_ext.data.even_batches import AHEAD
from lightning_ddp_ext.data.fingerprints import Trace, checksum_of_indices
from lightning_ddp_ext.data.global_order import GlobalOrderSampler, Order
from lightning_ddp_ext.data.loader_properties import index_sampler_of, is_stateful, length_or_inf
from lightning_ddp_ext.data.position import (
    IteratorStart,
    LoaderPosition,
    LoaderState,
)
from lightning_ddp_ext.data.resampled import make_permanent
from lightning_ddp_ext.data.seeding import mix
from lightning_ddp_ext.data.worker_seed import workers_seeded_by

# Not a fingerprint: after batches of different sizes, the position is unknown.
_UNKNOWN_ORDER = -1
# torch's samplers that draw their order.
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
    elif _reads_finite_sampler(loader):
        kind = OrderPosition if _reads_in_order(loader) else IndexPosition
    return kind(loader, world_size=world_size, remembered=remembered)


def _reads_finite_sampler(loader: Any) -> bool:
    """Whether a loader reads a sampler whose length is known.

    A class with another ``__iter__`` may not use its sampler.
    """
    has_length = length_or_inf(index_sampler_of(loader)) < inf
    return has_length and type(loader).__iter__ is DataLoader.__iter__


def _reads_in_order(loader: Any) -> bool:
    """Whether a loader reads one of our samplers from its beginning to its end."""
    index_sampler = index_sampler_of(loader)
    sampler = global_order_of(loader)
    return sampler is not None and (index_sampler is sampler or type(index_sampler) is BatchSampler)


def global_order_of(loader: Any) -> GlobalOrderSampler | None:
    """Return our sampler that a loader or its batch sampler has, or ``None``."""
    index_sampler = index_sampler_of(loader)
    samplers = (index_sampler, getattr(index_sampler, "sampler", None))
    return next((each for each in samplers if isinstance(each, GlobalOrderSampler)), None)


def rewind(loader: Any) -> None:
    """Move our samplers in a loader to the beginning of the epoch."""
    for sampler in samplers_below(index_sampler_of(loader)):
        if isinstance(sampler, GlobalOrderSampler):
            sampler.resume_at(sampler.epoch, 0)


def _start_within_epoch(position: LoaderPosition) -> Iterator[Any]:
    """Start an iterator over a ``DataLoader`` in the middle of an epoch.

    Its workers draw other numbers than those that read the earlier batches did. No
    other generator is used, because the sampler may draw more numbers later.
    """
    seeds = torch.Generator()
    seeds.manual_seed(mix(torch.initial_seed(), position.epoch, position.batches_given))
    with workers_seeded_by(position.loader, seeds):
        return iter(position.loader)


class OrderPosition(LoaderPosition):
    """Global position in a loader with one of our samplers, for any number of ranks."""

    kind = "order"

    def __init__(self, loader: Any, **options: Any) -> None:
        super().__init__(loader, **options)
        sampler = global_order_of(loader)
        assert sampler is not None
        self._sampler = sampler

    @property
    def _batch_size(self) -> int:
        """The number of items in a batch, which users may change in an epoch.

        It is 1 if the loader reads the sampler's items one by one.
        """
        return int(getattr(index_sampler_of(self.loader), "batch_size", 1))

    @override
    def _begin(self, start: IteratorStart) -> Iterator[Any]:
        return self._redraw(start)()

    @override
    def _redraw(self, start: IteratorStart) -> Callable[[], Iterator[Any]]:
        self._sampler.set_epoch(self.epoch)
        order = self._sampler.compute_order()
        start.trace = Trace(earlier=self._sampler.fingerprint_of(order))
        start.batch_size = self._batch_size
        return partial(self._read_from, start.position, order)

    def _read_from(self, position: int, order: Order) -> Iterator[Any]:
        self._sampler.resume_at(self.epoch, position)
        self._sampler.drawn_order = order
        return _start_within_epoch(self) if position else iter(self.loader)

    @override
    def _drawn_by(self, start: IteratorStart, position: int) -> int | None:
        has_same_batch_size = start.batch_size in (None, self._batch_size)
        return super()._drawn_by(start, position) if has_same_batch_size else _UNKNOWN_ORDER

    @override
    def _position(self, start: IteratorStart, batches: int) -> int:
        batch_size = start.batch_size or self._batch_size
        return self._sampler.shard(start.position).position_after(batches * batch_size)

    @override
    def shared(self) -> dict[str, Any]:
        return self._sampler.identity()

    @override
    def left_after(self, position: int) -> float:
        items = len(self._sampler.shard(position))
        if getattr(index_sampler_of(self.loader), "drop_last", False):
            return items // self._batch_size
        return -(-items // self._batch_size)

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
        samplers = samplers_below(index_sampler_of(loader))
        self.is_by_rank = any(isinstance(sampler, DRAWING) for sampler in samplers)
        self.prefetched = loader.num_workers * (loader.prefetch_factor or 0)
        self._sampler = make_permanent(loader)

    @override
    def _begin(self, start: IteratorStart) -> Iterator[Any]:
        self._sampler.draw_next_by(partial(self._record_and_draw, start))
        return iter(self.loader)

    def _record_and_draw(self, start: IteratorStart) -> Iterator[Any]:
        self._record(start)
        return self._draw(start)

    def _draw(self, start: IteratorStart) -> Iterator[Any]:
        """Yield the indices of each batch of an epoch."""
        return start.trace.follow(iter(self._sampler.batch_sampler), checksum_of_indices)

    @override
    def _redraw(self, start: IteratorStart) -> Callable[[], Iterator[Any]]:
        self._restore(start.random_states)
        indices = self._draw(start)
        self._drop(indices, start.position)
        return partial(self._read_rest, self._draw_ahead(start, indices))

    def _read_rest(self, indices: Iterator[Any]) -> Iterator[Any]:
        self._sampler.draw_next_by(lambda: indices)
        return _start_within_epoch(self)


class StatePosition(LoaderPosition):
    """Position in a loader with a state, which each save reads.

    By then the loader may have drawn more batches than training has used. A checkpoint
    therefore records an earlier state and the number of batches to drop after it, or
    from the beginning if it has no earlier state.
    """

    kind = "state"
    is_by_rank = True
    # The number of batches drawn from the newest iterator; ``None`` after its end.
    _batches_drawn: int | None = None
    # The iterator that continues from a restored state, until another one starts.
    _restored: Iterator[Any] | None = None
    # The number of batches that ``_restored`` yields.
    _batches_left = inf

    @override
    def state_dict(self, done: int, given_when_recorded: int) -> dict[str, Any]:
        start, batches = self._start_before(done)
        # After their end, some loaders return the state of a new beginning.
        if self._starts and self._batches_drawn is not None:
            self._record_loader_state(self._starts[-1], self._batches_drawn)
        earlier = [state for state in start.loader_states if state.batches <= batches]
        last = earlier[-1] if earlier else _epoch_beginning(start)
        # No later checkpoint needs an older state.
        start.loader_states = [
            state for state in start.loader_states if state.batches >= last.batches
        ]
        saved_state = {
            "state": last.content,
            "dropped": batches - last.batches,
            "drawn": last.fingerprint,
        }
        return {**super().state_dict(done, given_when_recorded), "own": saved_state}

    def _record_loader_state(self, start: IteratorStart, batches: int) -> None:
        fingerprint = start.trace.fingerprint_after(start.position + batches)
        start.loader_states.append(LoaderState(batches, self.loader.state_dict(), fingerprint))

    @override
    def _begin(self, start: IteratorStart) -> Iterator[Any]:
        if self._restored is not None and self._batches_drawn == self._batches_left:
            # Some loaders, such as litdata's, forget a restored state only at the end.
            next(self._restored, None)
        self._restored = None
        rewind(self.loader)  # an earlier iterator of this epoch may have continued in the middle
        return self._count_drawn(super()._begin(start))

    @override
    def _redraw(self, start: IteratorStart) -> Callable[[], Iterator[Any]]:
        saved = start.saved_state
        state = _epoch_beginning(start)
        if saved is not None:
            state = LoaderState(-saved["dropped"], saved["state"], saved["drawn"])
        start.loader_states = [state]
        drawn_before = start.position + state.batches
        start.trace = Trace(self._remembered + AHEAD, drawn_before, state.fingerprint or 0)
        if state.content is None:
            rewind(self.loader)
        else:
            start.random_states = []
            self.loader.load_state_dict(state.content)
        batches = self._count_drawn(self._read_again(start, -state.batches))
        if state.content is not None:
            self._restored = batches
            self._batches_left = length_or_inf(self.loader) - start.position
        rest = self._draw_ahead(start, batches)
        return lambda: rest

    def _count_drawn(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._batches_drawn = 0
        for drawn, batch in enumerate(batches, start=1):
            self._batches_drawn = drawn
            yield batch
        self._batches_drawn = None


def _epoch_beginning(start: IteratorStart) -> LoaderState:
    """Return the state of a loader that has drawn nothing in the epoch."""
    return LoaderState(-start.position, content=None, fingerprint=0)
