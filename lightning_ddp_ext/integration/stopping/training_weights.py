"""Tell whether a checkpoint would contain training progress, in the training's own weights.

A validation may swap other weights in, as ``EMAWeightAveraging`` does. A checkpoint that is
saved then would continue with these.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_ddp_ext.checksum import checksum

from ..private.lightning_tree import pl

# The hooks between the start of a validation and its first step, of callbacks and modules.
_HOOKS = ("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start")
_HOOK_OF_MODULES = "on_validation_model_eval"


class TrainingWeights:
    """The weights that one run of a Trainer trains.

    Attributes:
        batches_before: the number of batches that were trained on before this run.
    """

    def __init__(self) -> None:
        self.batches_before = 0
        self._trainer: Any = None  # once training has started
        # Checksums of the weights, during a validation that may swap others in.
        self._recorded: list[int] | None = None

    def on_train_start(self, trainer: Any) -> None:
        """Record how many batches were trained on before this run."""
        self._trainer = trainer
        self.batches_before = _batches_of(trainer)

    @property
    def has_started(self) -> bool:
        """Whether training has started."""
        return self._trainer is not None

    @property
    def has_trained(self) -> bool:
        """Whether training has made progress: this run has finished a batch."""
        return self.has_started and _batches_of(self._trainer) > self.batches_before

    def before_validation(self, trainer: Any) -> None:
        """Record the weights, if a hook may swap others in during validation.

        Further loaders of the same validation change nothing.
        """
        if self.has_trained and self._recorded is None and _may_swap(trainer):
            self._recorded = _checksums(trainer.lightning_module)

    def after_validation(self) -> None:
        """Forget the weights, since training uses its own."""
        self._recorded = None

    def match(self, module: torch.nn.Module) -> bool:
        """Whether the Trainer's module has the weights that this run trains."""
        return self._recorded is None or self._recorded == _checksums(module)


def _batches_of(trainer: Any) -> int:
    """Return the number of batches that were trained on, also before this run."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.processed)


def _may_swap(trainer: Any) -> bool:
    """Whether the module or a callback has a hook that may swap weights in.

    The excluded callbacks also have such hooks, but leave the weights alone.
    """
    is_overridden = pl.utilities.model_helpers.is_overridden
    module = trainer.lightning_module
    callbacks = [
        callback
        for callback in trainer.callbacks
        if not isinstance(callback, (pl.callbacks.ProgressBar, pl.callbacks.DeviceStatsMonitor))
        and not type(callback).__module__.startswith("lightning_ddp_ext.")
    ]
    return is_overridden(_HOOK_OF_MODULES, module) or any(
        is_overridden(hook, owner) for owner in [module, *callbacks] for hook in _HOOKS
    )


def _checksums(module: torch.nn.Module) -> list[int]:
    """Return checksums of the dense parameters."""
    return [int(checksum(each)) for each in module.parameters() if each.layout == torch.strided]
