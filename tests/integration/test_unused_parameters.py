"""Parameters that a loss does not use are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_ddp_ext import DDPExtStrategy
from tests.harness.ranks import by_hand_env, launch_ranks
from tests.harness.training import Net, make_trainer


class Forgetful(Net):
    """Leaves layers out of the loss on some ranks."""

    def __init__(self, unused: int, on: tuple[int, ...]) -> None:
        super().__init__()
        self.spare = nn.ModuleList(nn.Linear(1, 1) for _ in range(unused))
        self.on = on

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.global_rank not in self.on:
            loss = loss + sum(layer(batch[1]).mean() for layer in self.spare)
        return loss


def fit(rank: int, world_size: int, directory: Path, unused: int, on: tuple[int, ...]) -> None:
    make_trainer(DDPExtStrategy(f"file://{directory}/meet")).fit(Forgetful(unused, on))


@pytest.mark.parametrize("on", [(0, 1), (1,)], ids=["on all ranks", "on one rank"])
def test_unused_parameters_are_named(on: tuple[int, ...], tmp_path: Path) -> None:
    """The first ten, how many there are, and what to write if that is meant."""
    outcomes = launch_ranks(fit, 2, tmp_path, 6, on, env=by_hand_env(2))
    for rank in on:
        error = outcomes[rank].error
        assert error is not None
        message = str(error.exception)
        assert message.startswith(
            f"rank {rank} has not used these parameters in the loss that training_step returned: "
            "spare.0.weight, spare.0.bias, spare.1.weight, spare.1.bias, spare.2.weight, spare.2.bias, spare.3.weight, "
            "spare.3.bias, spare.4.weight, spare.4.bias and 2 more; DDP waits for their gradients. If that is meant, "
            "choose strategy='ddp_ext_find_unused_parameters_true', or DDPExtStrategy(find_unused_parameters=True)\n"
        ), message
    assert all(outcome.exit_code == 1 for outcome in outcomes)
