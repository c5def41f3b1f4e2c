"""Which models a survivor saves after another rank's death: those of which each saved
value is known.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from tests.harness.ranks import launch_ranks
from tests.harness.training import Batch
from tests.integration import rescuing
from tests.integration.rescuing import Kill, Net, Plan

# Code that changes the model outside of the optimiser.


class Momentum(Net):
    """Has an encoder whose weights follow those that are trained, before each forward
    pass.

    Args:
        change: how the weights are changed.
        since: the first step that does so.
    """

    def __init__(self, change: Callable[[Tensor, Tensor], object], since: int = 0) -> None:
        super().__init__()
        self.change = change
        self.since = since
        self.target = nn.Linear(4, 8).requires_grad_(False)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        trained = self.layers[0]
        if self.global_step >= self.since:
            self._follow(self.target.weight, trained.weight)
            self._follow(self.target.bias, trained.bias)
        distance = (self.target(batch[0]) - trained(batch[0])).square().mean()
        return super().training_step(batch, index) + distance

    @torch.no_grad()
    def _follow(self, target: Tensor, trained: Tensor) -> None:
        self.change(target, 0.8 * target + 0.2 * trained)


def assign(parameter: Tensor, value: Tensor) -> None:
    """Give a parameter other memory, which leaves its version unchanged."""
    parameter.data = value


def assign_inside(parameter: Tensor, value: Tensor) -> None:
    """Change a parameter without a trace in its version."""
    parameter.data.copy_(value)


class Normalising(Net):
    """Scales trained weights before each forward pass."""

    def training_step(self, batch: Batch, index: int) -> Tensor:
        with torch.no_grad():
            self.layers[0].weight.mul_(0.9)
        return super().training_step(batch, index)


class Clipping(Net):
    """Limits trained weights after each step, and adds them up in a column of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(4, 2)[:, 0])

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.layers[0].weight.clamp_(-0.3, 0.3)
        self.sums += self.layers[0].weight.sum(0)


class OtherGenerator(Net):
    """Has NumPy draw from a generator that is not a Mersenne Twister."""

    def setup(self, stage: str) -> None:
        np.random.set_bit_generator(np.random.PCG64(7))


class Skipping(Net):
    """Ends the first epoch in its fifth batch, which is not trained on."""

    def on_train_batch_start(self, batch: Batch, index: int) -> int | None:
        return -1 if self.current_epoch == 0 and index == 4 else None


class Drawn(IterableDataset[Batch]):
    """Samples without a length, of which Lightning reads a batch ahead."""

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(rescuing.BATCHES * rescuing.BATCH_SIZE):
            x = torch.rand(4)
            yield [x, x.sum(0, keepdim=True)]


class Streaming(Net):
    """Draws random numbers only for the samples of a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3] = nn.Identity()  # in place of dropout

    def training_step(self, batch: Batch, index: int) -> Tensor:
        x, y = batch
        loss: Tensor = (self.layers(x) - y).square().mean()
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Drawn(), rescuing.BATCH_SIZE)


ACCUMULATING: dict[str, Any] = {"accumulate_grad_batches": 2}
CONTINUING = [
    pytest.param(partial(Momentum, Tensor.copy_), {}, id="momentum by copy_"),
    pytest.param(partial(Momentum, assign), ACCUMULATING, id="momentum by data ="),
    pytest.param(partial(Momentum, assign_inside), ACCUMULATING, id="momentum by data.copy_"),
    pytest.param(Normalising, {}, id="normalising"),
    pytest.param(Clipping, {}, id="clipping"),
    pytest.param(OtherGenerator, {}, id="other generator"),
    pytest.param(Skipping, {}, id="skipping"),
    pytest.param(Streaming, {}, id="streaming"),
    pytest.param(Net, {"use_distributed_sampler": False}, id="own draw on each rank"),
]


@pytest.mark.parametrize(("model", "options"), CONTINUING)
def test_a_model_that_changes_outside_of_the_optimiser_continues_exactly(
    model: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    """After three kills the weights are those of an unbroken run, to the last bit."""
    plan = Plan(trainer=options, model=model)
    kills = [
        Kill("on_before_backward", earlier=9, ranks=[0]),
        Kill("on_validation_batch_start", earlier=1),
        Kill("on_before_backward", earlier=3),
    ]
    killed = rescuing.survive(2, plan, kills, tmp_path / "killed")
    unbroken = rescuing.survive(2, plan, (), tmp_path / "unbroken")
    torch.testing.assert_close(killed, unbroken, rtol=0, atol=0)


# Models and options with a value that may not be that of the last finished step.


class Counting(Net):
    """Saves the state of a metric, which differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = MeanMetric()
        self.seen.persistent(True)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        self.seen.update(batch[0])
        return super().training_step(batch, index)


class Queue(Net):
    """Changes a buffer that is too large to be recorded, as MoCo's queue is, though a small
    buffer shares its first element.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(1 << 19))  # 2 MiB
        self.register_buffer("head", self.queue[:1])

    def training_step(self, batch: Batch, index: int) -> Tensor:
        self.queue[index] = batch[0][0, 0]
        return super().training_step(batch, index)


class Shaking(Net):
    """Changes a trained weight before the sixth step's forward pass."""

    def on_train_batch_start(self, batch: Batch, index: int) -> None:
        if self.global_step == 5:
            self.layers[4].bias.data = self.layers[4].bias.data + 1


class SeveralClosures(Net):
    """Has an optimiser that calls the closure three times a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


class Manual(Net):
    """Makes two steps itself in each batch."""

    automatic_optimization = False

    def training_step(self, batch: Batch, index: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()


class Sharded(Net):
    """Has an optimiser of whose state each rank has a part."""

    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=0.05)


class Averaging(L.Callback):
    """Has other weights validated than are trained; as Lightning's own, it does not
    change their version counters.
    """

    def _swap(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for parameter in module.parameters():
            parameter.data.copy_(-parameter)

    on_validation_epoch_start = on_validation_epoch_end = _swap


THIRD_STEP = Kill("on_after_backward", earlier=2)
SIXTH_STEP = Kill("on_before_backward", earlier=5)
EIGHTH_CALL = Kill("on_after_backward", earlier=7)  # in the third step of three calls each
IN_VALIDATION = Kill("on_validation_batch_start", earlier=1)
IN_SANITY_CHECK = Plan(Kill("on_sanity_check_end"), trainer={"num_sanity_val_steps": 2})
SUDDEN_MOMENTUM = partial(Momentum, assign_inside, since=SIXTH_STEP.earlier)
MODEL_AVERAGING = {
    "ddp_comm_state": PostLocalSGDState(None, None, 2),
    "model_averaging_period": 2,
}
NO_STEP = "no step has finished since the start"
REFUSED = [
    ("several times per step", Plan(EIGHTH_CALL, model=SeveralClosures)),
    ("manual optimisation", Plan(SIXTH_STEP, model=Manual)),
    ("shard of the optimiser's state", Plan(THIRD_STEP, model=Sharded)),
    ("weight averaging", Plan(IN_VALIDATION, callbacks=[Averaging()])),
    ("seen.mean_value has changed", Plan(SIXTH_STEP, model=Counting)),
    ("queue has changed", Plan(SIXTH_STEP, model=Queue)),
    ("target.weight may have changed", Plan(SIXTH_STEP, model=SUDDEN_MOMENTUM)),
    ("layers.4.bias may have changed", Plan(SIXTH_STEP, model=Shaking)),
    (NO_STEP, Plan(Kill("on_before_backward"))),
    pytest.param(NO_STEP, IN_SANITY_CHECK, marks=pytest.mark.nightly),
    ("model_averaging_period", Plan(THIRD_STEP, strategy=MODEL_AVERAGING)),
    ('resume_data="stock"', Plan(THIRD_STEP, strategy={"resume_data": "stock"})),
]


@pytest.mark.parametrize(("reason", "plan"), REFUSED)
def test_a_survivor_does_not_save_a_checkpoint_that_could_be_wrong(
    reason: str, plan: Plan, tmp_path: Path
) -> None:
    """The survivor prints the reason next to the error that names the dead rank."""
    survivor, _ = launch_ranks(rescuing.train, 2, plan, tmp_path)
    assert survivor.exit_code == 1
    _, refusal, rest = survivor.output.partition("this rank did not save the last step: ")
    assert refusal, survivor.story()
    assert reason in rest.splitlines()[0]
    assert "RankDiedError: rank 1 " in survivor.output
    assert not (tmp_path / rescuing.NAME).exists()
