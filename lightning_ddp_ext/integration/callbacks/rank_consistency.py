"""A callback that finds ranks whose models, optimisers or options are not the same, with any ``ddp`` strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_ddp_ext.checkpoint.collectives import Ranks
from lightning_ddp_ext.errors import ConfigurationError, OptionError
from lightning_ddp_ext.integration.lightning_tree import (
    Callback,
    LightningModule,
    Strategy,
    Trainer,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_ddp_ext.supervision.consistency import Consistency, OnDivergence
from lightning_ddp_ext.supervision.description import options_of, structure_of
from lightning_ddp_ext.supervision.replicas import BuffersCompared, Replicas, is_averaging, is_sharded

_TRAINER_OPTIONS = (
    "accumulate_grad_batches",
    "check_val_every_n_epoch",
    "fast_dev_run",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "limit_predict_batches",
    "limit_test_batches",
    "limit_train_batches",
    "limit_val_batches",
    "log_every_n_steps",
    "max_epochs",
    "max_steps",
    "min_epochs",
    "min_steps",
    "num_sanity_val_steps",
    "overfit_batches",
    "precision",
    "val_check_interval",
)


class RankConsistency(Callback):
    """Finds ranks that are not alike, and says which they are and what differs.

    Before DDP wraps the model, so that a wrong one gets a sentence: the classes of its modules, the names, dtypes,
    shapes and ``requires_grad`` of parameters and buffers, ``hparams`` of the module and of the datamodule, and the
    Trainer's options for lengths, accumulation, clipping, validation and precision. When training begins, and after
    every n-th step: parameters, buffers, the state and options of optimisers (``lr``, ...), to the last bit, classes of
    optimisers and schedulers, and the number of steps; once more when training ends. Each time that is one small
    collective if all is equal, and a second one if not. With one rank nothing is done.

    What legitimately differs is left out: buffers that the ranks write to in training, each from its own data, such as
    the running statistics of BatchNorm (DDP gives all of them rank 0's before each forward; those that are
    synchronised over all ranks are compared); buffers that are not saved; all other buffers under
    ``broadcast_buffers=False``; parameters and buffers that DDP was told to ignore; the state of a
    ``ZeroRedundancyOptimizer``, of which each rank has a part; states of metrics, random states, and tensors that are
    sparse or quantised.

    A step is what ``trainer.global_step`` counts. A module that optimises by hand may have another number of these on
    each rank, and so its steps are training batches here; where they have other numbers of optimiser steps, that is
    found, too.

    Args:
        every_n_steps: from one check to the next.
        on_divergence: ``"raise"`` ``DivergenceError`` on every rank; ``"warn"``, once of each finding; or
            ``"broadcast"``: what rank 0 has takes the place of what differs, with a warning, and training goes on. That
            which has other names, dtypes or shapes cannot be replaced and is raised, as is all that differs before
            training begins.
        ignore: patterns (``fnmatch``) of what may differ, for names as messages have them or for the last word of
            these: ``"data_dir"``, ``"encoder.*"``, ``"optimizer 0: lr of *"``, ``"max_epochs"``.
        buffers: ``"constant"``: as above; ``"all"``, or ``"none"``.

    Raises:
        OptionError: an argument cannot work.
        ConfigurationError: in ``fit``: the strategy is none that keeps a whole model on each rank, or averages models
            now and then (post-local SGD), so that they differ on purpose in between.
        DivergenceError: in ``fit``: the ranks differ.

    Example::

        trainer = L.Trainer(strategy="ddp", devices=2, callbacks=[RankConsistency(every_n_steps=500)])
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        on_divergence: OnDivergence = "raise",
        *,
        ignore: Sequence[str] = (),
        buffers: BuffersCompared = "constant",
    ) -> None:
        if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool) or every_n_steps < 1:
            raise OptionError(
                f"every_n_steps must be a whole number, at least 1 (got {every_n_steps!r}); 100 costs little"
            )
        self.every_n_steps = every_n_steps
        self._consistency = Consistency(
            on_divergence=on_divergence, ignore=ignore, buffers=buffers, warn=rank_zero_warn
        )
        self._replicas: Replicas | None = None
        self._last_step = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and _has_several_ranks():
            _refuse_averaging(trainer.strategy)
            _do_before_setup(trainer.strategy, lambda: self._compare_setup(trainer, pl_module))

    def _compare_setup(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._consistency.compare_setup(_setup_of(trainer, pl_module), _ranks(trainer))

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not _has_several_ranks():
            return
        wrapped = trainer.strategy.model
        _refuse_other_strategies(trainer.strategy)
        self._replicas = Replicas(
            pl_module,
            buffers=self._consistency.buffers,
            are_buffers_sent=bool(getattr(wrapped, "broadcast_buffers", True)),
            ignore=self._consistency.ignore,
        )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._replicas is not None:
            _say_what_is_left_out(trainer)
            self._last_step = _steps(trainer, pl_module)
            self._compare(trainer, when="at the start of training")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = _steps(trainer, pl_module)
        if self._replicas is not None and step % self.every_n_steps == 0 and step != self._last_step:
            self._last_step = step
            self._compare(trainer, when=f"after step {step}")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._replicas is not None and _steps(trainer, pl_module) != self._last_step:
            self._compare(trainer, when="at the end of training")

    def _compare(self, trainer: Trainer, *, when: str) -> None:
        assert self._replicas is not None
        others = _counts_and_classes(trainer)
        self._consistency.compare(self._replicas, trainer.optimizers, others, _ranks(trainer), when=when)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave(trainer)

    def _leave(self, trainer: Trainer) -> None:
        self._replicas = None
        vars(trainer.strategy).pop("setup", None)


def _has_several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _ranks(trainer: Trainer) -> Ranks:
    return Ranks(dist.get_rank(), dist.get_world_size(), trainer.strategy.root_device)


def _steps(trainer: Trainer, pl_module: LightningModule) -> int:
    """A count that is the same on all ranks whatever they have in their training steps."""
    if pl_module.automatic_optimization:
        return trainer.global_step
    return trainer.fit_loop.epoch_loop.total_batch_idx + 1


def _do_before_setup(strategy: Strategy, work: Callable[[], None]) -> None:
    """No hook comes after ``configure_model`` and before DDP, which compares shapes in its own words."""
    setup = strategy.setup

    def work_and_setup(trainer: Trainer) -> None:
        vars(strategy).pop("setup", None)
        work()
        setup(trainer)

    strategy.setup = work_and_setup  # type: ignore[method-assign]


def _refuse_averaging(strategy: Strategy) -> None:
    is_averaged = any(is_averaging(optimizer) for optimizer in strategy.optimizers)
    if is_averaged or isinstance(getattr(strategy, "_ddp_comm_state", None), PostLocalSGDState):
        raise ConfigurationError(
            "RankConsistency cannot compare models that differ on purpose until they are averaged (post-local SGD); "
            "leave out one of the two"
        )


def _refuse_other_strategies(strategy: Strategy) -> None:
    _refuse_averaging(strategy)  # now there are optimisers, too
    if not isinstance(strategy.model, DistributedDataParallel):
        raise ConfigurationError(
            f"RankConsistency needs a strategy that keeps a whole model on each rank, such as 'ddp' or 'ddp_ext' (got "
            f"{type(strategy).__name__}); leave the callback out"
        )


def _say_what_is_left_out(trainer: Trainer) -> None:
    for index, optimizer in enumerate(trainer.optimizers):
        if is_sharded(optimizer):
            rank_zero_info(
                f"RankConsistency: the state of optimizer {index}, a {type(optimizer).__name__}, is not compared, as "
                "each rank has another part of it"
            )


def _setup_of(trainer: Trainer, pl_module: LightningModule) -> dict[str, str]:
    options = {name: getattr(trainer, name) for name in _TRAINER_OPTIONS if hasattr(trainer, name)}
    return {
        **structure_of(pl_module),
        **options_of("hyper-parameter", _hparams(pl_module)),
        **options_of("datamodule's hyper-parameter", _hparams(getattr(trainer, "datamodule", None))),
        **options_of("Trainer's", options),
    }


def _hparams(owner: Any) -> Mapping[Any, Any]:
    found = getattr(owner, "hparams", None)
    return found if isinstance(found, Mapping) else {}


def _counts_and_classes(trainer: Trainer) -> dict[str, str]:
    texts = {"number of optimiser steps": str(trainer.global_step)}
    for index, optimizer in enumerate(trainer.optimizers):
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        texts[f"optimizer {index}"] = f"{type(optimizer).__name__} with groups of {sizes} parameters"
    for index, config in enumerate(trainer.lr_scheduler_configs):
        each = f"every {config.frequency} {config.interval}"
        texts[f"scheduler {index}"] = f"{type(config.scheduler).__name__}, {each}"
    return texts
