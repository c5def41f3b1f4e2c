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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from typing_extensions import override

from lightning_ddp_ext.data.epochs import samplers_below
from lightning_ddp_ext.data.proxy import (
    each_of,
    index_sampler_of,
    is_stateful,
    length_or_inf,
    make_permanent,
)
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

# Why a place is not found again, and the remedy.
_UNKNOWN_ORDER = (
    "yields batches in an order that cannot be drawn again; use a map-style dataset with a"
    " sampler that draws only from random, NumPy or torch, or a loader with a state, such as"
    " torchdata's StatefulDataLoader"
)
_OTHER_ORDER = (
    "draws another order than before the checkpoint was saved; resume with the same data, and"
    " with a sampler that draws only from random, NumPy or torch"
)
UNKNOWN_PLACE = (
    "was not at a known place when the checkpoint was saved, for example because a rank failed;"
    " use a map-style dataset with torch's DataLoader, or save at the end of an epoch"
)
_OTHER_OWNER = (
    "has other data, workers or ranks than when the checkpoint was saved; resume with the same"
)


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Place:
    """A place in the training data.

    Attributes:
        epoch: the epoch.
        number: the number of earlier iterators in the epoch. A loader that is combined
            with a longer one begins again.
        at: the place in the iterator, see the module.
    """

    epoch: int
    number: int = 0
    at: int = 0


class Position:
    """Finds places in the epochs of a loader, which is read from its beginning only.

    Args:
        loader: one of our loaders, whose index sampler may be replaced.

    Attributes:
        loader: the argument.
        ranks: what determines this rank's orders; set before the first epoch.
        kind: distinguishes the classes in a checkpoint.
        problem: why an epoch cannot continue in its middle, with the remedy; ``None`` if
            it can.
        checksum: that of the epoch's order on this rank, 0 before it is drawn; ``None``
            if ranks cannot differ.
    """

    ranks: OrderOfRank
    kind = "unknown"
    problem: str | None = _UNKNOWN_ORDER
    checksum: int | None = None

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def iterate(self, place: Place, state: Any = None) -> Iterator[Any]:
        """Start an iterator at a place; ``state`` is that of a place that was checked."""
        return iter(self.loader)

    def after(self, at: int, batches: int) -> int:
        """Return the place that an iterator reaches from another one after some batches."""
        return at + batches

    def left(self, at: int) -> float:
        """Return how many batches this rank reads from a place to an iterator's end."""
        return length_or_inf(self.loader) - at

    def state_at(self, place: Place) -> Any:
        """Return what :meth:`check` needs to find a place again; ``None`` if unknown."""
        return None

    def check(self, place: Place, state: Any, checksums: Sequence[int | None]) -> str | None:
        """Return why no iterator can start at a place, if so, with the remedy.

        Args:
            place: the place.
            state: what :meth:`state_at` returned, and not ``None``.
            checksums: of each rank that read the epoch before.
        """
        return self.problem


def position_of(loader: Any, read_ahead: int) -> Position:
    """Return the position in a loader, of the class that the loader allows.

    ``read_ahead`` is the number of batches that may be read, but not be done, at a
    checkpoint.
    """
    if is_stateful(loader):
        return StatePosition(loader, read_ahead)
    if type(loader).__iter__ is not DataLoader.__iter__ or not _yields_in_order(loader):
        return Position(loader)
    return SamplerPosition(loader) if _reads_our_sampler(loader) else IndexPosition(loader)


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

    kind = "our sampler"
    problem = None
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

    @property
    def _identity(self) -> dict[str, Any]:
        return {**self._sampler.identity(), "drawn": self._sampler.fingerprint}

    @override
    def iterate(self, place: Place, state: Any = None) -> Iterator[Any]:
        if (self._sampler.epoch, self._sampler.position) != (place.epoch, place.at):
            self._sampler.resume_at(place.epoch, place.at)
        self._size_at_start = self._batch_size
        return iter(self.loader)

    @override
    def after(self, at: int, batches: int) -> int:
        return self._sampler.shard(at).position_after(batches * self._batch_size)

    @override
    def left(self, at: int) -> float:
        items = len(self._sampler.shard(min(at, self._sampler.length)))
        drops_rest = getattr(index_sampler_of(self.loader), "drop_last", False)
        return items // self._batch_size if drops_rest else -(-items // self._batch_size)

    @override
    def state_at(self, place: Place) -> Any:
        has_one_size = self._batch_size == self._size_at_start  # unless a hook has changed it
        return self._identity if has_one_size else None

    @override
    def check(self, place: Place, state: Any, checksums: Sequence[int | None]) -> str | None:
        length = self._sampler.length
        if state["length"] != length:
            return f"had {state['length']} items, and now has {length}; resume with the same data"
        self._size_at_start = self._batch_size
        self._sampler.resume_at(place.epoch, place.at)
        self._sampler.drawn_order = self._sampler.compute_order()
        return None if state == self._identity else _OTHER_ORDER


class IndexPosition(Position):
    """Places in a loader over another sampler, in batches of this rank."""

    kind = "another sampler"
    problem = None
    checksum: int | None = 0

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._keys = keys_of(generators_of(*samplers_below(index_sampler_of(loader))))
        self._sampler = make_permanent(loader)
        self._checked: DrawnOrder | None = None

    def _draw(self, epoch: int, number: int) -> DrawnOrder:
        seed = mix(self.ranks.seed, epoch, number, self.ranks.loader)
        return draw_order(self._sampler.batch_sampler, seed, [*self.ranks.keys, *self._keys])

    @override
    def iterate(self, place: Place, state: Any = None) -> Iterator[Any]:
        order = self._checked
        self._checked = None
        if order is None or state is None:
            order = self._draw(place.epoch, place.number)
        if place.number == 0:
            self.checksum = order.checksum
        indices = islice(order.indices, place.at, None)
        self._sampler.draw_next_by(lambda: indices)
        return iter(self.loader)

    @override
    def state_at(self, place: Place) -> Any:
        return ()

    @override
    def check(self, place: Place, state: Any, checksums: Sequence[int | None]) -> str | None:
        before = len(checksums)
        if before != self.ranks.world_size:
            now = self.ranks.world_size
            return f"was read by {before} ranks, and is now read by {now}; resume on {before} ranks"
        # As often as before, since a sampler may count its iterators.
        orders = [self._draw(place.epoch, number) for number in range(place.number + 1)]
        self.checksum = orders[0].checksum
        self._checked = orders[-1]
        return None if self.checksum == checksums[self.ranks.rank] else _OTHER_ORDER


class StatePosition(Position):
    """Places in a loader with a state, in batches of this rank.

    The loader's state is that after the latest batch that was read. If batches may be
    read that are not done at a checkpoint, the states before them are kept.
    """

    kind = "a state"
    problem = None

    def __init__(self, loader: Any, read_ahead: int) -> None:
        super().__init__(loader)
        self._read_ahead = read_ahead
        self._newest = Place(-1)  # after the latest batch that was read
        self._states: dict[int, Any] = {}  # of the newest iterator, by place
        self._restored: Iterator[Any] | None = None  # the latest that began within an epoch

    @property
    def _owner(self) -> list[float]:
        """What must be the same for the loader's state, with the rank last."""
        samples = length_or_inf(getattr(self.loader, "dataset", None))
        workers = getattr(self.loader, "num_workers", 0)
        return [self.ranks.world_size, samples, workers, self.ranks.rank]

    @override
    def iterate(self, place: Place, state: Any = None) -> Iterator[Any]:
        if self._restored is not None and self._newest.at == length_or_inf(self.loader):
            # Some loaders, such as litdata's, forget a restored state only at the end.
            next(self._restored, None)
        if state is not None:
            self.loader.load_state_dict(state[1])
        rewind(self.loader)
        self._newest = place
        self._states = {}
        batches = self._count(iter(self.loader))
        self._restored = batches if place.at else None
        return batches

    def _count(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._keep_state()
        for batch in each_of(batches):
            self._newest = replace(self._newest, at=self._newest.at + 1)
            yield batch
            self._keep_state()

    def _keep_state(self) -> None:
        if self._read_ahead:
            self._states[self._newest.at] = self.loader.state_dict()
            self._states.pop(self._newest.at - self._read_ahead, None)

    @override
    def state_at(self, place: Place) -> Any:
        if place == self._newest and place.at not in self._states:
            return [self._owner, self.loader.state_dict()]
        is_kept = replace(place, at=self._newest.at) == self._newest and place.at in self._states
        return [self._owner, self._states[place.at]] if is_kept else None

    @override
    def check(self, place: Place, state: Any, checksums: Sequence[int | None]) -> str | None:
        owner = state[0]
        if owner == self._owner:
            return None
        return UNKNOWN_PLACE if owner[:-1] == self._owner[:-1] else _OTHER_OWNER


@dataclass(frozen=True)
class DrawnOrder:
    """The indices that a sampler draws under a seed.

    Attributes:
        checksum: that of the sampler's length and the first block of indices.
        indices: all of them. Outside of the draws, no generator changes.
    """

    checksum: int
    indices: Iterator[Any]


def draw_order(sampler: Iterable[Any], seed: int, keys: Sequence[int] = ()) -> DrawnOrder:
    """Draw the first block of a sampler's order now, and the others when requested.

    Args:
        sampler: yields indices, or batches of them.
        seed, keys: seed the global generators, and those of the samplers.

    >>> from torch.utils.data import RandomSampler
    >>> first, again = [draw_order(RandomSampler(range(9)), seed=1) for _ in range(2)]
    >>> list(first.indices) == list(again.indices), first.checksum == again.checksum
    (True, True)
    """
    blocks = _draw_blocks(sampler, seed, keys)
    first = next(blocks, [])
    checksum = checksum_of([length_or_inf(sampler), *first])
    return DrawnOrder(checksum, chain(first, chain.from_iterable(blocks)))


def _draw_blocks(sampler: Iterable[Any], seed: int, keys: Sequence[int]) -> Iterator[list[Any]]:
    owners = samplers_below(sampler)
    generators = generators_of(*owners)
    with seeded(seed, *owners, keys=keys):
        indices = map(copy_of_collection, iter(sampler))
        random_state = record_random_state(generators)
    while True:
        with preserve_random_state(generators):
            restore_random_state(random_state, generators)
            block = list(islice(indices, _BLOCK))
            random_state = record_random_state(generators)
        if not block:
            return
        yield block
