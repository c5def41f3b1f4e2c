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

from collections.abc import Callable
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
from lightning_ddp_ext.data.loader_properties import length_or_inf
from lightning_ddp_ext.data.partition import Uneven
from lightning_ddp_ext.data.position import global_order_of
from lightning_ddp_ext.data.resampled import with_sampler
from lightning_ddp_ext.data.samplers import (
    DistributedBatchSamplerWrapper,
    SharedSampler,
    TorchOrderSampler,
)

from ..private.compat import needs_sampler
from ..private.lightning_tree import RunningStage
from ..start.devices import RankDevicesStrategy
from .evaluation import can_count_once


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
    # Users' batches may have different sizes, and so would a step on each rank.
    if is_evaluated and (is_batches or not counts_once):
        return None
    # With Lightning's sampler, a warning says that evaluated samples are repeated.
    if is_evaluated and reads_each_once and not can_count_once(loader):
        return None
    options = {**strategy.distributed_sampler_kwargs, "seed": seed()}
    if is_batches:
        uneven: Uneven = "drop" if getattr(drawn, "drop_last", False) else "pad"
        return with_sampler(loader, DistributedBatchSamplerWrapper(drawn, uneven=uneven, **options))
    if not reads_each_once:
        return with_sampler(loader, SharedSampler(drawn, **options))
    shuffles = shuffle and not trainer.overfit_batches
    return with_sampler(loader, TorchOrderSampler(loader.dataset, shuffle=shuffles, **options))


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
