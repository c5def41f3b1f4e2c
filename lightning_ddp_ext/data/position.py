"""Draw the orders of a training loader from (seed, epoch), and continue at any place in them.

An order that follows from (seed, epoch) can be drawn again, so the place at which a run
continues is one number:

====================  ===============  ==============================================
Loader                Place            A resumed run
====================  ===============  ==============================================
with one of our       items that all   starts our sampler there, on any number of
samplers              ranks have read  ranks
over another sampler  batches of this  draws the order of (seed, epoch, keys) again,
                      rank             and skips indices
with a state          batches of this  restores the state
                      rank
any other             unknown          starts the epoch again
====================  ===============  ==============================================

The place after some more batches is arithmetic, so nothing is recorded while training
runs, except by a loader with a state that is read ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from typing_extensions import override

from lightning_ddp_ext.data.epochs import samplers_below
from lightning_ddp_ext.data.loader_properties import (
    each_of,
    index_sampler_of,
    is_stateful,
    length_or_inf,
)
from lightning_ddp_ext.data.proxy import make_permanent
from lightning_ddp_ext.data.random_state import (
    generators_of,
    keys_of,
    mix,
    preserve_random_state,
    record_random_state,
    restore_random_state,
    seeded,
)
from lightning_ddp_ext.data.samplers import (
    GlobalOrderSampler,
    checksum_of,
    copy_of_collection,
)

_BLOCK = 64  # batches that are drawn at a time, because changing random states is slow
_OTHER_ORDER = "draws another order than before the checkpoint was saved"


@dataclass
class OrderOfRank:
    """What determines this rank's orders.

    Attributes:
        seed: the seed for the order of samples, the same on all ranks.
        keys: those of the global generators when training began, see
            :func:`~.random_state.keys_of`. Ranks with equal ones draw equal orders,
            because a user's sampler may take its part of an order that all ranks draw.
        rank: this rank.
        world_size: the number of ranks.
        loader: the number of the loader among the training loaders, from 0. Each draws
            another order.
    """

    seed: int
    keys: list[int]
    rank: int
    world_size: int
    loader: int


class Position:
    """Places in the epochs of a loader, which is read from its beginning only.

    Args:
        loader: one of our loaders, whose index sampler may be replaced.
        ranks: what determines this rank's orders.
        read_ahead: how many batches may be read, but not be done, at a checkpoint.

    Attributes:
        reason: why an epoch cannot continue in its middle; ``None`` if it can.
    """

    reason: str | None = "yields batches in an order that cannot be drawn again"

    def __init__(self, loader: Any, ranks: OrderOfRank, read_ahead: int) -> None:
        self.loader = loader
        self._ranks = ranks
        self._read_ahead = read_ahead

    def iterate(self, epoch: int, number: int, place: int) -> Iterator[Any]:
        """Start an iterator at a place, the one after ``number`` others in the epoch."""
        return iter(self.loader)

    def after(self, place: int, batches: int) -> int:
        """Return the place that is reached from another one after some batches."""
        return place + batches

    def left(self, place: int) -> float:
        """Return how many batches this rank reads from a place to the end."""
        return length_or_inf(self.loader) - place

    def state_at(self, epoch: int, number: int, place: int) -> dict[str, Any] | None:
        """Return what :meth:`restore` needs to find a place again; ``None`` if unknown.

        The place is in the iterator after ``number`` others in the epoch.
        """
        return None

    def restore(self, epoch: int, number: int, place: int, state: dict[str, Any]) -> str | None:
        """Prepare to start the next iterator at a place; return why that is impossible.

        Args:
            epoch: the epoch.
            number: the number of earlier iterators in the epoch.
            place: the place in the iterator.
            state: what :meth:`state_at` returned, and not ``None``.
        """
        return self.reason


def position_of(loader: Any, ranks: OrderOfRank, read_ahead: int) -> Position:
    """Return the position in a loader, of the class that the loader allows."""
    kind: type[Position] = Position
    if is_stateful(loader):
        kind = StatePosition
    elif type(loader).__iter__ is DataLoader.__iter__ and _yields_in_order(loader):
        kind = SamplerPosition if _reads_our_sampler(loader) else IndexPosition
    return kind(loader, ranks, read_ahead)


def _yields_in_order(loader: DataLoader[Any]) -> bool:
    """Whether a loader yields the batches of a map-style dataset in their drawn order."""
    has_order = loader.num_workers == 0 or getattr(loader, "in_order", True)
    return has_order and index_sampler_of(loader) is not None


def _reads_our_sampler(loader: DataLoader[Any]) -> bool:
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


class SamplerPosition(Position):
    """Places in a loader with one of our samplers, in items that all ranks have read."""

    reason = None
    _size_at_start = 0

    @property
    def _sampler(self) -> GlobalOrderSampler:
        sampler = global_order_of(self.loader)
        assert sampler is not None
        return sampler

    @property
    def _batch_size(self) -> int:
        """The number of items in a batch; 1 if the sampler yields whole batches."""
        return int(getattr(index_sampler_of(self.loader), "batch_size", 1))

    @override
    def iterate(self, epoch: int, number: int, place: int) -> Iterator[Any]:
        if (self._sampler.epoch, self._sampler.position) != (epoch, place):
            self._sampler.resume_at(epoch, place)
        self._size_at_start = self._batch_size
        return iter(self.loader)

    @override
    def after(self, place: int, batches: int) -> int:
        return self._sampler.shard(place).position_after(batches * self._batch_size)

    @override
    def left(self, place: int) -> float:
        items = len(self._sampler.shard(min(place, self._sampler.length)))
        drops_rest = getattr(index_sampler_of(self.loader), "drop_last", False)
        return items // self._batch_size if drops_rest else -(-items // self._batch_size)

    @override
    def state_at(self, epoch: int, number: int, place: int) -> dict[str, Any] | None:
        if self._batch_size != self._size_at_start:  # a hook has changed it
            return None
        return {**self._sampler.identity(), "drawn": self._sampler.fingerprint}

    @override
    def restore(self, epoch: int, number: int, place: int, state: dict[str, Any]) -> str | None:
        if state.get("length") != self._sampler.length:
            return f"had {state.get('length')} items, and now has {self._sampler.length}"
        self._size_at_start = self._batch_size
        self._sampler.resume_at(epoch, place)
        self._sampler.drawn_order = self._sampler.compute_order()
        own = {**self._sampler.identity(), "drawn": self._sampler.fingerprint}
        return None if state == own else _OTHER_ORDER


class IndexPosition(Position):
    """Places in a loader over another sampler, in batches of this rank."""

    reason = None

    def __init__(self, loader: Any, ranks: OrderOfRank, read_ahead: int) -> None:
        super().__init__(loader, ranks, read_ahead)
        every = keys_of(*samplers_below(index_sampler_of(loader)))
        self._keys = every[len(ranks.keys) :]  # of the generators in samplers
        self._sampler = make_permanent(loader)
        self._order: DrawnOrder | None = None
        self._restored: Iterator[Any] | None = None

    def _order_of(self, epoch: int, number: int) -> DrawnOrder:
        """Return the order of an iterator: the one that is being drawn, or a new one."""
        seed = mix(self._ranks.seed, epoch, number, self._ranks.loader)
        if self._order is not None and self._order.seed == seed:
            return self._order
        keys = [*self._ranks.keys, *self._keys]
        return DrawnOrder(self._sampler.batch_sampler, seed, keys)

    @override
    def iterate(self, epoch: int, number: int, place: int) -> Iterator[Any]:
        indices = self._restored
        self._restored = None
        if indices is None:
            self._order = None  # the epoch may start again
            self._order = self._order_of(epoch, number)
            indices = iter(self._order)
        self._sampler.draw_next_by(lambda: indices)
        return iter(self.loader)

    @override
    def state_at(self, epoch: int, number: int, place: int) -> dict[str, Any]:
        order = self._order_of(epoch, number)
        if order is not self._order:  # this iterator has ended
            deque(islice(order, place), maxlen=0)
        ranks = self._ranks
        drawn = {"blocks": order.blocks, "drawn": order.fingerprint}
        return {"rank": ranks.rank, "ranks": ranks.world_size, **drawn}

    @override
    def restore(self, epoch: int, number: int, place: int, state: dict[str, Any]) -> str | None:
        if state.get("ranks") != self._ranks.world_size:
            now = self._ranks.world_size
            return f"was read by {state.get('ranks')} ranks, and is now read by {now}"
        order = self._order_of(epoch, number)
        is_own = state["rank"] == self._ranks.rank  # and not of a rank that saved alone
        # On all ranks, because a user's sampler may make collective calls.
        blocks = list(islice(order.rest, state["blocks"]))
        if is_own and order.fingerprint != state["drawn"]:
            return _OTHER_ORDER
        self._order = order
        self._restored = islice(chain(chain.from_iterable(blocks), order), place, None)
        return None


class StatePosition(Position):
    """Places in a loader with a state, in batches of this rank.

    The loader's state is that after the latest batch that was read. If batches may be
    read that are not done at a checkpoint, the states before them are kept.
    """

    reason = None

    def __init__(self, loader: Any, ranks: OrderOfRank, read_ahead: int) -> None:
        super().__init__(loader, ranks, read_ahead)
        self._states: deque[tuple[int, Any]] = deque(maxlen=read_ahead)
        self._read = 0  # batches in the newest iterator
        self._key = (-1, -1)  # its epoch, and the number of iterators before it
        self._restored: Iterator[Any] | None = None  # the latest that began within an epoch
        self._resumed_at: dict[str, Any] | None = None  # what it begins with, until it does

    @override
    def iterate(self, epoch: int, number: int, place: int) -> Iterator[Any]:
        if self._restored is not None and self._read == length_or_inf(self.loader):
            # Some loaders, such as litdata's, forget a restored state only at the end.
            next(self._restored, None)
        rewind(self.loader)
        self._resumed_at = None
        self._states.clear()
        self._key = (epoch, number)
        batches = self._count(iter(self.loader), place)
        self._restored = batches if place else None
        return batches

    @property
    def _owner(self) -> list[float]:
        """The rank, and what must be the same for the loader's state."""
        samples = length_or_inf(getattr(self.loader, "dataset", None))
        workers = getattr(self.loader, "num_workers", 0)
        return [self._ranks.rank, self._ranks.world_size, samples, workers]

    def _count(self, batches: Iterator[Any], place: int) -> Iterator[Any]:
        self._read = place
        self._keep_state()
        for batch in each_of(batches):
            self._read += 1
            yield batch
            self._keep_state()

    def _keep_state(self) -> None:
        if self._states.maxlen:
            self._states.append((self._read, self.loader.state_dict()))

    @override
    def state_at(self, epoch: int, number: int, place: int) -> dict[str, Any] | None:
        if self._resumed_at is not None:
            return self._resumed_at
        if self._key != (epoch, number):
            return None
        states = dict(self._states)
        if place == self._read:
            states[place] = self.loader.state_dict()
        return {"owner": self._owner, "state": states[place]} if place in states else None

    @override
    def restore(self, epoch: int, number: int, place: int, state: dict[str, Any]) -> str | None:
        if state.get("owner") != self._owner:
            return "has other data, workers or ranks than when the checkpoint was saved"
        self.loader.load_state_dict(state["state"])
        self._resumed_at = state
        return None


class DrawnOrder:
    """The indices that a sampler draws under a seed, in blocks.

    Outside of the draws, no generator changes.

    Args:
        sampler: yields indices, or batches of them.
        seed, keys: seed the global generators, and those of the samplers.

    Attributes:
        seed: the argument.
        rest: the blocks that are not drawn yet; the first one is drawn when requested.
        blocks: the number of blocks drawn.
        fingerprint: the checksum of all indices drawn.

    >>> from torch.utils.data import RandomSampler
    >>> first, again = [DrawnOrder(RandomSampler(range(9)), seed=1) for _ in range(2)]
    >>> list(first) == list(again), first.fingerprint == again.fingerprint
    (True, True)
    """

    def __init__(self, sampler: Iterable[Any], seed: int, keys: Sequence[int] = ()) -> None:
        self.seed = seed
        self.blocks = 0
        self.fingerprint = 0
        self.rest = self._draw(sampler, keys)

    def _draw(self, sampler: Iterable[Any], keys: Sequence[int]) -> Iterator[list[Any]]:
        owners = samplers_below(sampler)
        generators = generators_of(*owners)
        with seeded(self.seed, *owners, keys=keys):
            indices = map(copy_of_collection, iter(sampler))
            random_state = record_random_state(generators)
        while True:
            with preserve_random_state(generators):
                restore_random_state(random_state, generators)
                block = list(islice(indices, _BLOCK))
                random_state = record_random_state(generators)
            if not block:
                return
            self.blocks += 1
            self.fingerprint = checksum_of(block, self.fingerprint)
            yield block

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.rest)
