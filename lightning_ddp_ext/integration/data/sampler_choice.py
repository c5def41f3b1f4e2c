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
from lightning_ddp_ext.data.global_order import GlobalOrderSampler
from lightning_ddp_ext.data.loader_kinds import global_order_of
from lightning_ddp_ext.data.loader_properties import length_or_inf
from lightning_ddp_ext.data.resampled import with_sampler
from lightning_ddp_ext.data.samplers import (
    DistributedBatchSamplerWrapper,
    SharedSampler,
    TorchOrderSampler,
)

from ..private.compat import needs_sampler
from ..private.lightning_tree import RunningStage
from ..private.replaced_methods import Prepare
from ..start.devices import RankDevicesStrategy
from .cursor import EpochCursor
from .evaluation import EVALUATED, Evaluation, can_count_once


class SamplerChoice:
    """Puts samplers into a strategy's loaders.

    Args:
        strategy: our strategy.
        evaluation: knows whether it counts each sample once.
        cursor: knows the seed for the order of samples.
    """

    def __init__(
        self, strategy: RankDevicesStrategy, evaluation: Evaluation, cursor: EpochCursor
    ) -> None:
        self._strategy = strategy
        self._evaluation = evaluation
        self._cursor = cursor

    def divide(
        self, as_lightning: Prepare, dataloader: Any, shuffle: bool, stage: RunningStage
    ) -> Any:
        """Return the loader that this rank reads.

        Collective if the seed is not known yet.

        Args:
            as_lightning: the Trainer's method, which may put its own sampler into it.
            dataloader: the user's loader.
            shuffle: whether the Trainer would shuffle.
            stage: the stage.
        """
        if global_order_of(dataloader) is not None:
            return dataloader
        trainer = self._strategy.current_trainer
        divided = None
        if isinstance(dataloader, DataLoader) and needs_sampler(trainer, dataloader):
            own_sampler = self._sampler_for(dataloader, shuffle, stage)
            if own_sampler is not None:
                divided = with_sampler(dataloader, own_sampler)
        return as_lightning(dataloader, shuffle, stage) if divided is None else divided

    def _sampler_for(
        self, loader: DataLoader[Any], shuffle: bool, stage: RunningStage
    ) -> GlobalOrderSampler | None:
        """Return our sampler that replaces Lightning's, or ``None`` to keep that.

        With Lightning's sampler, a warning says that evaluated samples are repeated.
        """
        drawn = drawn_by(loader)
        divides_itself = any(isinstance(each, DistributedSampler) for each in samplers_below(drawn))
        if divides_itself or length_or_inf(drawn) == inf:
            return None
        is_evaluated = stage in EVALUATED
        is_batches = drawn is loader.batch_sampler
        # Users' batches may have different sizes, and so would a step on each rank.
        if is_evaluated and (is_batches or not self._evaluation.is_exact):
            return None
        options = {**self._strategy.distributed_sampler_kwargs, "seed": self._cursor.seed}
        if is_batches:
            options["uneven"] = "drop" if getattr(drawn, "drop_last", False) else "pad"
            return DistributedBatchSamplerWrapper(drawn, **options)
        if not yields_each_once(drawn, loader.dataset):
            return SharedSampler(drawn, **options)
        if is_evaluated and not can_count_once(loader):
            return None
        options["shuffle"] = shuffle and not self._strategy.current_trainer.overfit_batches
        return TorchOrderSampler(loader.dataset, **options)


def drawn_by(loader: DataLoader[Any]) -> Any:
    """Return the sampler whose items are divided among the ranks.

    It is the user's batch sampler, except that torch's own only groups the items of the
    sampler in it.
    """
    is_users = loader.batch_size is None and loader.batch_sampler is not None
    if not is_users:
        return loader.sampler
    batch_sampler: Any = loader.batch_sampler
    return batch_sampler.sampler if type(batch_sampler) is BatchSampler else batch_sampler


def yields_each_once(sampler: Any, dataset: object) -> bool:
    """Whether a sampler yields each sample once.

    This is known of samplers that use torch's random order or the dataset's order.
    """
    iter_ = getattr(type(sampler), "__iter__", None)  # a sampler may only have __getitem__
    has_known_order = iter_ in (RandomSampler.__iter__, SequentialSampler.__iter__)
    has_all = length_or_inf(sampler) == length_or_inf(dataset)
    return has_known_order and has_all and not getattr(sampler, "replacement", False)
