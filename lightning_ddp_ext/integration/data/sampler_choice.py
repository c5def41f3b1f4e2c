"""Choose how the samples of a loader are divided among the ranks.

================================================  =====================================
Loader                                            What the ranks read
================================================  =====================================
it has one of our samplers                        the loader as it is
the Trainer would put its own sampler into it,    a copy with a sampler of ours
and there is one of ours for it
any other                                         what the Trainer makes of it
================================================  =====================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
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
from lightning_ddp_ext.data.position import global_order_of
from lightning_ddp_ext.data.proxy import index_sampler_of, length_or_inf, own_copy
from lightning_ddp_ext.data.samplers import (
    DistributedBatchSamplerWrapper,
    GlobalOrderSampler,
    SharedSampler,
    TorchOrderSampler,
)

from ..private.compat import needs_sampler
from ..private.lightning_tree import RunningStage
from ..start.devices import RankDevicesStrategy
from .evaluation import can_count_once

_SAMPLER_ATTRIBUTES = ("batch_sampler", "sampler")


def divide(
    strategy: RankDevicesStrategy,
    loader: Any,
    stage: RunningStage,
    *,
    shuffle: bool,
    counts_once: bool,
    seed: Callable[[], int],
) -> Any:
    """Return the loader that this rank reads; ``None`` for what the Trainer makes of it.

    Args:
        strategy: our strategy.
        loader: the user's loader.
        stage: training, validation or test.
        shuffle: whether the Trainer would shuffle.
        counts_once: whether an evaluation counts each sample once.
        seed: returns the seed for the order of samples; may be collective.
    """
    if global_order_of(loader) is not None:
        return loader
    trainer = strategy.current_trainer
    if not isinstance(loader, DataLoader) or not needs_sampler(trainer, loader):
        return None
    drawn = _drawn_by(loader)
    divides_itself = any(isinstance(each, DistributedSampler) for each in samplers_below(drawn))
    if divides_itself or length_or_inf(drawn) == inf:
        return None
    is_evaluated = stage != RunningStage.TRAINING
    is_batches = drawn is loader.batch_sampler
    reads_each_once = not is_batches and _yields_each_once(drawn, loader.dataset)
    # Users' batches may have different sizes, and so would a step on each rank. With
    # Lightning's sampler, a warning says that evaluated samples are repeated.
    if is_evaluated and (is_batches or not counts_once or not can_count_once(loader)):
        return None
    options = {**strategy.distributed_sampler_kwargs, "seed": seed()}
    if reads_each_once:
        shuffles = shuffle and not trainer.overfit_batches
        torchs = TorchOrderSampler(loader.dataset, shuffle=shuffles, **options)
        return _with_sampler(loader, torchs)
    if not is_batches:
        return _with_sampler(loader, SharedSampler(drawn, **options))
    uneven: Uneven = "drop" if getattr(drawn, "drop_last", False) else "pad"
    batches = DistributedBatchSamplerWrapper(drawn, uneven=uneven, **options)
    return _with_sampler(loader, batches)


def _drawn_by(loader: DataLoader[Any]) -> Any:
    """Return the sampler whose items are divided among the ranks.

    It is the user's batch sampler, except that torch's own only groups the items of the
    sampler in it.
    """
    is_users = loader.batch_size is None and loader.batch_sampler is not None
    if not is_users:
        return loader.sampler
    batch_sampler: Any = loader.batch_sampler
    return batch_sampler.sampler if type(batch_sampler) is BatchSampler else batch_sampler


def _yields_each_once(sampler: Any, dataset: object) -> bool:
    """Whether a sampler yields each sample once.

    This is known of samplers that use torch's random order or the dataset's order.
    """
    iter_ = getattr(type(sampler), "__iter__", None)  # a sampler may only have __getitem__
    has_known_order = iter_ in (RandomSampler.__iter__, SequentialSampler.__iter__)
    has_all = length_or_inf(sampler) == length_or_inf(dataset)
    return has_known_order and has_all and not getattr(sampler, "replacement", False)


def _with_sampler(loader: DataLoader[Any], sampler: GlobalOrderSampler) -> DataLoader[Any] | None:
    """Return a copy of a loader that reads one of our samplers.

    Return ``None`` if the copy could still use the old sampler: if it has started an
    iterator, or keeps the sampler or its length in another attribute.

    Args:
        loader: the loader.
        sampler: yields batches if it divides those of the loader's batch sampler, and
            otherwise samples.
    """
    copied = own_copy(loader)  # without torch's iterator of workers
    if _holds_sampler_elsewhere(copied):
        return None
    old: Any = loader.batch_sampler
    attributes = vars(copied)  # a DataLoader refuses to change them
    if old is not None and sampler.dataset is old:
        attributes["batch_sampler"] = sampler
    else:
        attributes["sampler"] = sampler
        if old is not None:
            attributes["batch_sampler"] = type(old)(sampler, old.batch_size, old.drop_last)
            attributes["batch_size"] = old.batch_size
            attributes["drop_last"] = old.drop_last
    keeps_old_length = _has_length_of_sampler(loader) and not _has_length_of_sampler(copied)
    return None if keeps_old_length else copied


def _holds_sampler_elsewhere(loader: DataLoader[Any]) -> bool:
    """Whether other attributes hold a sampler of the loader, or an iterator over it."""
    samplers = (id(loader.sampler), id(loader.batch_sampler))
    others = [
        value
        for name, value in vars(loader).items()
        if name not in _SAMPLER_ATTRIBUTES and value is not None
    ]
    return any(isinstance(other, Iterator) or id(other) in samplers for other in others)


def _has_length_of_sampler(loader: DataLoader[Any]) -> bool:
    return length_or_inf(loader) == length_or_inf(index_sampler_of(loader))
