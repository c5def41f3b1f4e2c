"""Choose samplers for a strategy's loaders, and wrap the loaders.

Lightning calls :meth:`TrainerLoaders.prepare` where it would put its own sampler into a
loader. The result is a proxy of a ``DistributedLoader``, whose iterators
:class:`~.cursor.EpochCursor` starts.
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
)

from lightning_ddp_ext.arguments import check_choice
from lightning_ddp_ext.checkpoint.rank_records import Kind
from lightning_ddp_ext.data.global_order import GlobalOrderSampler
from lightning_ddp_ext.data.loader import DistributedLoader, source_of
from lightning_ddp_ext.data.loader_kinds import DRAWING, global_order_of, position_of
from lightning_ddp_ext.data.loader_properties import length_or_inf, name_of
from lightning_ddp_ext.data.proxy import iterable_of
from lightning_ddp_ext.data.resampled import REMEDY, with_sampler
from lightning_ddp_ext.data.samplers import (
    ScalableDistributedSampler,
    SharedSampler,
    TorchOrderSampler,
)
from lightning_ddp_ext.errors import ConfigurationError

from ..checkpoints.collective import Checkpoints
from ..private.compat import combined_loader_of, has_saved_arguments, needs_sampler
from ..private.lightning_tree import RunningStage, pl, update_dataloader
from ..private.replaced_methods import Prepare
from ..start.devices import RankDevicesStrategy
from .cursor import EpochCursor, ResumeData, RunParts
from .evaluation import EVALUATED, Evaluation, can_count_once
from .position_saver import PositionSaver
from .positions import training_loaders_of
from .uneven import UnevenInputs, UnevenMode

Order = Literal["torch", "scalable"]

# A checkpoint may lag these batches behind, besides those of an optimiser step.
_BATCHES_BEHIND = 4


class TrainerLoaders:
    """The loaders of a strategy's ranks, and the parts of the strategy that read them.

    Args:
        strategy: our strategy.
        checkpoints: gathers the ranks' states.
        parts: other parts of the strategy.
        order: the argument ``sampler`` of ``DDPExtStrategy``.
        exact_evaluation, uneven_inputs, resume_data: see ``DDPExtStrategy``.

    Attributes:
        uneven: handles ranks with different numbers of training batches.
        evaluation: counts each sample once.
        saver: saves the training position.
        cursor: starts iterators at it.
    """

    def __init__(
        self,
        strategy: RankDevicesStrategy,
        checkpoints: Checkpoints,
        parts: RunParts,
        *,
        order: Order,
        exact_evaluation: bool,
        uneven_inputs: UnevenMode | None,
        resume_data: ResumeData,
    ) -> None:
        check_choice("sampler", order, *get_args(Order))
        check_choice("exact_evaluation", exact_evaluation, True, False)
        check_choice("resume_data", resume_data, *get_args(ResumeData))
        check_choice("uneven_inputs", uneven_inputs, None, *get_args(UnevenMode))
        self._strategy = strategy
        self._parts = parts
        self._order = order
        self.uneven = UnevenInputs(strategy, uneven_inputs)
        self.evaluation = Evaluation(strategy, is_exact=exact_evaluation)
        self.saver = PositionSaver(strategy, checkpoints, parts.stops)
        self.cursor = EpochCursor(strategy, parts, self.uneven, self.saver, resume_data)

    def attach(self, trainer: Any) -> None:
        """Reset the state, and make a Trainer call :meth:`prepare`.

        The Trainer then calls it where it would put its own sampler into a loader.
        """
        self.saver.attach(trainer)
        self.cursor.attach(trainer)
        self.uneven.start_run()
        self.evaluation.end()
        self._parts.replaced.prepare_loaders(trainer, by=self.prepare)

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Prepare to resume from a checkpoint, also if hooks have already loaded the data."""
        self.cursor.restore(checkpoint)
        for loader in training_loaders_of(self._strategy.current_trainer):
            sampler = global_order_of(loader.loader)
            if loader.is_dealt and sampler is not None:
                sampler.seed = self.cursor.seed
                loader.position.read_parameters()

    def on_train_batch_start(self, batch: Any) -> None:
        """Let the loops continue as usual, and compare the ranks' first batches.

        Collective if the loaders are new.
        """
        self.cursor.on_train_batch_start()
        self.uneven.on_train_batch_start(self._strategy.current_trainer, batch)

    def prepare(
        self, as_lightning: Prepare, dataloader: Any, shuffle: bool, stage: RunningStage
    ) -> object:
        """Return the loader that the Trainer reads in place of the given one.

        Collective: every rank must call it.
        """
        source = source_of(dataloader)  # another Trainer or stage may have prepared it already
        divided = self._with_sampler(as_lightning, source, shuffle, stage)
        loader = DistributedLoader(divided, self.cursor.start)
        loader.is_dealt = divided is not source
        if stage in EVALUATED:
            self.evaluation.prepare(loader, stage)
            loader.on_iterator = self._before_validation
            loader.had_workers = self.saver.had_validation_workers
        else:
            self.cursor.free_loaders()
            self.uneven.agree_on_length(loader)
            self._follow_position(loader)
        return loader.shown()

    def _follow_position(self, loader: DistributedLoader) -> None:
        trainer = self._strategy.current_trainer
        # This callback sets the Trainer's value only when an epoch starts.
        scheduled = [
            batches
            for callback in trainer.callbacks
            if isinstance(callback, pl.callbacks.GradientAccumulationScheduler)
            for batches in callback.scheduling.values()
        ]
        loader.position = position_of(
            loader.loader,
            world_size=self._strategy.world_size,
            remembered=max([trainer.accumulate_grad_batches, *scheduled]) + _BATCHES_BEHIND,
        )
        loader.position.generators.append(loader.seeds)

    def _before_validation(self, loader: DistributedLoader) -> None:
        """Record the weights and the random state before any validation hook runs.

        A hook may exchange the weights. Iterators have drawn no random numbers yet.
        """
        trainer = self._strategy.current_trainer
        self._parts.stops.weights.before_validation(trainer)
        self._parts.recorder.before_validation()
        self.saver.had_validation_workers = False  # the loaders know it
        val_loop = trainer.fit_loop.epoch_loop.val_loop
        combined = combined_loader_of(val_loop)
        is_first_loader = combined is not None and iterable_of(combined.flattened[0]) is loader
        if is_first_loader and trainer.validating and val_loop.batch_progress.current.ready == 0:
            self.saver.record("validation")
            self._parts.recorder.record(Kind.BATCH)

    # Samplers.

    def _with_sampler(
        self, as_lightning: Prepare, dataloader: Any, shuffle: bool, stage: RunningStage
    ) -> Any:
        """Return the loader with our sampler where Lightning would put its own."""
        is_divided = global_order_of(dataloader) is not None
        if is_divided and stage == RunningStage.PREDICTING:
            sampler = getattr(dataloader.batch_sampler, "sampler", dataloader.sampler)
            return self._read_through(dataloader, sampler, stage)
        if is_divided:
            return dataloader
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
        """Return our sampler that replaces Lightning's, or ``None`` to keep that."""
        if stage in EVALUATED and not self.evaluation.is_exact:
            return None
        options = {
            **self._strategy.distributed_sampler_kwargs,
            "seed": self.cursor.seed,
            "uneven": "exact" if stage == RunningStage.PREDICTING else "pad",
        }
        sampler = users_sampler_of(loader)
        if not yields_each_once(sampler, loader.dataset):
            return SharedSampler(sampler, **options)
        if stage in EVALUATED and not can_count_once(loader):
            # Lightning's own sampler comes with a warning that samples are repeated.
            return None
        options["shuffle"] = shuffle and not self._strategy.current_trainer.overfit_batches
        kind = ScalableDistributedSampler if self._order == "scalable" else TorchOrderSampler
        return kind(loader.dataset, **options)


def users_sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler whose samples are divided among the ranks.

    It is the one inside the loader's batch sampler if that yields nothing but its
    samples, or if it draws.
    """
    inner = getattr(loader.batch_sampler, "sampler", None)
    has_own_samples = not isinstance(inner, DistributedSampler) and length_or_inf(inner) < inf
    only_groups = type(loader.batch_sampler) is BatchSampler and has_own_samples
    return inner if only_groups or isinstance(inner, DRAWING) else loader.sampler


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
