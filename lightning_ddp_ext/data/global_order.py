"""Shard the global order of an epoch among the ranks, from any position."""

from __future__ import annotations

import marshal
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, ClassVar, get_args

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data.distributed import DistributedSampler

from lightning_ddp_ext.arguments import check_choice, integer
from lightning_ddp_ext.data.partition import Shard, Uneven

STATE_VERSION = 1

_EPOCH_REMEDY = "count epochs from 0"

# Indices per computation: few enough that the first one is yielded soon.
BLOCK = 1 << 13

_STABLE_FORMAT = 2  # of `marshal`; newer ones depend on which objects are identical

Order = Callable[[NDArray[np.int64]], NDArray[Any]]  # from positions to their items


class GlobalOrderSampler(DistributedSampler[Any]):
    """Base class of our samplers, which split one global order among the ranks.

    A subclass sets ``kind`` and defines ``length`` and ``compute_order``, which sets
    ``fingerprint`` if orders are drawn. The class is a ``DistributedSampler`` because
    Lightning wraps any other sampler in its own.

    Args:
        dataset: the dataset or the sampler whose items are split.
        num_replicas, rank, shuffle, seed, uneven: as for ``ScalableDistributedSampler``.

    Attributes:
        dataset, shuffle, seed, uneven: the arguments.
        epoch: the epoch whose order is read next.
        drawn_order: the order that the next iterator reads, if the caller has set one;
            otherwise the iterator computes it.
        fingerprint: the checksum of the latest order that was drawn; 0 if the length,
            seed and epoch determine the order.
    """

    kind: ClassVar[str]
    """Distinguishes the orders of different samplers in a checkpoint."""

    def __init__(
        self,
        dataset: Any,
        *,
        num_replicas: int | None,
        rank: int | None,
        shuffle: bool,
        seed: int,
        uneven: Uneven,
    ) -> None:
        self.dataset: Any = dataset
        self._given_ranks = num_replicas, rank
        if num_replicas is not None and rank is not None:
            _check_ranks(num_replicas, rank)
        self.shuffle = bool(shuffle)
        check_choice("uneven", uneven, *get_args(Uneven))
        self.seed = integer(seed, "seed", remedy="pass seed=0, the same on every rank")
        self.uneven: Uneven = uneven
        self.epoch = 0
        self._position = 0
        self.drawn_order: Order | None = None
        self.fingerprint = 0

    # What subclasses override.

    @property
    def length(self) -> int:
        """The number of positions in an epoch's global order."""
        raise NotImplementedError

    def compute_order(self) -> Order:
        """Return a function from global positions to their items in the current epoch.

        Each call may draw another order.
        """
        raise NotImplementedError

    def _set_wrapped_epoch(self) -> None:
        """Set the epoch of wrapped objects, if the subclass has any."""

    # The interface of a DistributedSampler.

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """The current number of ranks."""
        return self.shard(0).world_size

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The current rank of this process."""
        return self.shard(0).rank

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        """Whether the last samples are left out to give all ranks equally many."""
        return self.uneven == "drop"

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """This rank's number of items in an epoch, under torch's name for it."""
        return len(self)

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """The number of positions that all ranks together read in an epoch."""
        return self.length if self.uneven == "exact" else len(self) * self.num_replicas

    def __len__(self) -> int:
        """Return this rank's number of items in a whole epoch, as loops expect.

        It does not depend on ``position``.
        """
        return len(self.shard(0))

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's items from ``position`` on.

        Nothing is computed before the first item is requested.
        """
        return chain.from_iterable(self._iterate())

    def _iterate(self) -> Iterator[list[Any]]:
        shard = self.shard(self._position)
        order = self.drawn_order or self.compute_order()
        self.drawn_order = None
        for begin in range(0, len(shard), BLOCK):
            yield order(shard.positions(begin, begin + BLOCK)).tolist()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order is read; a new epoch is read from its beginning.

        Raises:
            ConfigurationError: ``epoch`` is negative or not an integer.
        """
        if integer(epoch, "epoch", remedy=_EPOCH_REMEDY) == self.epoch:
            self._set_wrapped_epoch()
        else:
            self.resume_at(epoch, 0)

    # The position.

    @property
    def position(self) -> int:
        """The position in the global order at which an iterator starts.

        It is the same on every rank.
        """
        return self._position

    def shard(self, start: int) -> Shard:
        """Return the shard that this rank reads from position ``start`` on.

        By default, the number of ranks and this rank are the process group's, or 1 and
        0 without a group. They are read at each use, so a sampler may be created before
        the process group.
        """
        num_replicas, rank = self._given_ranks
        grouped = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size() if grouped else 1
        if rank is None:
            rank = dist.get_rank() if grouped else 0
        _check_ranks(num_replicas, rank)
        return Shard(self.length, num_replicas, rank, self.uneven, start)

    def resume_at(self, epoch: int, position: int) -> None:
        """Set the epoch and the position at which the next iterator starts.

        Pass the same values on every rank.

        Raises:
            ConfigurationError: ``epoch`` is not an integer of at least 0, or
                ``position`` not one from 0 to ``length``.
        """
        epoch = integer(epoch, "epoch", remedy=_EPOCH_REMEDY)
        remedy = "a position is only valid for the length that it was saved with"
        self._position = integer(position, "position", at_most=self.length, remedy=remedy)
        self.epoch = epoch
        self.drawn_order = None
        self._set_wrapped_epoch()

    def identity(self) -> dict[str, int | bool | str]:
        """Return the parameters that give a position its meaning.

        A position is only valid for a sampler in which they are equal.
        """
        return {
            "kind": self.kind,
            "version": STATE_VERSION,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "uneven": self.uneven,
        }


def _check_ranks(num_replicas: int, rank: int) -> None:
    remedy = "leave num_replicas and rank out to use those of the process group"
    count = integer(num_replicas, "num_replicas", at_least=1, remedy=remedy)
    integer(rank, "rank", at_most=count - 1, remedy=remedy)


def checksum_of(indices: list[Any], previous: int = 0) -> int:
    """Continue the checksum ``previous`` with what a sampler yielded."""
    try:
        content = marshal.dumps(indices, _STABLE_FORMAT)
    except ValueError:  # such as tensors
        content = repr(indices).encode()
    return zlib.crc32(content, previous)


def copy_of_collection(item: Any) -> Any:
    """Return an item that stays the same if a batch sampler reuses a list or an array."""
    return item.copy() if isinstance(item, (list, np.ndarray)) else item
