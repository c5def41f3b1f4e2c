"""BatchNorm over all ranks where a rank runs other layers: all end, with the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import lightning_ddp_ext as ddpx
from tests.harness.ranks import launch_ranks
from tests.harness.training import Batch, Net
from tests.supervision.model import by_hand, make_trainer


class Normalised(Net):
    """BatchNorm layers with a linear one behind each of them.

    Args:
        leaves_out: the layer that rank 1 does not run in its second step.
        extra: the rank that runs the whole model once more in its second step.
    """

    def __init__(self, *, leaves_out: str = "", extra: int | None = None) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({name: nn.BatchNorm1d(4) for name in ("first", "middle", "last")})
        self.linears = nn.ModuleDict({name: nn.Linear(4, 4) for name in self.norms})
        self.layers = nn.Linear(4, 1)  # type: ignore[assignment]
        self.leaves_out, self.extra = leaves_out, extra

    def training_step(self, batch: Batch, index: int) -> Tensor:
        is_second = index == 1
        if is_second and self.global_rank == self.extra:
            self.run_layers(batch[0], is_second)
        return self.loss([self.run_layers(batch[0], is_second), batch[1]])

    def run_layers(self, x: Tensor, is_second: bool) -> Tensor:
        is_other = is_second and self.global_rank == 1
        for name, norm in self.norms.items():
            x = self.linears[name](x if is_other and name == self.leaves_out else norm(x))
        return x


def fit(rank: int, world_size: int, directory: Path, model: Normalised, *, by: str = "callback") -> None:
    callbacks = [ddpx.SyncBatchNormConversion()] if by == "callback" else []
    strategy = by_hand(rank, world_size, f"file://{directory}/store", find_unused_parameters=True)
    make_trainer(world_size, strategy, *callbacks, sync_batchnorm=by == "flag").fit(model)


DIFFERENCES: list[tuple[str, dict[str, Any], str, str]] = [
    ("callback", {"leaves_out": "first"}, "forward pass of norms.first", "forward pass of norms.middle"),
    ("callback", {"leaves_out": "last"}, "forward pass of norms.last", "backward pass of norms.middle"),
    ("flag", {"extra": 1}, "backward pass of norms.last", "forward pass of norms.first"),
]


@pytest.mark.lowest
@pytest.mark.parametrize(("by", "options", "first", "second"), DIFFERENCES)
def test_ranks_that_run_other_layers_raise(
    by: str, options: dict[str, Any], first: str, second: str, tmp_path: Path
) -> None:
    """If a rank skips a layer, or runs one more often, every rank's error names each rank's layer."""
    told = f"ranks are in different BatchNorm layers or passes: rank 0 is in the {first}, rank 1 is in the {second}"
    errors = [outcome.error for outcome in launch_ranks(fit, 2, tmp_path, Normalised(**options), by=by)]
    assert "BatchNormError" in [error and error.type_name for error in errors]
    for error in errors:
        assert error is not None
        assert told in error.message
