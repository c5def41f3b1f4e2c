"""DDP's error about unused parameters names them."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import Tensor, nn

from tests.harness import training

SPARE_LAYERS = 6


class Forgetful(training.Net):
    """Leaves its spare layers out of the loss on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.ModuleList(nn.Linear(1, 1) for _ in range(SPARE_LAYERS))

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.global_rank == 0:
            loss = loss + sum(layer(batch[1]).mean() for layer in self.spare)
        return loss


def freeze_first_layer(trainer: L.Trainer) -> None:
    model: Any = trainer.lightning_module
    model.layers[0].requires_grad_(False)


FREEZE = training.At("on_train_start", freeze_first_layer)
FIRST_LAYER = ["layers.0.weight", "layers.0.bias"]
SPARE = [f"spare.{layer}.{name}" for layer in range(SPARE_LAYERS) for name in ("weight", "bias")]


@pytest.mark.parametrize(
    ("callbacks", "unused"),
    [
        pytest.param([], SPARE, id="unused"),
        # DDP waits for parameters that were frozen after it was built.
        pytest.param([FREEZE], FIRST_LAYER + SPARE, id="unused and frozen"),
    ],
)
def test_unused_parameters_are_named(
    callbacks: list[L.Callback], unused: list[str], tmp_path: Path
) -> None:
    """The error names the first ten, the number of others, and the option that allows it;
    the other rank also exits.
    """
    first, second = training.fit_on(2, tmp_path, Forgetful(), *callbacks)
    assert (first.exit_code, second.exit_code) == (1, 1)
    assert second.failure.message.startswith(
        "rank 1 did not use these parameters to compute the loss that training_step returned:"
        f" {', '.join(unused[:10])} and {len(unused) - 10} more; DDP waits for their gradients. If"
        " this is intended, choose strategy='ddp_ext_find_unused_parameters_true', or"
        " DDPExtStrategy(find_unused_parameters=True)\n"
    ), second.failure.message
