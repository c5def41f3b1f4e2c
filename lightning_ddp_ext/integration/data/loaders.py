"""Wrap the loaders of a strategy, and start their iterators.

Lightning calls :meth:`TrainerLoaders.prepare` where it would put its own sampler into a
loader. For predictions, it gets what it would make itself. Otherwise, the result appears
to be the user's loader; it iterates a ``DistributedLoader``, whose iterators do nothing
until their first batch is requested. Then:

1. The epoch is set in the loader.
2. In training, the epoch's first iterator lets ``Resume`` decide where the epoch begins,
   and starts the iterators of all training loaders, so that all of them draw random
   numbers before any batch is read.
3. Before each batch of the first training loader, all ranks may stop.

How the samples of a loader are divided among the ranks:

================================================  =====================================
Loader                                            What the ranks read
================================================  =====================================
it has one of our samplers                        the loader itself
the Trainer would put its own sampler into it,    a copy with a sampler of ours, see
and its class iterates as torch's                 ``data.division``
any other, also if ``data.division`` has no       the loader that the Trainer makes
sampler for it, or an evaluation is not exact
================================================  =====================================
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, get_args

from lightning_ddp_ext.arguments import check_choice
from lightning_ddp_ext.data.division import divide
from lightning_ddp_ext.data.inspection import is_of_torch
from lightning_ddp_ext.data.loader import DistributedLoader, LazyIterator, Started, source_of
from lightning_ddp_ext.data.position import Position, global_order_of, position_of
from lightning_ddp_ext.data.proxy import own_copy

from ..callbacks.sampler_epoch_seeding import worker_seed_of
from ..cooperation import CooperatingRanks
from ..private.compat import (
    active_loop_of,
    combined_iterator_of,
    is_read_by,
    iterators_of,
    needs_sampler,
)
from ..private.lightning_tree import RunningStage
from ..private.replaced_methods import Prepare, ReplacedMethods
from ..start.devices import RankDevicesStrategy
from ..stopping.stops import StopController
from .evaluation import Evaluation
from .orders import training_loaders_of
from .resume import Resume, ResumeData
from .training_loaders import AHEAD, UnevenInputs, UnevenMode


class TrainerLoaders:
    """The loaders of a strategy's ranks, and the parts of the strategy that read them.

    Args:
        strategy: our strategy.
        ranks: gathers the ranks' states.
        stops: stops all ranks before a batch.
        replaced: restores what a run changes in Lightning.
        exact_evaluation, uneven_inputs, resume_data: see ``DDPExtStrategy``.

    Attributes:
        uneven: handles ranks with different numbers of training batches.
        evaluation: counts each sample once.
        resume: saves where training continues, and continues there.
    """

    def __init__(
        self,
        strategy: RankDevicesStrategy,
        ranks: CooperatingRanks,
        stops: StopController,
        replaced: ReplacedMethods,
        *,
        exact_evaluation: bool,
        uneven_inputs: UnevenMode | None,
        resume_data: ResumeData,
    ) -> None:
        check_choice("exact_evaluation", exact_evaluation, True, False)
        check_choice("resume_data", resume_data, *get_args(ResumeData))
        check_choice("uneven_inputs", uneven_inputs, None, *get_args(UnevenMode))
        self._strategy = strategy
        self._stops = stops
        self._replaced = replaced
        self.evaluation = Evaluation(strategy, is_exact=exact_evaluation)
        self.resume = Resume(strategy, ranks, stops, replaced, resume_data)
        self.uneven = UnevenInputs(strategy, uneven_inputs)
        # Lightning's iterator over all training loaders, in the epoch that began last. Since
        # Lightning creates another one for each epoch, it identifies the epoch.
        self._combined_iterator: Any = None

    def attach(self, trainer: Any) -> None:
        """Reset the state, and make a Trainer call :meth:`prepare`.

        The Trainer then calls it where it would put its own sampler into a loader.
        """
        self.resume.attach(trainer)
        self.evaluation.end()
        self._combined_iterator = None  # it keeps the loaders of an earlier run
        self._replaced.prepare_loaders(trainer, self.prepare)

    # Preparing loaders.

    def prepare(
        self, as_lightning: Prepare, dataloader: Any, shuffle: bool, mode: RunningStage
    ) -> object:
        """Return the loader that the Trainer reads in place of the given one.

        Collective: every rank must call it.
        """
        source = source_of(dataloader)  # another Trainer or stage may have prepared it already
        if mode == RunningStage.PREDICTING:
            return as_lightning(source, shuffle, mode)
        divided = self._divide(as_lightning, source, shuffle, mode)
        is_divided = divided is not source
        if mode == RunningStage.TRAINING:
            self._combined_iterator = None  # it keeps earlier loaders, which are not needed
            loader = DistributedLoader(
                divided,
                self._start,
                is_divided=is_divided,
                length=self.uneven.agree_on_length(divided),
                position_in=self._position_in,
            )
        else:
            loader = DistributedLoader(
                divided, self._start, on_iterator=self._before_validation, is_divided=is_divided
            )
            self.evaluation.prepare(loader, mode)
        return loader.shown()

    def _divide(
        self, as_lightning: Prepare, source: Any, shuffle: bool, stage: RunningStage
    ) -> Any:
        """Return the loader that this rank reads, see the module's table.

        Collective until the seed is determined.
        """
        seed = self.resume.orders.agree()
        if global_order_of(source) is not None:
            return source
        divided = None
        if self._may_divide(source, stage):
            trainer = self._strategy.current_trainer
            divided = divide(
                source,
                {**self._strategy.distributed_sampler_kwargs, "seed": seed},
                shuffle=shuffle and not trainer.overfit_batches,
                counts_once=stage != RunningStage.TRAINING,
            )
        return as_lightning(source, shuffle, stage) if divided is None else divided

    def _may_divide(self, source: Any, stage: RunningStage) -> bool:
        """Whether a sampler of ours may take the place of the one that the Trainer adds."""
        # Another class may keep its sampler, or an iterator over it, elsewhere.
        iterates_as_torch = is_of_torch(source, "__iter__", "__len__")
        # In an evaluation that is not exact, Lightning's sampler repeats samples, with a warning.
        is_ours = stage == RunningStage.TRAINING or self.evaluation.is_exact
        return (
            iterates_as_torch and is_ours and needs_sampler(self._strategy.current_trainer, source)
        )

    def _position_in(self, loader: Any) -> Position:
        # Batches that may be read, but are not done at a checkpoint.
        read_ahead = self._strategy.current_trainer.accumulate_grad_batches + 1 + AHEAD
        return position_of(loader, read_ahead, self._strategy.world_size)

    def _before_validation(self) -> None:
        """Record the weights and the random state before any validation hook runs.

        A hook may exchange the weights. Iterators have drawn no random numbers yet.
        """
        trainer = self._strategy.current_trainer
        self._stops.weights.before_validation(trainer)
        if trainer.validating:
            self.resume.before_validation()

    # Starting iterators.

    def _start(self, iterator: LazyIterator) -> Started:
        """Start an iterator over a loader, because its first batch was requested.

        User code reads a copy of the loader, without setting its epoch, since a loop may be
        reading the loader itself.
        """
        trainer = self._strategy.current_trainer
        loader = iterator.loader
        loops = (trainer.fit_loop, active_loop_of(trainer))
        if not any(is_read_by(loop, iterator) for loop in loops):
            with self._workers_of(loader):
                return Started(iter(own_copy(loader.loader)))
        # Without a length, Lightning reads a resumed epoch's first batch before it sets the
        # epoch of samplers.
        is_set_by_lightning = not self.resume.awaits_train_start
        loader.set_epoch(self.resume.epoch, is_set_by_lightning=is_set_by_lightning)
        if loader.position is not None:  # the data are for training
            return self._start_training(loader, loader.position, iterator)
        with self._workers_of(loader):
            return Started(self.evaluation.start(loader))

    def _workers_of(self, loader: DistributedLoader) -> AbstractContextManager[None]:
        """Give the epoch and seeds to the workers of an iterator created in the block."""
        return loader.workers_of(
            self.resume.epoch,
            rank=self._strategy.global_rank,
            seed=worker_seed_of(self._strategy.current_trainer),
        )

    def _start_training(
        self, loader: DistributedLoader, position: Position, iterator: LazyIterator
    ) -> Started:
        """Start an iterator of the fit loop; the first one of an epoch starts all others.

        All ranks may then stop before the epoch's first batch. If a loader is shorter than
        the epoch and begins again, they could do so when the ended iterator was asked for
        this batch.
        """
        fit_loop = self._strategy.current_trainer.fit_loop
        if combined_iterator_of(fit_loop) is self._combined_iterator:
            return self._read_from(position, loader)
        self._combined_iterator = combined_iterator_of(fit_loop)
        self.resume.before_iterators()
        started = self._read_from(position, loader)
        for other in iterators_of(fit_loop):
            if other is not iterator:
                other.start()  # calls this method, for an epoch that has begun
        self.resume.after_iterators()
        started.before_next()
        return started

    def _read_from(self, position: Position, loader: DistributedLoader) -> Started:
        """Read a training loader from its position.

        All ranks may stop before each further batch of the first loader.
        """
        if self.resume.start.is_last:
            return Started(iter(()))
        with self._workers_of(loader):
            batches = self.uneven.give_batches(position.iterate())
        is_first = loader is training_loaders_of(self._strategy.current_trainer)[0]
        return Started(batches, self._stops.before_batch) if is_first else Started(batches)
