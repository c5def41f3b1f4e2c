"""A callback that finds ranks whose models, optimisers or options are not the same, with any ``ddp`` strategy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_ddp_ext.errors import ConfigurationError, DivergenceError
from lightning_ddp_ext.ranks import Ranks
from lightning_ddp_ext.supervision.replica_check import OnDivergence, ReplicaCheck
from lightning_ddp_ext.supervision.replica_state import option_texts, structure_texts

from ..lightning_tree import pl, rank_zero_warn

_TRAINER_OPTIONS = (
    "accumulate_grad_batches",
    "check_val_every_n_epoch",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "limit_train_batches",
    "limit_val_batches",
    "max_epochs",
    "max_steps",
    "min_epochs",
    "min_steps",
    "num_sanity_val_steps",
    "precision",
    "val_check_interval",
)


class RankConsistency(pl.Callback):
    """Finds ranks that are not alike, and says which they are and what differs.

    Before DDP wraps the model, it compares the classes of modules, the names, dtypes, shapes and ``requires_grad`` of
    parameters and buffers, ``hparams`` of the module and of the datamodule, and the Trainer's options for lengths,
    accumulation, clipping, validation and precision. When training begins, after every n-th step and when training
    ends, it compares parameters, buffers, and the classes, options (``lr``, ...) and state of optimisers to the last
    bit, and the number of optimiser steps. Each time the ranks exchange one digest, and more only if it differs. With
    one rank it does nothing.

    It leaves out what may differ: buffers that ranks change in training, each from its own data, such as the running
    statistics of BatchNorm (those that are synchronised over all ranks are compared); buffers that are not saved; all
    other buffers under ``broadcast_buffers=False``; the state of a ``ZeroRedundancyOptimizer``, of which each rank has
    a part; the contents of sparse and quantised tensors; states of metrics, and random states.

    A step is what ``trainer.global_step`` counts; with manual optimisation it is a training batch.

    Args:
        every_n_steps: from one check to the next.
        on_divergence: ``"raise"`` ``DivergenceError`` on every rank; ``"warn"``, once of each finding; or
            ``"broadcast"``, which replaces what differs by rank 0's values, with a warning. Values that have other
            names, dtypes or shapes are raised instead, as is all that differs before training begins.
        ignore: patterns (``fnmatch``) of what may differ, for names as messages have them or for their last word:
            ``"data_dir"``, ``"encoder.*"``, ``"optimizer 0: lr of *"``, ``"max_epochs"``.
        check_finite: whether a rank whose loss is infinite or no number says so before its backward pass, with its
            rank, step and batch. It needs no collective; on a GPU it waits for the loss.

    Raises:
        ConfigurationError: an argument cannot work.
        ConfigurationError: in ``fit``: the strategy does not keep a whole model on each rank, or averages models only
            now and then (post-local SGD).
        DivergenceError: in ``fit``: the ranks differ, or a loss is not finite.

    Example::

        trainer = L.Trainer(strategy="ddp", devices=2, callbacks=[RankConsistency(every_n_steps=500)])
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        on_divergence: OnDivergence = "raise",
        *,
        ignore: Sequence[str] = (),
        check_finite: bool = False,
    ) -> None:
        if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool) or every_n_steps < 1:
            raise ConfigurationError(
                f"every_n_steps must be a whole number, at least 1 (got {every_n_steps!r}); 100 costs little"
            )
        self.every_n_steps = every_n_steps
        self.check_finite = check_finite
        self._on_divergence = on_divergence
        self._check = ReplicaCheck(on_divergence=on_divergence, ignore=ignore, warn=rank_zero_warn)
        self._is_needed = False
        self._last_step = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._is_needed = stage == "fit" and trainer.world_size > 1
        if self._is_needed:
            _call_before_setup(trainer.strategy, lambda: self._compare_setup(trainer, pl_module))

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_needed and _ddp_of(trainer.strategy).broadcast_buffers:
            self._check.remember_buffers(pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._compare(trainer, pl_module, when="at the start of training")

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if not self.check_finite or bool(torch.isfinite(loss.detach()).all()):
            return
        rank, batch_idx = trainer.global_rank, trainer.fit_loop.epoch_loop.batch_idx
        text = (
            f"the loss of rank {rank} is {float(loss.detach().sum())} in step {trainer.global_step}, batch {batch_idx} "
            f"of epoch {trainer.current_epoch}; look at that batch, or find the operation with "
            "Trainer(detect_anomaly=True)"
        )
        if self._on_divergence != "warn":
            raise DivergenceError(text, ranks=(rank,), names=("loss",))
        warnings.warn(text, stacklevel=2)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = _steps(trainer, pl_module)
        if step % self.every_n_steps == 0 and step != self._last_step:
            self._compare(trainer, pl_module, when=f"after step {step}")

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if _steps(trainer, pl_module) != self._last_step:
            self._compare(trainer, pl_module, when="at the end of training")

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        vars(trainer.strategy).pop("setup", None)

    def _compare_setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        texts = {
            **structure_texts(pl_module),
            **option_texts("hyper-parameter", _hparams(pl_module)),
            **option_texts("datamodule's hyper-parameter", _hparams(getattr(trainer, "datamodule", None))),
            **option_texts("Trainer's", {name: getattr(trainer, name) for name in _TRAINER_OPTIONS}),
        }
        self._check.compare_setup(texts, _ranks(trainer))

    def _compare(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *, when: str) -> None:
        if not self._is_needed:
            return
        self._last_step = _steps(trainer, pl_module)
        self._check.compare(
            pl_module,
            trainer.optimizers,
            _ranks(trainer),
            when=when,
            others={"number of optimiser steps": str(trainer.global_step)},
        )


def _ranks(trainer: pl.Trainer) -> Ranks:
    return Ranks(trainer.global_rank, trainer.world_size, trainer.strategy.root_device)


def _steps(trainer: pl.Trainer, pl_module: pl.LightningModule) -> int:
    """Return a count that is the same on all ranks, also if a module steps its optimisers on some ranks only."""
    if pl_module.automatic_optimization:
        return trainer.global_step
    return trainer.fit_loop.epoch_loop.total_batch_idx + 1


def _call_before_setup(strategy: pl.strategies.Strategy, work: Callable[[], None]) -> None:
    """Call ``work`` after ``configure_model`` and before DDP wraps the model, where Lightning has no hook."""
    setup = strategy.setup

    def work_and_setup(trainer: pl.Trainer) -> None:
        vars(strategy).pop("setup", None)
        work()
        setup(trainer)

    strategy.setup = work_and_setup  # type: ignore[method-assign]


def _ddp_of(strategy: pl.strategies.Strategy) -> DistributedDataParallel:
    if not isinstance(strategy.model, DistributedDataParallel):
        raise ConfigurationError(
            f"RankConsistency needs a strategy that keeps a whole model on each rank, such as 'ddp' or 'ddp_ext' (got "
            f"{type(strategy).__name__}); leave the callback out"
        )
    if getattr(strategy, "_model_averager", None) is not None:
        raise ConfigurationError(
            "RankConsistency cannot compare models that differ on purpose until they are averaged (post-local SGD); "
            "leave out one of the two"
        )
    return strategy.model


def _hparams(owner: Any) -> Mapping[Any, Any]:
    found = getattr(owner, "hparams", None)
    return found if isinstance(found, Mapping) else {}
