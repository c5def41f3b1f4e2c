"""`DDPExtStrategy` in place of `ddp`: the same numbers, to the last bit.

These are the models, options and loaders that the programs of ``test_stock_sweep`` do
not have.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from tests.harness import training

# Manual optimisation, as Lightning's documentation shows it.


class ByHand(training.Net):
    """Steps an optimiser by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: training.Batch, index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.log("loss", loss, prog_bar=True, sync_dist=True)


class Accumulates(ByHand):
    """Steps after every second batch, and the scheduler at the end of the epoch."""

    def training_step(self, batch: training.Batch, index: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if (index + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()


class WithClosure(ByHand):
    """Passes a closure to an optimiser that calls it several times."""

    def training_step(self, batch: training.Batch, index: int) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Case(NamedTuple):
    """A model, options of the Trainer and of the strategy."""

    model: type[training.Net] = training.Net
    trainer: Mapping[str, Any] = {}
    strategy: Mapping[str, Any] = {}


FIND_UNUSED = {"find_unused_parameters": True}
BUCKET_VIEWS = {"gradient_as_bucket_view": True, "bucket_cap_mb": 1}
LOCAL_AFTER_STEP_2 = PostLocalSGDState(None, None, 2)
MODEL_AVERAGING = {"ddp_comm_state": LOCAL_AFTER_STEP_2, "model_averaging_period": 2}
SHORT = {"max_epochs": 1}
CASES = {
    "accumulation": Case(trainer={"accumulate_grad_batches": 3}),
    "bf16-mixed": Case(trainer={"precision": "bf16-mixed", **SHORT}),
    "clipping by hand": Case(ByHand, SHORT),
    "manual accumulation in a static graph": Case(Accumulates, strategy={"static_graph": True}),
    "a closure": Case(WithClosure, SHORT, FIND_UNUSED),
    "bucket views": Case(trainer=SHORT, strategy=BUCKET_VIEWS),
    "own buffers": Case(trainer=SHORT, strategy={"broadcast_buffers": False, "init_sync": False}),
    "model averaging": Case(strategy=MODEL_AVERAGING),
}


def train(kind: training.Kind, directory: Path, case: Case, ranks: int) -> dict[str, Any]:
    L.seed_everything(7)
    model = case.model()
    options = {"devices": ranks, "strategy": case.strategy, "limit_val_batches": 0}
    trainer = training.fit(kind, directory, model, **options, **case.trainer)
    return {
        "weights": training.weights(model),
        "parameters": [*model.parameters()],
        "step": trainer.global_step,
        # Three values are added in another order than by stock.
        "metrics": dict(trainer.callback_metrics) if ranks < 3 else {},
    }


def train_all(kind: training.Kind, directory: Path, ranks: int) -> dict[str, Any]:
    return {name: train(kind, directory, case, ranks) for name, case in CASES.items()}


@pytest.mark.lowest
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_numbers_are_those_of_stock_ddp(ranks: int, tmp_path: Path) -> None:
    """Weights and logged values equal stock's on each rank, to the last bit.

    For three ranks the division by their number is not exact. One Trainer follows another
    in the same processes.
    """
    ours, stock = (
        training.on_ranks(kind, train_all, tmp_path, ranks, world_size=ranks)
        for kind in training.KINDS
    )
    training.assert_same(ours, stock)
    for name in CASES:
        for on_rank in ours:
            training.assert_same(on_rank[name]["parameters"], ours[0][name]["parameters"])
        assert ours[0][name]["step"] > 1, name
