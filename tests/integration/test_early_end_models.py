"""Which models a rank saves after a failure, and when it saves nothing."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.harness.ranks import launch_ranks, stories
from tests.harness.scripts import print_line
from tests.harness.training import Batch
from tests.integration import early_ends
from tests.integration.early_ends import BATCHES, EPOCHS, Kill, Net, Plan


class Clipping(Net):
    """Limits trained weights after each step."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.layers[0].weight.clamp_(-0.3, 0.3)


class Skipping(Net):
    """Ends the first epoch in its fifth batch, which is not trained on."""

    def on_train_batch_start(self, batch: Batch, index: int) -> int | None:
        return -1 if self.current_epoch == 0 and index == 4 else None


class Manual(Net):
    """Makes a step itself in each batch."""

    automatic_optimization = False

    def training_step(self, batch: Batch, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


CONTINUING = [
    pytest.param(Clipping, {}, id="clipping"),
    pytest.param(Skipping, {}, id="skipping"),
    pytest.param(Manual, {}, id="manual"),
    pytest.param(Net, {"use_distributed_sampler": False}, id="own draw on each rank"),
]


@pytest.mark.parametrize(("model", "options"), CONTINUING)
def test_three_kills_leave_the_weights_of_an_unbroken_run(
    model: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    """After three kills the weights are those of an unbroken run, to the last bit."""
    plan = Plan(trainer=options, model=model)
    kills = [
        Kill("on_before_backward", earlier=9, ranks=[0]),
        Kill("on_validation_batch_start", earlier=1),
        Kill("on_before_backward", earlier=3),
    ]
    killed = early_ends.survive(2, plan, kills, tmp_path / "killed")
    unbroken = early_ends.survive(2, plan, (), tmp_path / "unbroken")
    torch.testing.assert_close(killed, unbroken, rtol=0, atol=0)


class TwoOptimizers(Net):
    """Makes a step of each of two optimisers in each batch, and prints the batch."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first, _, second = self.layers
        return [torch.optim.AdamW(layer.parameters(), lr=0.05) for layer in (first, second)]

    def training_step(self, batch: Batch, index: int) -> None:
        print_line(f"batch {index}")
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()


@pytest.mark.parametrize("by", ["kill", "error"])
def test_a_batch_is_repeated_as_a_whole_if_a_second_optimiser_fails(
    by: str, tmp_path: Path
) -> None:
    """The first optimiser's step in it is saved, and made again."""
    fails = Kill("on_before_backward", earlier=9, by=by)  # in the fifth batch
    failed = launch_ranks(early_ends.train, 2, Plan(fails, model=TwoOptimizers), tmp_path)
    assert any("saved step 9 to" in outcome.output for outcome in failed), stories(failed)
    resumed, _ = launch_ranks(early_ends.train, 2, Plan(model=TwoOptimizers), tmp_path)
    assert resumed.exit_code == 0, resumed.story()
    batches = re.findall(r"^batch (\d+)$", resumed.output, re.MULTILINE)
    later = [*range(BATCHES)] * (EPOCHS - 1)
    assert [int(batch) for batch in batches] == [*range(4, BATCHES), *later]


# Models and options with which the weights may not be those of the last finished step.


class SeveralClosures(Net):
    """Has an optimiser that calls the closure three times a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


class Joining(torch.optim.AdamW):
    """Calls a collective after it has changed the weights.

    Args:
        parameters: the weights.
        before_call: called before the collective.
    """

    def __init__(self, parameters: Any, before_call: Callable[[], None]) -> None:
        super().__init__(parameters)
        self.before_call = before_call

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.before_call()
        dist.all_reduce(torch.zeros(1))
        return loss


class InStep(Net):
    """Has an optimiser in whose sixth step rank 1 ends."""

    def configure_optimizers(self) -> Any:
        return Joining(self.parameters(), self.end_rank)

    def end_rank(self) -> None:
        if self.global_step == 5 and self.global_rank == 1:
            Kill("").end_process()


class Exploding(Net):
    """Has weights that are not finite from the third step on."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 3:
            self.layers[0].weight[0, 0] = torch.inf


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
MODEL_AVERAGING = {
    "ddp_comm_state": PostLocalSGDState(None, None, 2),
    "model_averaging_period": 2,
}
TRIAL = {"fast_dev_run": 5, "limit_train_batches": 5}
REFUSED = [
    ("had started to change the weights", Plan(EIGHTH_CALL, model=SeveralClosures)),
    ("had started to change the weights", Plan(model=InStep)),
    ("shard of the optimiser's state", Plan(THIRD_STEP, model=Sharded)),
    ("swapped the weights", Plan(IN_VALIDATION, callbacks=[Averaging()])),
    ("not finite", Plan(SIXTH_STEP, model=Exploding)),
    ("no step has finished since the start", Plan(Kill("on_before_backward"))),
    ("fast_dev_run", Plan(THIRD_STEP, trainer=TRIAL)),
    ("model_averaging_period", Plan(THIRD_STEP, strategy=MODEL_AVERAGING)),
    ('resume_data="stock"', Plan(THIRD_STEP, strategy={"resume_data": "stock"})),
]


@pytest.mark.parametrize(("reason", "plan"), REFUSED)
def test_a_survivor_does_not_save_a_checkpoint_that_could_be_wrong(
    reason: str, plan: Plan, tmp_path: Path
) -> None:
    """The survivor prints the reason next to the error that names the dead rank."""
    survivor, _ = launch_ranks(early_ends.train, 2, plan, tmp_path)
    assert survivor.exit_code == 1
    _, refusal, rest = survivor.output.partition("this rank did not save the last step: ")
    assert refusal, survivor.story()
    assert reason in rest.splitlines()[0]
    assert "RankDiedError: rank 1 " in survivor.output
    assert not list(tmp_path.rglob(early_ends.NAME))
