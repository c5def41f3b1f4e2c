"""Distributed samplers for shuffling, for torch's order and for evaluation."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lightning_ddp_ext.arguments import length_of
from lightning_ddp_ext.data.global_order import GlobalOrderSampler, Order
from lightning_ddp_ext.data.partition import Uneven
from lightning_ddp_ext.data.permutation import Permutation
from lightning_ddp_ext.data.seeding import mix


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
        length = length_of(
            dataset, "dataset", "an iterable dataset splits its data itself and takes no sampler"
        )
        super().__init__(
            dataset, length, num_replicas, rank, shuffle, seed, "drop" if drop_last else uneven
        )

    @override
    def _order(self) -> Order:
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
    def _order(self) -> Order:
        if not self.shuffle:
            return in_order
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: NDArray[np.int64] = torch.randperm(self.length, generator=generator).numpy()
        return order.__getitem__


def in_order(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions unchanged, for the dataset's own order."""
    return positions
