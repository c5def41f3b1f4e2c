"""Ranks that have diverged in training are found, under our strategy and under stock
``ddp``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_ddp_ext import ConfigurationError, DivergenceError, RankConsistency
from tests.harness.training import At, Batch, Kind, Net, fit, on_ranks


def changing(batch: int, change: Callable[[Any], object], rank: int) -> At:
    """Change the model of a rank after a batch, or with 0 before the first one."""

    def change_model(trainer: L.Trainer) -> None:
        change(trainer.lightning_module)

    if batch == 0:
        return At("on_train_start", change_model, ranks=[rank])
    return At("on_train_batch_end", change_model, earlier=batch - 1, ranks=[rank])


@torch.no_grad()
def flip(*tensors: Tensor) -> None:
    """Flip a bit of one element of each."""
    for tensor in tensors:
        tensor.view(torch.uint8).view(-1)[0] ^= 1


def flip_weight(model: Any) -> None:
    flip(model.layers[0].weight)


def bias_state(model: Any) -> dict[str, Any]:
    state: dict[str, Any] = model.trainer.optimizers[0].state[model.layers[3].bias]
    return state


class Manual(Net):
    """Steps its optimiser by itself; rank 1 leaves out a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, index: int) -> None:
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        if (self.global_rank, index) != (1, 2):
            self.optimizers().step()


def ignore(model: Any) -> None:
    """Change nothing."""


@dataclass(frozen=True)
class Case:
    """The training, the change that rank 1 makes after a batch, and the error on each
    rank.
    """

    said: str | None  # None where what may differ is left alone
    change: Callable[[Any], object] = ignore
    batch: int = 2
    every: int = 1
    model: Callable[[], L.LightningModule] = Net
    trainer: dict[str, Any] = field(default_factory=dict)


WEIGHT = "rank 1 in parameter layers.0.weight"
STATE = "rank 1 in optimizer 0: momentum_buffer of layers.3.bias"
CASES = {
    "before the first step": Case(f"at the start of training: {WEIGHT}", flip_weight, 0),
    "own statistics": Case(None, lambda model: flip(model.layers[1].running_var)),
    "synchronised statistics": Case(
        "after step 2: rank 1 in buffer layers.1.running_var",
        lambda model: flip(model.layers[1].running_var),
        trainer={"sync_batchnorm": True},
    ),
    "accumulation": Case(
        f"after step 2: {WEIGHT}", flip_weight, 3, trainer={"accumulate_grad_batches": 2}
    ),
    "state": Case(
        f"after step 4: {STATE}", lambda model: flip(bias_state(model)["momentum_buffer"]), 4
    ),
    "missing state": Case(f"after step 4: {STATE}", lambda model: bias_state(model).clear(), 4),
    "after the last check": Case(f"at the end of training: {WEIGHT}", flip_weight, 4, every=3),
    "a step left out": Case(f"after step 4: {WEIGHT}", every=2, model=Manual),
}


def train(
    kind: Kind, directory: Path, case: Case, rank: int = 1, world_size: int = 2
) -> DivergenceError | None:
    L.seed_everything(3)
    change = changing(case.batch, case.change, rank)
    options = {"max_epochs": 1, "limit_val_batches": 0, "devices": world_size, **case.trainer}
    try:
        fit(kind, directory, case.model(), change, RankConsistency(case.every), **options)
    except DivergenceError as error:
        return error
    return None


def train_all(kind: Kind, directory: Path) -> dict[str, str | None]:
    """Run all cases, one after another, in the same processes; torch's own synchronised
    layers are for CUDA.
    """
    cases = {
        name: case
        for name, case in CASES.items()
        if kind == "ours" or "sync_batchnorm" not in case.trainer
    }
    errors = {name: train(kind, directory, case) for name, case in cases.items()}
    return {name: None if error is None else str(error) for name, error in errors.items()}


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_what_must_be_the_same_is_compared(kind: Kind, tmp_path: Path) -> None:
    """On both ranks the same error names the tensor; what may differ is left alone."""
    first, second = on_ranks(kind, train_all, tmp_path)
    assert first == second
    for name, text in first.items():
        said = CASES[name].said
        if said is None:
            assert text is None, name
        else:
            assert text.startswith(f"the ranks differ {said} ("), name


def diverge(kind: Kind, directory: Path) -> DivergenceError | None:
    case = Case(None, lambda model: flip(*model.layers[0].parameters()), every=2)
    return train(kind, directory, case, rank=0, world_size=3)


def test_the_error_names_the_first_tensor_and_the_ranks(tmp_path: Path) -> None:
    """All three ranks raise the error at the next check.

    It names the rank that differs from the other two, and its tensors.
    """
    names = ("parameter layers.0.weight", "parameter layers.0.bias")
    for error in on_ranks("stock", diverge, tmp_path, world_size=3):
        assert str(error).startswith(
            f"the ranks differ after step 2: rank 0 in {names[0]} (differing tensors: 2); "
        )
        assert (error.ranks, error.names) == ((0,), names)


class Sharded(Net):
    """Its optimiser has a part of the state on each rank."""

    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=0.01)


def resume_sharded(kind: Kind, directory: Path) -> None:
    """Train an epoch, and another one from its checkpoint, and compare after each step.

    Each rank has the optimiser's states of its part, so that a comparison of these would
    raise, also after a resume.
    """
    path = directory / "sharded.ckpt"
    for epochs in (1, 2):
        start = path if epochs == 2 else None
        consistency = RankConsistency(1)
        trainer = fit(kind, directory, Sharded(), consistency, ckpt_path=start, max_epochs=epochs)
        trainer.save_checkpoint(path)


def test_a_sharded_optimiser_is_left_out(tmp_path: Path) -> None:
    """After a resume each rank has the states of other parameters."""
    on_ranks("ours", resume_sharded, tmp_path)


def average(kind: Kind, directory: Path) -> str:
    averaging = {
        "ddp_comm_state": PostLocalSGDState(None, None, 2),
        "model_averaging_period": 2,
    }
    with pytest.raises(ConfigurationError) as refused:
        fit(kind, directory, Net(), RankConsistency(), strategy=averaging)
    return str(refused.value)


def test_models_that_are_averaged_are_refused(tmp_path: Path) -> None:
    """Such models differ on purpose."""
    for message in on_ranks("stock", average, tmp_path):
        assert message.startswith(
            "RankConsistency needs a strategy with the same model on each rank"
        )
