"""Split the order of an epoch's samples among the ranks, from any position in it.

Except for the last one, the order is the same for any number of ranks:

=================================  =====================================================
Sampler                            Order
=================================  =====================================================
``ScalableDistributedSampler``     random, computed on the fly
``ExactDistributedSampler``        the dataset's, for evaluation
``TorchOrderSampler``              that of torch's ``DistributedSampler``
``DistributedBatchSamplerWrapper`` that of any sampler or batch sampler
``RankOrderSampler``               that of any sampler, which this rank reads alone
=================================  =====================================================
"""

from __future__ import annotations

import marshal
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from lightning_ddp_ext.arguments import check_choice, integer, length_of
from lightning_ddp_ext.data.inspection import has_set_epoch, samplers_below
from lightning_ddp_ext.data.permutation import Permutation, Shard, Uneven
from lightning_ddp_ext.data.random_state import generators_of, keys_of, mix, seeded
from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.nested import values_of

STATE_VERSION = 1

_LENGTH_REMEDY = "give it a __len__ that returns the number of items"
_EPOCH_REMEDY = "count epochs from 0"

# Indices per computation: few enough that the first one is yielded soon.
BLOCK = 1 << 13

_STABLE_FORMAT = 2  # of `marshal`; newer ones depend on which objects are identical


class Order(NamedTuple):
    """The global order of one epoch.

    Attributes:
        items_at: returns the items at these positions. The order of a sampler that yields
            fewer items than its length has none at the last positions.
        checksum: identifies the items of an order that was drawn; 0 if the length, seed and
            epoch determine the order.
    """

    items_at: Callable[[NDArray[np.int64]], NDArray[Any]]
    checksum: int = 0


class GlobalOrderSampler(DistributedSampler[Any]):
    """Base class of our samplers, which split one global order among the ranks.

    A subclass defines ``length`` and ``compute_order``. The class is a
    ``DistributedSampler`` because Lightning wraps any other sampler in its own.

    Args:
        dataset: the dataset or the sampler whose items are split.
        num_replicas, rank, shuffle, seed, uneven: as for ``ScalableDistributedSampler``.

    Attributes:
        dataset, shuffle, seed, uneven: the arguments.
        epoch: the epoch whose order is read next.
        position: the position in the global order at which the next iterator starts,
            which is the same on every rank; set by :meth:`resume_at`.
        drawn_order: the order that the next iterator reads, if the caller has set one;
            otherwise the iterator computes it.
    """

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
        self._given_ranks = num_replicas, rank  # ``None``: the process group's, see `shard`
        if num_replicas is not None and rank is not None:
            _check_ranks(num_replicas, rank)
        self.shuffle = bool(shuffle)
        check_choice("uneven", uneven, *get_args(Uneven))
        self.seed = integer(seed, "seed", remedy="pass seed=0, the same on every rank")
        self.uneven: Uneven = uneven
        self.epoch = 0
        self.position = 0
        self.drawn_order: Order | None = None

    # What subclasses override.

    @property
    def length(self) -> int:
        """The number of positions in an epoch's global order."""
        raise NotImplementedError

    def compute_order(self) -> Order:
        """Return the order of the current epoch; each call may draw another one."""
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
        shard = self.shard(self.position)
        order = self.drawn_order or self.compute_order()
        self.position = 0
        self.drawn_order = None
        for begin in range(0, len(shard), BLOCK):
            yield order.items_at(shard.positions(begin, begin + BLOCK)).tolist()

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
        self.position = integer(
            position,
            "position",
            at_most=self.length,
            remedy="a position is only valid for the length that it was saved with",
        )
        self.epoch = epoch
        self.drawn_order = None
        self._set_wrapped_epoch()

    def identity(self) -> dict[str, int | bool | str]:
        """Return the parameters that give a position its meaning.

        A position is only valid for a sampler in which they are equal.
        """
        return {
            "kind": type(self).__name__,
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


def _unchanged(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return positions


DATASET_ORDER = Order(_unchanged)  # not a lambda, since a sampler may be pickled


class ScalableDistributedSampler(GlobalOrderSampler):
    """A ``DistributedSampler`` that shuffles without a list of indices.

    Its start-up time and memory do not depend on the length. The order of an epoch is a
    keyed permutation, see ``data.permutation``. It depends only on the length, ``seed``
    and ``epoch``; seed and epoch are mixed rather than added. Each rank computes only
    the indices that it yields. ``resume_at`` sets the position, and any number of ranks
    can continue from it.

    Args:
        dataset: anything with a length. A length over 2**62 is not supported, and this
            is not checked.
        num_replicas: number of ranks; ``None``: the process group's, read when the
            sampler is used; 1 without a group.
        rank: this rank; ``None``: the process group's, read when the sampler is used; 0
            without a group.
        shuffle: whether the order is random; otherwise it is the dataset's.
        seed: a non-negative integer, the same on every rank.
        drop_last: if true, the same as ``uneven="drop"``, regardless of ``uneven``.
        uneven: what happens if the length is not a multiple of the number of ranks:
            ``"pad"`` reads the epoch's first samples again, ``"drop"`` leaves the last
            samples out, ``"exact"`` gives some ranks one more sample.

    Raises:
        ConfigurationError: the dataset has no length, or another argument is invalid.

    Two ranks read two samples each, and three ranks read the rest of the epoch:

    >>> def samplers(count):
    ...     ranks = range(count)
    ...     options = {"num_replicas": count, "seed": 3}
    ...     return [ScalableDistributedSampler(range(10), rank=rank, **options) for rank in ranks]
    >>> two = samplers(2)
    >>> read = [list(sampler)[:2] for sampler in two]
    >>> three = samplers(3)
    >>> for sampler in three:
    ...     sampler.resume_at(epoch=0, position=4)
    >>> sorted(sample for samples in (*read, *three) for sample in samples)
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        uneven: Uneven = "pad",
    ) -> None:
        self._length = length_of(
            dataset, "dataset", "an iterable dataset splits its data itself and takes no sampler"
        )
        super().__init__(
            dataset,
            num_replicas=num_replicas,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
            uneven="drop" if drop_last else uneven,
        )

    @property
    @override
    def length(self) -> int:
        return self._length

    @override
    def compute_order(self) -> Order:
        if not self.shuffle:
            return DATASET_ORDER
        return Order(Permutation(self.length, mix(self.seed, self.epoch)).apply)


class ExactDistributedSampler(ScalableDistributedSampler):
    """A sampler for evaluation: exactly one rank reads each sample.

    Some ranks may get one sample more than others, or none at all, so the numbers of
    batches may differ. Arguments and errors are those of
    ``ScalableDistributedSampler``, without ``drop_last`` and ``uneven``. By default,
    the order is the dataset's.

    >>> [list(ExactDistributedSampler(range(5), num_replicas=2, rank=rank)) for rank in range(2)]
    [[0, 2, 4], [1, 3]]
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, uneven="exact")


class TorchOrderSampler(ScalableDistributedSampler):
    """Yields samples in the order of torch's ``DistributedSampler``.

    Any number of ranks can start from any position. Each epoch, the whole order is
    drawn and stored, at 8 bytes per sample.
    """

    @override
    def compute_order(self) -> Order:
        if not self.shuffle:
            return DATASET_ORDER
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: NDArray[np.int64] = torch.randperm(self.length, generator=generator).numpy()
        return Order(order.__getitem__)


class DistributedBatchSamplerWrapper(GlobalOrderSampler):
    """Splits the batches of any batch sampler, or the indices of a sampler, among the ranks.

    Pass it as ``DataLoader(batch_sampler=...)``, or as ``sampler=...``. When an epoch
    begins, every rank draws the items of all ranks and yields its own: the k-th item
    belongs to rank k modulo the number of ranks. During the draw, the global generators
    and those of the batch sampler are seeded from ``seed`` and the epoch. ``position``
    counts the items of all ranks.

    Args:
        batch_sampler: anything that yields batches or indices, and has a length;
            ``set_epoch`` is called on it and on the samplers that it wraps.
        num_replicas, rank, seed: as for ``ScalableDistributedSampler``.
        uneven: ``"pad"`` reads the epoch's first batches again, ``"drop"`` leaves the
            last batches out, ``"exact"`` gives some ranks one more batch.

    Raises:
        ConfigurationError: an argument is invalid; or, during iteration on several
            ranks, fewer batches are drawn than the length.

    >>> from torch.utils.data import BatchSampler, SequentialSampler
    >>> batches = BatchSampler(SequentialSampler(range(6)), batch_size=2, drop_last=False)
    >>> split = DistributedBatchSamplerWrapper
    >>> [list(split(batches, num_replicas=2, rank=rank)) for rank in range(2)]
    [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        seed: int = 0,
        uneven: Uneven = "pad",
    ) -> None:
        length_of(batch_sampler, "batch_sampler", _LENGTH_REMEDY)  # raises if it has none
        super().__init__(
            batch_sampler,
            num_replicas=num_replicas,
            rank=rank,
            shuffle=True,
            seed=seed,
            uneven=uneven,
        )
        # For each generator that is seeded, a number that is mixed into its seed.
        self._keys: Sequence[int] = ()

    @property
    @override
    def length(self) -> int:
        """The current length of the wrapped sampler."""
        return length_of(self.dataset, "batch_sampler", _LENGTH_REMEDY)

    @override
    def _set_wrapped_epoch(self) -> None:
        for sampler in samplers_below(self.dataset):
            if has_set_epoch(sampler):
                sampler.set_epoch(self.epoch)

    @override
    def compute_order(self) -> Order:
        """Draw the items of all ranks; those beyond the length are left out.

        Raises:
            ConfigurationError: fewer items are drawn than the length, on several ranks.
        """
        length = self.length
        with seeded(mix(self.seed, self.epoch), *samplers_below(self.dataset), keys=self._keys):
            # A batch sampler may reuse one list or array.
            drawn = np.fromiter(map(copy_of_collection, islice(self.dataset, length)), object)
        if len(drawn) < length and self.num_replicas > 1:
            raise ConfigurationError(
                f"batch_sampler must yield at least its length of {length} items (got"
                f" {len(drawn)}); correct {type(self.dataset).__name__}.__len__"
            )
        return Order(
            lambda positions: drawn[positions[positions < len(drawn)]],
            checksum_of(drawn.tolist()),
        )


class RankOrderSampler(DistributedBatchSamplerWrapper):
    """Yields all items that any sampler draws on this rank.

    The sampler may rely on how the rank has seeded its generators: some draw the same
    order on all ranks and take a part of it, and others draw a different order on each
    rank. So the seeds of a draw also follow from the **keys** of these generators, which
    identify how they were seeded: equal keys give equal orders.
    """

    def __init__(self, sampler: Any) -> None:
        super().__init__(sampler, num_replicas=1, rank=0, uneven="exact")
        # Taken now, because a draw changes the states of most generators.
        self._keys_of_sampler = keys_of(generators_of(*samplers_below(sampler)))

    def set_order(self, seed: int, keys: Sequence[int]) -> None:
        """Set the seed, and the keys of this rank's global generators."""
        self.seed = seed
        self._keys = [*keys, *self._keys_of_sampler]


def checksum_of(indices: list[Any]) -> int:
    """Return the checksum of the items that a sampler has yielded."""
    try:
        return zlib.crc32(marshal.dumps(indices, _STABLE_FORMAT))
    except ValueError:  # such as tensors, whose `repr` is slow
        values = values_of(indices)
        plain = [each.tolist() if isinstance(each, torch.Tensor) else each for each in values]
        return zlib.crc32(repr(plain).encode())


def copy_of_collection(item: Any) -> Any:
    """Return an item that stays the same if a batch sampler reuses a list or an array."""
    return item.copy() if isinstance(item, (list, np.ndarray)) else item
