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

from lightning_ddp_ext.data.epochs import samplers_below
from lightning_ddp_ext.data.permutation import Uneven
from lightning_ddp_ext.data.proxy import (
    index_sampler_of,
    length_or_inf,
    own_copy,
    yields_in_order,
)
from lightning_ddp_ext.data.samplers import (
    DistributedBatchSamplerWrapper,
    GlobalOrderSampler,
    TorchOrderSampler,
)


def divide(
    loader: DataLoader[Any], options: Mapping[str, Any], *, shuffle: bool, counts_once: bool
) -> DataLoader[Any] | None:
    """Return a copy of a loader of which this rank reads its part.

    ``None`` if the samplers below the loader divide the samples themselves, or have no
    length.

    Args:
        loader: the user's loader, which iterates as torch's.
        options: the arguments ``num_replicas``, ``rank`` and ``seed`` of the sampler.
        shuffle: whether to shuffle, if the order is one that torch's samplers draw.
        counts_once: whether each sample is to count once, as in an evaluation. Then the
            result is ``None`` as well if this is not possible.
    """
    drawn = _drawn_by(loader)
    divides_itself = any(isinstance(each, DistributedSampler) for each in samplers_below(drawn))
    if divides_itself or length_or_inf(drawn) == math.inf:
        return None
    is_batches = drawn is loader.batch_sampler
    # Users' batches may have different sizes, and so would a step on each rank.
    if counts_once and (is_batches or not can_count_once(loader)):
        return None
    if not is_batches and _yields_each_once(drawn, loader.dataset):
        return _with_sampler(loader, TorchOrderSampler(loader.dataset, shuffle=shuffle, **options))
    uneven: Uneven = "drop" if is_batches and getattr(drawn, "drop_last", False) else "pad"
    return _with_sampler(loader, DistributedBatchSamplerWrapper(drawn, uneven=uneven, **options))


def _drawn_by(loader: DataLoader[Any]) -> Any:
    """Return the sampler whose items are divided among the ranks.

    It is the user's batch sampler, except that torch's own only groups the items of the
    sampler in it.
    """
    batch_sampler: Any = loader.batch_sampler
    if loader.batch_size is not None or batch_sampler is None:
        return loader.sampler
    return batch_sampler.sampler if type(batch_sampler) is BatchSampler else batch_sampler


def can_count_once(loader: DataLoader[Any]) -> bool:
    """Whether the last samples of a loader can be read in a separate batch.

    With ``drop_last=True`` the user wants whole batches only. A batch sampler of the
    user's may yield other batches. A class with another ``__iter__`` may not yield one
    batch for each of its batch sampler, and with ``in_order=False`` their order is
    unknown.
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


def _with_sampler(loader: DataLoader[Any], sampler: GlobalOrderSampler) -> DataLoader[Any]:
    """Return a copy of a loader that reads one of our samplers.

    The sampler yields batches if it divides those of the loader's batch sampler, and
    otherwise samples, which are grouped as before.
    """
    copied: DataLoader[Any] = own_copy(loader)
    old: Any = loader.batch_sampler
    attributes = vars(copied)  # a DataLoader refuses to change them
    if sampler.dataset is old:
        attributes["batch_sampler"] = sampler
        return copied
    attributes["sampler"] = sampler
    if old is not None:
        attributes["batch_sampler"] = BatchSampler(sampler, old.batch_size, old.drop_last)
    return copied
