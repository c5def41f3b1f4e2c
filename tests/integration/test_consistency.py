"""`RankConsistency` finds ranks that have diverged in training, under our strategy and
under stock ``ddp``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_ddp_ext import ConfigurationError, DivergenceError, RankConsistency
from tests.harness.training import KINDS, At, Batch, Kind, Net, fit, on_ranks

WEIGHT = "parameter layers.0.weight"
BIAS = "parameter layers.0.bias"
MOMENTUM = "optimizer 0: momentum_buffer of layers.3.bias"

Change = Callable[[Any], object]  # of a model


@torch.no_grad()
def flip_bit(tensor: Tensor) -> None:
    """Flip a bit of one element."""
    tensor.view(torch.uint8).view(-1)[0] ^= 1


def flip_weight(model: Any) -> None:
    flip_bit(model.layers[0].weight)


def flip_weight_and_bias(model: Any) -> None:
    flip_bit(model.layers[0].weight)
    flip_bit(model.layers[0].bias)


def flip_running_variance(model: Any) -> None:
    flip_bit(model.layers[1].running_var)


def state_of_bias(model: Any) -> dict[str, Any]:
    state: dict[str, Any] = model.trainer.optimizers[0].state[model.layers[3].bias]
    return state


def flip_momentum(model: Any) -> None:
    flip_bit(state_of_bias(model)["momentum_buffer"])


def drop_momentum(model: Any) -> None:
    state_of_bias(model).clear()


def change_nothing(model: Any) -> None:
    """Leave the model as it is."""


class SkipsStep(Net):
    """Steps its optimiser by itself; rank 1 leaves out the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, index: int) -> None:
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        if (self.global_rank, index) != (1, 2):
            self.optimizers().step()


@dataclass(frozen=True)
class Training:
    """An epoch of four batches a rank, in which one rank changes its model.

    Attributes:
        change: changes the model.
        hook: the hook in which it does.
        earlier: how often the hook is called before.
        rank: the rank that changes its model.
        world_size: the number of ranks.
        every_n_steps: the argument of ``RankConsistency``.
        model: the module's class.
        options: further options of the Trainer.
    """

    change: Change
    hook: str = "on_train_batch_end"
    earlier: int = 1
    rank: int = 1
    world_size: int = 2
    every_n_steps: int = 1
    model: type[Net] = Net
    options: dict[str, Any] = field(default_factory=dict)

    def callback(self) -> At:
        """Return a callback that changes the model."""
        return At(
            self.hook,
            lambda trainer: self.change(trainer.lightning_module),
            earlier=self.earlier,
            ranks=[self.rank],
        )


AT_START: dict[str, Any] = {"hook": "on_train_start", "earlier": 0}


def train(kind: Kind, directory: Path, training: Training) -> DivergenceError | None:
    """Train, and return the error of the consistency check, if any."""
    L.seed_everything(3)
    consistency = RankConsistency(training.every_n_steps)
    options = {
        "max_epochs": 1,
        "limit_val_batches": 0,
        "devices": training.world_size,
        **training.options,
    }
    try:
        fit(kind, directory, training.model(), training.callback(), consistency, **options)
    except DivergenceError as error:
        return error
    return None


def assert_all_differ(errors: list[DivergenceError | None], moment: str, tensor: str) -> None:
    """Assert that every rank names the moment of the check, rank 1, and the tensor."""
    for error in errors:
        assert str(error).startswith(f"the ranks differ {moment}: rank 1 in {tensor} (")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("training", "moment", "tensor"),
    [
        pytest.param(
            Training(flip_weight, **AT_START), "at the start of training", WEIGHT, id="start"
        ),
        pytest.param(
            Training(flip_weight, earlier=2, options={"accumulate_grad_batches": 2}),
            "after batch 3",
            WEIGHT,
            id="accumulation",
        ),
        pytest.param(
            Training(flip_momentum, earlier=3), "after batch 4", MOMENTUM, id="optimiser state"
        ),
        pytest.param(
            Training(drop_momentum, earlier=3), "after batch 4", MOMENTUM, id="missing state"
        ),
        pytest.param(
            Training(flip_weight, earlier=3, every_n_steps=3),
            "at the end of training",
            WEIGHT,
            id="after the last check",
        ),
        pytest.param(
            Training(change_nothing, model=SkipsStep, every_n_steps=2),
            "after batch 4",
            WEIGHT,
            id="a step left out",
        ),
    ],
)
def test_a_difference_is_found(
    kind: Kind, training: Training, moment: str, tensor: str, tmp_path: Path
) -> None:
    """Every rank raises an error at the next check, which names the tensor."""
    assert_all_differ(on_ranks(kind, train, tmp_path, training), moment, tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_may_differ(kind: Kind, tmp_path: Path) -> None:
    """Buffers are left out, because DDP sends those of rank 0 in the next step."""
    assert on_ranks(kind, train, tmp_path, Training(flip_running_variance)) == [None, None]


def test_the_error_names_the_first_tensor_and_the_ranks(tmp_path: Path) -> None:
    """Among three ranks, the error names the one that differs from the other two, its first
    tensor, and how many differ; its attributes name all of them.
    """
    training = Training(flip_weight_and_bias, rank=0, world_size=3, every_n_steps=2)
    for error in on_ranks("stock", train, tmp_path, training, world_size=3):
        assert str(error).startswith(
            f"the ranks differ after batch 2: rank 0 in {WEIGHT} (differing tensors: 2); "
        )
        assert (error.ranks, error.names) == ((0,), (WEIGHT, BIAS))


class Sharded(Net):
    """Its optimiser has a part of the state on each rank."""

    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=0.01)


def resume(kind: Kind, directory: Path, training: Training) -> DivergenceError | None:
    """Train an epoch without a change, and another one from its checkpoint by ``train``."""
    path = directory / "first_epoch.ckpt"
    first = fit(kind, directory, training.model(), RankConsistency(1), max_epochs=1)
    first.save_checkpoint(path)
    options = {"max_epochs": 2, "ckpt_path": path}
    return train(kind, directory, replace(training, options=options))


def test_a_loaded_optimiser_state_is_compared(tmp_path: Path) -> None:
    """A difference in the state of a checkpoint is found before the first step."""
    errors = on_ranks("ours", resume, tmp_path, Training(flip_momentum, **AT_START))
    assert_all_differ(errors, "at the start of training", MOMENTUM)


def test_a_sharded_optimiser_is_left_out(tmp_path: Path) -> None:
    """A state that each rank has of other parameters is not compared, nor after a resume."""
    training = Training(change_nothing, model=Sharded)
    assert on_ranks("ours", resume, tmp_path, training) == [None, None]


def average(kind: Kind, directory: Path) -> str:
    """Train with local steps, after which models are averaged; return the error."""
    averaging = {
        "ddp_comm_state": PostLocalSGDState(None, None, 2),
        "model_averaging_period": 2,
    }
    with pytest.raises(ConfigurationError) as refused:
        fit(kind, directory, Net(), RankConsistency(), strategy=averaging)
    return str(refused.value)


def test_models_that_are_averaged_are_refused(tmp_path: Path) -> None:
    """Every rank's error asks for a strategy whose ranks have the same model."""
    for message in on_ranks("stock", average, tmp_path):
        assert message.startswith(
            "RankConsistency needs a strategy with the same model on each rank"
        )
