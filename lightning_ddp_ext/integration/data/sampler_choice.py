"""Choose how the samples of a loader are divided among the ranks.

================================================  =====================================
Loader                                            What the ranks read
================================================  =====================================
it has one of our samplers                        the loader as it is; in a prediction,
                                                  a copy that also records indices
the Trainer would put its own sampler into it,    a copy with a sampler of ours
and there is one of ours for it
any other                                         what the Trainer makes of it
================================================  =====================================
"""

from __future__ import annotations

from inspect import signature
from math import inf
from typing import Any, Literal, get_args

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_ddp_ext.arguments import check_choice
from lightning_ddp_ext.data.global_order import GlobalOrderSampler
from lightning_ddp_ext.data.loader_properties import length_or_inf, name_of
from lightning_ddp_ext.data.position import global_order_of
from lightning_ddp_ext.data.resampled import REMEDY, with_sampler
from lightning_ddp_ext.data.samplers import (
    ScalableDistributedSampler,
    SharedSampler,
    TorchOrderSampler,
)
from lightning_ddp_ext.errors import ConfigurationError

from ..private.compat import has_saved_arguments, needs_sampler
from ..private.lightning_tree import RunningStage, pl, update_dataloader
from ..private.replaced_methods import Prepare
from ..start.devices import RankDevicesStrategy
from .evaluation import EVALUATED, Evaluation, can_count_once
from .resume import Resume

Order = Literal["torch", "scalable"]

# torch's samplers that draw their order.
DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class SamplerChoice:
    """Puts samplers into a strategy's loaders.

    Args:
        strategy: our strategy.
        order: the argument ``sampler`` of ``DDPExtStrategy``.
        evaluation: knows whether it counts each sample once.
        resume: knows the seed for the order of samples.
    """

    def __init__(
        self,
        strategy: RankDevicesStrategy,
        order: Order,
        evaluation: Evaluation,
        resume: Resume,
    ) -> None:
        check_choice("sampler", order, *get_args(Order))
        self._strategy = strategy
        self._order = order
        self._evaluation = evaluation
        self._resume = resume

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
            if stage != RunningStage.PREDICTING:
                return dataloader
            sampler = getattr(dataloader.batch_sampler, "sampler", dataloader.sampler)
            return self._read_through(dataloader, sampler, stage)
        trainer = self._strategy.current_trainer
        if isinstance(dataloader, DataLoader) and needs_sampler(trainer, dataloader):
            own_sampler = self._sampler_for(dataloader, shuffle, stage)
            if own_sampler is not None:
                return self._read_through(dataloader, own_sampler, stage)
        return as_lightning(dataloader, shuffle, stage)

    def _read_through(self, loader: DataLoader[Any], sampler: Any, stage: RunningStage) -> Any:
        """Return a copy of a loader that reads a sampler.

        Lightning creates its batch sampler, which records indices for a prediction.
        """
        if self._strategy.world_size > 1:
            _refuse_unknown_arguments(loader.batch_sampler)
        try:
            return with_sampler(loader, lambda copy: update_dataloader(copy, sampler, mode=stage))
        except (TypeError, pl.utilities.exceptions.MisconfigurationException) as error:
            raise ConfigurationError(
                f"{name_of(loader)} takes no distributed sampler; {REMEDY}"
            ) from error

    def _sampler_for(
        self, loader: DataLoader[Any], shuffle: bool, stage: RunningStage
    ) -> GlobalOrderSampler | None:
        """Return our sampler that replaces Lightning's, or ``None`` to keep that.

        With Lightning's sampler, a warning says that evaluated samples are repeated.
        """
        is_evaluated = stage in EVALUATED
        if is_evaluated and not self._evaluation.is_exact:
            return None
        options = {
            **self._strategy.distributed_sampler_kwargs,
            "seed": self._resume.seed,
            "uneven": "exact" if stage == RunningStage.PREDICTING else "pad",
        }
        sampler = users_sampler_of(loader)
        if not yields_each_once(sampler, loader.dataset):
            return SharedSampler(sampler, **options)
        if is_evaluated and not can_count_once(loader):
            return None
        options["shuffle"] = shuffle and not self._strategy.current_trainer.overfit_batches
        kind = ScalableDistributedSampler if self._order == "scalable" else TorchOrderSampler
        return kind(loader.dataset, **options)


def users_sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler whose samples are divided among the ranks.

    It is the one inside the loader's batch sampler if that sampler draws its order, or
    if torch's own batch sampler groups its samples, whose number is known.
    """
    inner = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(inner, DRAWING):
        return inner
    is_divided = isinstance(inner, DistributedSampler)
    if type(loader.batch_sampler) is BatchSampler and not is_divided and length_or_inf(inner) < inf:
        return inner
    return loader.sampler


def _refuse_unknown_arguments(batch_sampler: Any) -> None:
    """Raise if Lightning would silently create a batch sampler with other arguments.

    It only passes torch's arguments to a class whose object was not created in a hook.
    """
    if not isinstance(batch_sampler, BatchSampler) or has_saved_arguments(batch_sampler):
        return
    parameters = signature(type(batch_sampler)).parameters
    optional = {
        name for name, parameter in parameters.items() if parameter.default is not parameter.empty
    }
    unknown = sorted(optional - {"sampler", "batch_size", "drop_last"})
    if unknown:
        raise ConfigurationError(
            f"batch_sampler {type(batch_sampler).__name__} must have no arguments besides torch's"
            f" (got {', '.join(unknown)}), or be created in a hook such as train_dataloader, since"
            f" it is created again on each rank; {REMEDY}"
        )


def yields_each_once(sampler: Any, dataset: object) -> bool:
    """Whether a sampler yields each sample once.

    This is known of samplers that use torch's random order or the dataset's order.
    """
    iter_ = getattr(type(sampler), "__iter__", None)  # a sampler may only have __getitem__
    has_known_order = iter_ in (RandomSampler.__iter__, SequentialSampler.__iter__)
    has_all = length_or_inf(sampler) == length_or_inf(dataset)
    return has_known_order and has_all and not getattr(sampler, "replacement", False)
