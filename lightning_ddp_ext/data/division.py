"""Divide the samples of a loader among the ranks, by one of our samplers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from lightning_ddp_ext.data.inspection import (
    index_sampler_of,
    length_or_inf,
    samplers_below,
    yields_in_order,
)
from lightning_ddp_ext.data.permutation import Uneven
from lightning_ddp_ext.data.proxy import own_copy
from lightning_ddp_ext.data.samplers import (
    DistributedBatchSamplerWrapper,
    TorchOrderSampler,
)


def divide(
    loader: DataLoader[Any], options: Mapping[str, Any], *, shuffle: bool, counts_once: bool
) -> DataLoader[Any] | None:
    """Return a copy of a loader of which this rank reads its part.

    ``None`` if none of our samplers fits: if the user's samplers divide the samples
    themselves, or have no length, or if samples must but cannot count once.

    Args:
        loader: the user's loader, which iterates as torch's.
        options: the arguments ``num_replicas``, ``rank`` and ``seed`` of the sampler.
        shuffle: whether to shuffle, if the order is one that torch's samplers draw.
        counts_once: whether each sample must count once, as in an evaluation.
    """
    drawn, is_batches = _drawn_by(loader)
    divides_itself = any(isinstance(each, DistributedSampler) for each in samplers_below(drawn))
    if divides_itself or length_or_inf(drawn) == math.inf:
        return None
    if is_batches:
        if counts_once:  # a step would have batches of different sizes on the ranks
            return None
        uneven: Uneven = "drop" if getattr(drawn, "drop_last", False) else "pad"
        batches = DistributedBatchSamplerWrapper(drawn, uneven=uneven, **options)
        return _copy_with(loader, batch_sampler=batches)
    if counts_once and not can_count_once(loader):
        return None
    sampler = (
        TorchOrderSampler(loader.dataset, shuffle=shuffle, **options)
        if _yields_each_once(drawn, loader.dataset)
        else DistributedBatchSamplerWrapper(drawn, **options)
    )
    batch_sampler: Any = loader.batch_sampler
    if batch_sampler is not None:  # it groups the samples as before
        batch_sampler = BatchSampler(sampler, batch_sampler.batch_size, batch_sampler.drop_last)
    return _copy_with(loader, sampler=sampler, batch_sampler=batch_sampler)


def _drawn_by(loader: DataLoader[Any]) -> tuple[Any, bool]:
    """Return the sampler whose items are divided, and whether these are batches."""
    batch_sampler: Any = loader.batch_sampler
    if loader.batch_size is not None or batch_sampler is None:
        return loader.sampler, False
    if type(batch_sampler) is BatchSampler:  # torch's own only groups the items of another
        return batch_sampler.sampler, False
    return batch_sampler, True


def can_count_once(loader: DataLoader[Any]) -> bool:
    """Whether the last samples of a loader can be read in a separate batch.

    They can unless

    - a batch sampler of the user's forms other batches than torch's,
    - with ``drop_last=True``, the user wants whole batches only,
    - the loader's class, or ``in_order=False``, may yield the batches in another order.
    """
    index_sampler = index_sampler_of(loader)
    if isinstance(index_sampler, BatchSampler):
        is_users = loader.batch_size is None and type(index_sampler) is not BatchSampler
        if is_users or index_sampler.drop_last:
            return False
    return yields_in_order(loader)


def _yields_each_once(sampler: Any, dataset: object) -> bool:
    """Whether a sampler yields each sample once.

    This is known of samplers that use torch's random order or the dataset's order.
    """
    iter_ = getattr(type(sampler), "__iter__", None)  # a sampler may only have __getitem__
    has_known_order = iter_ in (RandomSampler.__iter__, SequentialSampler.__iter__)
    has_all = length_or_inf(sampler) == length_or_inf(dataset)
    return has_known_order and has_all and not getattr(sampler, "replacement", False)


def _copy_with(loader: DataLoader[Any], **samplers: Any) -> DataLoader[Any]:
    """Return a copy of a loader that reads these samplers."""
    copied: DataLoader[Any] = own_copy(loader)
    vars(copied).update(samplers)  # a DataLoader refuses to change them
    return copied
