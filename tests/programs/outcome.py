"""Print the outcome of a program's training as a line that a test reads."""

import json
import sys
from typing import Any

from lightning.pytorch import Callback as LightningCallback
from pytorch_lightning import Callback


class _Numbers:
    """At the end of the training, rank 0 prints the parameters' mean size, the steps and
    the metrics.
    """

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            parameters = [parameter.detach() for parameter in pl_module.parameters()]
            size = sum(float(parameter.abs().sum()) for parameter in parameters)
            count = sum(parameter.numel() for parameter in parameters)
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            numbers = {
                "parameters": size / count,
                "steps": trainer.global_step,
                "ranks": trainer.world_size,
                **metrics,
            }
            sys.stdout.write(f"numbers {json.dumps(numbers)}\n")
            sys.stdout.flush()


class LightningNumbers(_Numbers, LightningCallback):
    """For programs that import ``lightning``."""


class PytorchLightningNumbers(_Numbers, Callback):
    """For programs that import ``pytorch_lightning``."""
