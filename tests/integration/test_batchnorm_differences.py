"""Ranks that run different BatchNorm layers raise, instead of mixing up statistics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from torch import Tensor, nn

from lightning_ddp_ext import SyncBatchNormConversion
from tests.harness.ranks import launch_ranks
from tests.harness.training import Batch, Net, fit


class Normalised(Net):
    """Three BatchNorm layers with a linear one behind each of them.

    Args:
        run_otherwise: runs the layers in the second step of rank 1.
    """

    def __init__(self, run_otherwise: Callable[[Normalised, Tensor], Tensor]) -> None:
        super().__init__()
        self.norms = nn.ModuleDict(
            {name: nn.BatchNorm1d(4) for name in ("first", "middle", "last")}
        )
        self.linears = nn.ModuleDict({name: nn.Linear(4, 4) for name in self.norms})
        self.layers = nn.Linear(4, 1)
        self.run_otherwise = run_otherwise

    def run_layers(self, x: Tensor, left_out: str = "") -> Tensor:
        for name, norm in self.norms.items():
            x = self.linears[name](x if name == left_out else norm(x))
        return x

    def training_step(self, batch: Batch, index: int) -> Tensor:
        is_other = self.global_rank == 1 and index == 1
        run = self.run_otherwise if is_other else Normalised.run_layers
        x, y = batch
        return self.loss([run(self, x), y])


def run_twice(model: Normalised, x: Tensor) -> Tensor:
    model.run_layers(x)
    return model.run_layers(x)


WITHOUT_FIRST = partial(Normalised.run_layers, left_out="first")
WITHOUT_LAST = partial(Normalised.run_layers, left_out="last")


def train(rank: int, world_size: int, directory: Path, model: Normalised, by_flag: bool) -> None:
    callbacks = [] if by_flag else [SyncBatchNormConversion()]
    unused = {"find_unused_parameters": True}
    fit("ours", directory, model, *callbacks, strategy=unused, sync_batchnorm=by_flag)


@pytest.mark.lowest
@pytest.mark.parametrize(
    ("run_otherwise", "by_flag", "place_of_rank_0", "place_of_rank_1"),
    [
        (WITHOUT_FIRST, False, "forward pass of norms.first", "forward pass of norms.middle"),
        (WITHOUT_LAST, False, "forward pass of norms.last", "backward pass of norms.middle"),
        (run_twice, True, "backward pass of norms.last", "forward pass of norms.first"),
    ],
)
def test_ranks_that_run_other_layers_raise(
    run_otherwise: Callable[[Normalised, Tensor], Tensor],
    by_flag: bool,
    place_of_rank_0: str,
    place_of_rank_1: str,
    tmp_path: Path,
) -> None:
    """Every rank's error names each rank's layer."""
    message = (
        f"ranks are in different BatchNorm layers or passes: rank 0 is in the {place_of_rank_0},"
        f" rank 1 is in the {place_of_rank_1}"
    )
    outcomes = launch_ranks(train, 2, tmp_path, Normalised(run_otherwise), by_flag)
    assert "BatchNormError" in [outcome.failure.type_name for outcome in outcomes]
    assert all(message in outcome.failure.message for outcome in outcomes)
