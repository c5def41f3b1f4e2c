"""Check whether a module has its training weights, or a hook has swapped others in."""

from __future__ import annotations

from typing import Any

import torch

from lightning_ddp_ext.checkpoint.recorded_buffers import saved_buffers
from lightning_ddp_ext.checksum import checksum

from ..private.lightning_tree import pl

# The hooks between the start of a validation and its first step.
_HOOKS = ("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start")
_MODULES_HOOK = "on_validation_model_eval"


class TrainingWeights:
    """The weights of a Trainer's run, from before a validation that may swap them.

    Attributes:
        has_trained: whether training has made progress that can be saved.
    """

    def __init__(self) -> None:
        self.has_trained = False
        self._recorded: list[int] | None = None  # checksums

    def on_training_step(self) -> None:
        """Record that training has made progress and uses its own weights."""
        self.has_trained = True
        self._recorded = None

    def before_validation(self, trainer: Any) -> None:
        """Record the weights, if a hook may swap others in during validation."""
        if self.has_trained and self._recorded is None and _may_swap(trainer):
            self._recorded = _checksums(trainer.lightning_module)

    def match(self, module: torch.nn.Module, *, with_buffers: bool = True) -> bool:
        """Whether the Trainer's module has the recorded values, if any are recorded.

        Without ``with_buffers``, only its parameters are compared.
        """
        if self._recorded is None:
            return True
        now = _checksums(module, with_buffers=with_buffers)
        return self._recorded[: len(now)] == now  # it begins with the parameters


def _may_swap(trainer: Any) -> bool:
    """Whether a hook may swap other weights in during validation.

    ``EMAWeightAveraging`` does so. The excluded callbacks also have such hooks, but leave
    the weights alone.
    """
    is_overridden = pl.utilities.model_helpers.is_overridden
    callbacks = [
        callback
        for callback in trainer.callbacks
        if not isinstance(callback, (pl.callbacks.ProgressBar, pl.callbacks.DeviceStatsMonitor))
        and not type(callback).__module__.startswith("lightning_ddp_ext.")
    ]
    owners = [trainer.lightning_module, *callbacks]
    return is_overridden(_MODULES_HOOK, trainer.lightning_module) or any(
        is_overridden(hook, owner) for owner in owners for hook in _HOOKS
    )


def _checksums(module: torch.nn.Module, *, with_buffers: bool = True) -> list[int]:
    """Return checksums of the dense parameters, then of the dense buffers in checkpoints."""
    tensors: list[torch.Tensor] = list(module.parameters())
    if with_buffers:
        tensors += [getattr(owner, name) for _, owner, name in saved_buffers(module)]
    return [int(checksum(each)) for each in tensors if each.layout == torch.strided]
