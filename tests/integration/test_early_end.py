"""A rank that survives another one's end saves the last finished step where the same command
looks for it, whatever happens meanwhile. It saves nothing if that step could be wrong.
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from tests.harness import ranks, training
from tests.integration import early_ends
from tests.integration.early_ends import FaultyIO, Kill, Net, Plan

# Steps before the kills; a survivor may also finish the step in which another rank dies.
FINISHED = 5
IN_SIXTH_STEP = Kill("on_after_backward", earlier=FINISHED)
RANK_ZERO_IN_SIXTH_STEP = Kill("on_after_backward", earlier=FINISHED, ranks=[0])


# Where the file is.


def train_with_own_names(rank: int, world_size: int, directory: Path, kill: Kill | None) -> int:
    """Train on ranks that have different command lines and, as with ``WandbLogger``,
    log directories; return the step at which training starts.
    """
    sys.argv = ["train.py", str(rank)]
    starts: list[int] = []
    start = training.At("on_train_start", lambda trainer: starts.append(trainer.global_step))
    callbacks = [start] if kill is None else [start, kill.callback()]
    training.fit(
        "ours",
        directory,
        Net(),
        *callbacks,
        ckpt_path="last",
        logger=CSVLogger(directory, version=f"of_rank_{rank}"),
        enable_checkpointing=True,
        default_root_dir=directory,
    )
    return starts[0]


def test_rank_zero_finds_the_file_of_any_survivor(tmp_path: Path) -> None:
    """The next run continues from the file that rank 1 saved, although rank 1 had another
    command line and log directory.
    """
    ranks.launch_ranks(train_with_own_names, 2, tmp_path, RANK_ZERO_IN_SIXTH_STEP)
    starts = ranks.run_ranks(train_with_own_names, 2, tmp_path, None)
    assert min(starts) >= FINISHED


def test_a_run_that_resumes_from_another_file_keeps_the_last_step(tmp_path: Path) -> None:
    """A survivor's stop checkpoint is removed only by a run that found it by ``"last"``."""
    ranks.run_ranks(early_ends.train, 2, Plan(trainer={"max_epochs": 1}), tmp_path)
    [older] = tmp_path.glob("*.ckpt")
    ranks.launch_ranks(early_ends.train, 2, Plan(IN_SIXTH_STEP), tmp_path)
    ranks.run_ranks(early_ends.train, 2, Plan(trainer={"max_epochs": 2}, ckpt_path=older), tmp_path)
    assert list(tmp_path.rglob(early_ends.STOP_CHECKPOINT))


# Faults while a survivor saves.


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def wait_long() -> None:
    """Wait longer than a rank may run after a failure if it has nothing to save."""
    threading.Event().wait(6.0)


def kill_first(marker: Path) -> None:
    """Kill the first process that calls this."""
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class SlowInSixthStep(Net):
    """Waits on rank 0, which survives, before the sixth step's backward pass."""

    def on_before_backward(self, loss: Tensor) -> None:
        if self.global_step == FINISHED and self.global_rank == 0:
            wait_long()


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_the_launching_process_lets_a_survivor_save(start_method: str, tmp_path: Path) -> None:
    """The launching process waits for a slow step and a slow save, and then raises the
    cause.
    """
    strategy = {"start_method": start_method, "checkpoint_io": FaultyIO(wait_long)}
    kill = Kill("on_before_backward", earlier=FINISHED)
    plan = Plan(kill, strategy=strategy, model=SlowInSixthStep)
    [outcome] = ranks.launch_ranks(early_ends.train, 1, plan, tmp_path)
    assert "RankDiedError: local rank 1 " in outcome.output, outcome.story()
    assert early_ends.saved_step(tmp_path) >= FINISHED


def test_another_survivor_saves_if_the_first_is_killed_meanwhile(tmp_path: Path) -> None:
    """The kernel releases the lock of the rank that was killed while it saved."""
    io = FaultyIO(partial(kill_first, tmp_path / "killed"))
    plan = Plan(RANK_ZERO_IN_SIXTH_STEP, strategy={"checkpoint_io": io})
    outcomes = ranks.launch_ranks(early_ends.train, 3, plan, tmp_path)
    exit_codes = sorted(outcome.exit_code for outcome in outcomes)
    assert exit_codes == [-signal.SIGKILL, -signal.SIGKILL, 1], ranks.stories(outcomes)
    assert early_ends.saved_step(tmp_path) >= FINISHED


@pytest.mark.parametrize(
    ("fault", "save_deadline", "report"),
    [
        pytest.param(fill_disk, 60, "No space left on device", id="full disk"),
        pytest.param(
            training.wait_for_ever, 1, "will finish writing its checkpoint", id="stuck disk"
        ),
    ],
)
def test_a_disk_that_does_not_take_the_checkpoint_hides_no_error(
    fault: Callable[[], None], save_deadline: int, report: str, tmp_path: Path
) -> None:
    """The survivor also names the rank that died."""
    strategy = {"save_deadline": save_deadline, "checkpoint_io": FaultyIO(fault)}
    survivor, _ = ranks.launch_ranks(early_ends.train, 2, Plan(IN_SIXTH_STEP, strategy), tmp_path)
    assert survivor.exit_code == 1
    assert report in survivor.output, survivor.story()
    assert "RankDiedError: rank 1 " in survivor.output
    assert not list(tmp_path.rglob(early_ends.STOP_CHECKPOINT))


# Runs whose weights may not be those of the last finished step.


class SeveralClosures(Net):
    """Has an optimiser that calls the closure three times a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


class InStep(Net):
    """Calls a collective in each step, after it has changed the weights; rank 1 is killed
    before that of the sixth step.
    """

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.global_step == 5 and self.global_rank == 1:
            Kill("").end_process()
        dist.all_reduce(torch.zeros(1))


class Exploding(Net):
    """Has an infinite weight from the third step on."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 3:
            self.layers[0].weight[0, 0] = torch.inf


THIRD_STEP = Kill("on_after_backward", earlier=2)
EIGHTH_CALL = Kill("on_after_backward", earlier=7)  # in the third step of three calls each
# Options of the strategy with which ranks train apart, and average their models.
MODEL_AVERAGING = {
    "ddp_comm_state": PostLocalSGDState(None, None, 2),
    "model_averaging_period": 2,
}
# A run whose rank 1 ends, and the reason that its survivor prints.
REFUSED = {
    "several calls of the closure": (
        Plan(EIGHTH_CALL, model=SeveralClosures),
        "had started to change the weights",
    ),
    "a collective after the step": (Plan(model=InStep), "had started to change the weights"),
    "a sharded optimiser": (
        Plan(THIRD_STEP, model=training.Sharded),
        "shard of the optimiser's state",
    ),
    "averaged weights in validation": (
        Plan(Kill("on_validation_batch_start", earlier=1), callbacks=[WeightAveraging()]),
        "swapped the weights",
    ),
    "infinite weights": (
        Plan(Kill("on_before_backward", earlier=5), model=Exploding),
        "not finite",
    ),
    "no step": (Plan(Kill("on_before_backward")), "no step has finished since the start"),
    "fast_dev_run": (
        Plan(THIRD_STEP, trainer={"fast_dev_run": 5, "limit_train_batches": 5}),
        "fast_dev_run",
    ),
    "local steps": (Plan(THIRD_STEP, strategy=MODEL_AVERAGING), "model_averaging_period"),
    "stock's resume": (
        Plan(THIRD_STEP, strategy={"resume_data": "stock"}),
        'resume_data="stock"',
    ),
}


@pytest.mark.parametrize(("plan", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_survivor_does_not_save_a_checkpoint_that_could_be_wrong(
    plan: Plan, reason: str, tmp_path: Path
) -> None:
    """The survivor prints the reason next to the error that names the dead rank."""
    survivor, _ = ranks.launch_ranks(early_ends.train, 2, plan, tmp_path)
    assert survivor.exit_code == 1
    _, refusal, rest = survivor.output.partition("this rank did not save the last step: ")
    assert refusal, survivor.story()
    assert reason in rest.splitlines()[0]
    assert "RankDiedError: rank 1 " in survivor.output
    assert not list(tmp_path.rglob(early_ends.STOP_CHECKPOINT))
