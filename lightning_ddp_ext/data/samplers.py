"""Distributed samplers for shuffling, for torch's order, for evaluation and for any order.

The order of an epoch is the same for any number of ranks.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lightning_ddp_ext.arguments import length_of
from lightning_ddp_ext.data.epochs import has_set_epoch, samplers_below
from lightning_ddp_ext.data.global_order import (
    GlobalOrderSampler,
    Order,
    checksum_of,
    copy_of_collection,
)
from lightning_ddp_ext.data.partition import Uneven
from lightning_ddp_ext.data.permutation import Permutation
from lightning_ddp_ext.data.random_state import mix, seeded
from lightning_ddp_ext.errors import ConfigurationError

_LENGTH_REMEDY = "give it a __len__ that returns the number of items"


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

    kind: ClassVar[str] = "scalable"

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
            return in_order
        return Permutation(self.length, mix(self.seed, self.epoch)).apply


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

    kind: ClassVar[str] = "torch"

    @override
    def compute_order(self) -> Order:
        if not self.shuffle:
            return in_order
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: NDArray[np.int64] = torch.randperm(self.length, generator=generator).numpy()
        return order.__getitem__


class DistributedBatchSamplerWrapper(GlobalOrderSampler):
    """Splits the batches of any batch sampler among the ranks.

    Pass it as ``DataLoader(batch_sampler=...)``. When an epoch begins, every rank draws
    the batches of all ranks and yields its own: the k-th batch belongs to rank k modulo
    the number of ranks. During the draw, the global generators and those of the batch
    sampler are seeded from ``seed`` and the epoch. ``position`` counts the batches of
    all ranks.

    Args:
        batch_sampler: anything that yields batches and has a length; ``set_epoch`` is
            called on it and on the samplers that it wraps.
        num_replicas, rank, seed: as for ``ScalableDistributedSampler``.
        uneven: ``"pad"`` reads the epoch's first batches again, ``"drop"`` leaves the
            last batches out, ``"exact"`` gives some ranks one more batch.

    Raises:
        ConfigurationError: an argument is invalid; or, during iteration, fewer batches
            are drawn than the length.

    >>> from torch.utils.data import BatchSampler, SequentialSampler
    >>> batches = BatchSampler(SequentialSampler(range(6)), batch_size=2, drop_last=False)
    >>> split = DistributedBatchSamplerWrapper
    >>> [list(split(batches, num_replicas=2, rank=rank)) for rank in range(2)]
    [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]
    """

    kind: ClassVar[str] = "batches"
    _field: ClassVar[str] = "batch_sampler"  # name of the argument in errors

    def __init__(
        self,
        batch_sampler: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        seed: int = 0,
        uneven: Uneven = "pad",
    ) -> None:
        length_of(batch_sampler, self._field, _LENGTH_REMEDY)  # raises if it has none
        super().__init__(
            batch_sampler,
            num_replicas=num_replicas,
            rank=rank,
            shuffle=True,
            seed=seed,
            uneven=uneven,
        )

    @property
    @override
    def length(self) -> int:
        """The current length of the wrapped sampler."""
        return length_of(self.dataset, self._field, _LENGTH_REMEDY)

    @override
    def _set_wrapped_epoch(self) -> None:
        for sampler in samplers_below(self.dataset):
            if has_set_epoch(sampler):
                sampler.set_epoch(self.epoch)

    @override
    def compute_order(self) -> Order:
        """Draw the items of all ranks, and return a function from positions to items.

        Raises:
            ConfigurationError: fewer items are drawn than the length.
        """
        length = self.length
        with seeded(mix(self.seed, self.epoch), *samplers_below(self.dataset)):
            # A batch sampler may reuse one list or array.
            items = map(copy_of_collection, islice(self.dataset, length))
            drawn = np.fromiter(items, dtype=object)
        if len(drawn) < length:
            raise ConfigurationError(
                f"{self._field} must yield at least len({self._field}) = {length} items (got"
                f" {len(drawn)}); correct {type(self.dataset).__name__}.__len__"
            )
        self.fingerprint = checksum_of(drawn.tolist())
        return drawn.__getitem__


class SharedSampler(DistributedBatchSamplerWrapper):
    """Splits the indices of any sampler with a length among the ranks in the same way.

    >>> from torch.utils.data import WeightedRandomSampler
    >>> len(SharedSampler(WeightedRandomSampler([1.0, 0.0, 2.0], 6), num_replicas=2, rank=0))
    3
    """

    kind: ClassVar[str] = "shared"
    _field: ClassVar[str] = "sampler"


def in_order(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions unchanged, for the dataset's own order."""
    return positions
