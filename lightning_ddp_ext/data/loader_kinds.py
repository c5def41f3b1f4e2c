"""Start an iterator in the middle of an epoch in the quickest way that the loader allows.

There are four ways, from quick to slow: one of our samplers starts at a position in the global order, on any number of
ranks; another sampler skips indices; a loader with a state restores that state; with anything else, batches are read
and dropped, see ``position``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from math import inf
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from typing_extensions import override

from lightning_ddp_ext.data.epochs import samplers_below
from lightning_ddp_ext.data.global_order import GlobalOrderSampler
from lightning_ddp_ext.data.loader import batches_of, index_sampler_of, is_stateful, make_permanent
from lightning_ddp_ext.data.position import IteratorStart, LoaderPosition
from lightning_ddp_ext.data.seeding import workers_seeded_apart

DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def position_of(loader: Any, *, world_size: int, remembered: int) -> LoaderPosition:
    """Return a loader's position, of the class that starts an iterator most quickly in the middle of an epoch.

    Args:
        loader: one of our loaders, whose index sampler may be replaced.
        world_size: see :class:`LoaderPosition`.
        remembered: see :class:`LoaderPosition`.
    """
    kind: type[LoaderPosition] = LoaderPosition
    if is_stateful(loader):
        kind = StatePosition
    elif batches_of(index_sampler_of(loader)) < inf and type(loader).__iter__ is DataLoader.__iter__:
        # A class with another ``__iter__`` may not use its sampler.
        kind = IndexPosition if global_order_of(loader) is None else OrderPosition
    return kind(loader, world_size=world_size, remembered=remembered)


def global_order_of(loader: Any) -> GlobalOrderSampler | None:
    """Return the sampler that a loader reads if it is one of ours, otherwise ``None``."""
    sampler = index_sampler_of(loader)
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return sampler if isinstance(sampler, GlobalOrderSampler) else None


def rewind(loader: Any) -> None:
    """Move our samplers in a loader to the beginning of the epoch, even if training is in the middle of it."""
    for sampler in samplers_below(index_sampler_of(loader)):
        if isinstance(sampler, GlobalOrderSampler):
            sampler.resume_at(sampler.epoch, 0)


class OrderPosition(LoaderPosition):
    """Position in a loader with one of our samplers: a global position, valid for any number of ranks."""

    kind = "order"

    def __init__(self, loader: Any, **options: Any) -> None:
        super().__init__(loader, **options)
        sampler = global_order_of(loader)
        assert sampler is not None
        self._sampler = sampler
        index_sampler = index_sampler_of(loader)
        self._batch_size = 1 if index_sampler is sampler else index_sampler.batch_size  # counted in sampler items

    @override
    def _begin(self, start: IteratorStart) -> Iterator[Any]:
        self._sampler.resume_at(self.epoch, start.at)
        return iter(self.loader)

    _resume = _begin

    @override
    def _position(self, start: IteratorStart, batches: int) -> int:
        return self._sampler.shard(start.at).position_after(batches * self._batch_size)

    @override
    def left_after(self, position: int) -> float:
        left = len(self._sampler.shard(position))
        is_cut = getattr(index_sampler_of(self.loader), "drop_last", False)
        return left // self._batch_size if is_cut else -(-left // self._batch_size)

    @override
    def _description(self) -> dict[str, Any]:
        return {"loader": self.kind, **self._sampler.identity()}


class IndexPosition(LoaderPosition):
    """Position in a loader with another sampler that has a length: indices are skipped without reading samples."""

    kind = "indices"

    def __init__(self, loader: Any, **options: Any) -> None:
        super().__init__(loader, **options)
        self.is_by_rank = any(isinstance(each, DRAWING) for each in samplers_below(index_sampler_of(loader)))
        self._sampler = make_permanent(loader)

    @override
    def _begin(self, start: IteratorStart) -> Iterator[Any]:
        def draw() -> Iterator[Any]:
            self._record(start)
            return iter(self._sampler.batch_sampler)

        self._sampler.draw_next_by(draw)
        return iter(self.loader)

    @override
    def _resume(self, start: IteratorStart) -> Iterator[Any]:
        self._restore(start.random)
        order = iter(self._sampler.batch_sampler)
        self._drop(order, start.at)
        ahead = list(islice(order, start.own or 0))  # drawn before the random states were saved; the rest was not
        self._sampler.draw_next_by(lambda: chain(ahead, order))
        with workers_seeded_apart(self.loader, self.epoch, self.given):  # the sampler may draw more numbers later
            return iter(self.loader)

    @override
    def state_dict(self, done: int, given: int) -> dict[str, Any]:
        start, batches = self._start_before(done)
        prefetched = self.loader.num_workers * (self.loader.prefetch_factor or 0)
        if given < start.after + batches:  # recorded before this position, as when the first loader ended earlier
            given = self.given
        return {**super().state_dict(done, given), "own": given + self.ahead - start.after - batches + prefetched}


class StatePosition(LoaderPosition):
    """Position in a loader with a state, which each save reads.

    By then the loader may have drawn more batches than training has used. A checkpoint therefore records an earlier
    state and the number of batches to drop after it, or from the beginning if it has no earlier state.
    """

    kind = "state"
    is_by_rank = True
    _drawn: int | None = None  # number of batches drawn from the newest iterator; ``None`` after its end

    @override
    def state_dict(self, done: int, given: int) -> dict[str, Any]:
        start, batches = self._start_before(done)
        if self._starts and self._drawn is not None:  # some loaders start again after their end
            self._starts[-1].states.append((self._drawn, self.loader.state_dict()))
        known = [each for each in start.states if each[0] <= batches]
        drawn, state = known[-1] if known else (-start.at, None)
        start.states = [each for each in start.states if each[0] >= drawn]  # no later checkpoint needs an older state
        return {**super().state_dict(done, given), "own": {"state": state, "dropped": batches - drawn}}

    @override
    def _begin(self, start: IteratorStart) -> Iterator[Any]:
        rewind(self.loader)  # an earlier iterator of this epoch may have continued in the middle
        return self._count_drawn(super()._begin(start))

    @override
    def _resume(self, start: IteratorStart) -> Iterator[Any]:
        # If no state of this rank was saved, Lightning has loaded rank 0's state, or none.
        state, dropped = (None, 0) if start.own is None else (start.own["state"], start.own["dropped"])
        if state is None:
            rewind(self.loader)
        else:
            start.states, start.random = [(-dropped, state)], []
            self.loader.load_state_dict(state)
        return self._count_drawn(self._redraw(start, dropped))

    def _count_drawn(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._drawn = 0
        for drawn, batch in enumerate(batches, start=1):
            self._drawn = drawn
            yield batch
        self._drawn = None
