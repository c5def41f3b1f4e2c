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
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from tests.harness import ranks, training
from tests.integration.early_ends import (
    STOP_CHECKPOINT,
    FaultyIO,
    Kill,
    Net,
    Plan,
    saved_step,
    train,
)

# Steps before the kills; a survivor may also finish the step in which another rank dies.
FINISHED = 5
KILL_RANK_0 = Kill("on_after_backward", earlier=FINISHED, ranks=[0])
KILL_RANK_1 = Kill("on_after_backward", earlier=FINISHED, ranks=[1])


# The next run finds the survivor's file.


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
    ranks.launch_ranks(train_with_own_names, 2, tmp_path, KILL_RANK_0)
    assert min(ranks.run_ranks(train_with_own_names, 2, tmp_path, None)) >= FINISHED


# A run that does not use the file keeps it.


def test_a_run_that_resumes_from_another_file_keeps_the_last_step(tmp_path: Path) -> None:
    """Rank 0's stop checkpoint, saved when rank 1 dies, is removed only by a run that found
    it by ``"last"``.
    """
    ranks.run_ranks(train, 2, Plan(trainer={"max_epochs": 1}), tmp_path)
    [older] = tmp_path.glob("*.ckpt")
    ranks.launch_ranks(train, 2, Plan(KILL_RANK_1), tmp_path)
    ranks.run_ranks(train, 2, Plan(trainer={"max_epochs": 2}, ckpt_path=older), tmp_path)
    assert list(tmp_path.rglob(STOP_CHECKPOINT))


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
    """Waits before the sixth step's backward pass on rank 0, while rank 1 dies there."""

    def on_before_backward(self, loss: torch.Tensor) -> None:
        if self.global_step == FINISHED and self.global_rank == 0:
            wait_long()


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_the_launching_process_lets_a_survivor_save(start_method: str, tmp_path: Path) -> None:
    """The launching process waits for a slow step and a slow save, and then raises the
    cause.
    """
    strategy = {"start_method": start_method, "checkpoint_io": FaultyIO(wait_long)}
    kill_rank_1 = Kill("on_before_backward", earlier=FINISHED)
    plan = Plan(kill_rank_1, strategy=strategy, model=SlowInSixthStep)
    [outcome] = ranks.launch_ranks(train, 1, plan, tmp_path)
    assert "RankDiedError: local rank 1 " in outcome.output, outcome.story()
    assert saved_step(tmp_path) >= FINISHED


def test_another_survivor_saves_if_the_first_is_killed_meanwhile(tmp_path: Path) -> None:
    """After rank 0's death, rank 1 or 2 is killed while it saves. The kernel releases its
    lock, and the last rank saves.
    """
    plan = Plan(
        KILL_RANK_0, strategy={"checkpoint_io": FaultyIO(partial(kill_first, tmp_path / "killed"))}
    )
    outcomes = ranks.launch_ranks(train, 3, plan, tmp_path)
    exit_codes = sorted(outcome.exit_code for outcome in outcomes)
    assert exit_codes == [-signal.SIGKILL, -signal.SIGKILL, 1], ranks.stories(outcomes)
    assert saved_step(tmp_path) >= FINISHED


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
    """Rank 0, which cannot save, also names rank 1, which died."""
    strategy = {"save_deadline": save_deadline, "checkpoint_io": FaultyIO(fault)}
    survivor, _ = ranks.launch_ranks(train, 2, Plan(KILL_RANK_1, strategy), tmp_path)
    assert survivor.exit_code == 1
    assert report in survivor.output, survivor.story()
    assert "RankDiedError: rank 1 " in survivor.output
    assert not list(tmp_path.rglob(STOP_CHECKPOINT))


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
        if self.global_step == FINISHED and self.global_rank == 1:
            training.die()
        torch.distributed.all_reduce(torch.zeros(1))


class Exploding(Net):
    """Has an infinite weight from the third step on."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 3:
            self.layers[0].weight[0, 0] = torch.inf


THIRD_STEP = Kill("on_after_backward", earlier=2)
# Options of the strategy with which ranks train apart, and average their models.
MODEL_AVERAGING = {
    "ddp_comm_state": PostLocalSGDState(None, None, 2),
    "model_averaging_period": 2,
}
# A run in which rank 1 dies, and the reason that rank 0 prints for not saving.
REFUSED = {
    # The eighth call is the second one of the third step, after the first change.
    "several calls of the closure": (
        Plan(Kill("on_after_backward", earlier=7), model=SeveralClosures),
        "had started to change the weights",
    ),
    # The weights have changed, but the step has not ended.
    "a collective after the step": (Plan(model=InStep), "had started to change the weights"),
    # The dead rank had a part of the state.
    "a sharded optimiser": (
        Plan(THIRD_STEP, model=training.Sharded),
        "shard of the optimiser's state",
    ),
    # In a validation the model has the averaged weights. Lightning 2.5 has no such callback, and
    # `make test-lowest` does not run this.
    "averaged weights in validation": (
        Plan(
            Kill("on_validation_batch_start", earlier=1),
            callbacks=[getattr(callbacks, "WeightAveraging", callbacks.Callback)()],
        ),
        "swapped the weights",
    ),
    # A run from such weights could only go on with them.
    "infinite weights": (
        Plan(Kill("on_before_backward", earlier=FINISHED), model=Exploding),
        "not finite",
    ),
    # A checkpoint would have nothing that the start does not have.
    "no step": (Plan(Kill("on_before_backward")), "no step has finished since the start"),
    # Such a run saves nothing.
    "fast_dev_run": (
        Plan(THIRD_STEP, trainer={"fast_dev_run": 5, "limit_train_batches": 5}),
        "fast_dev_run",
    ),
    # Between two averagings, each rank has other weights.
    "local steps": (Plan(THIRD_STEP, strategy=MODEL_AVERAGING), "model_averaging_period"),
    # A resumed run would not continue with the next step.
    "stock's resume": (
        Plan(THIRD_STEP, strategy={"resume_data": "stock"}),
        'resume_data="stock"',
    ),
}


@pytest.mark.parametrize(("plan", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_survivor_does_not_save_a_checkpoint_that_could_be_wrong(
    plan: Plan, reason: str, tmp_path: Path
) -> None:
    """Rank 0 prints the reason next to the error that names rank 1, which died."""
    survivor, _ = ranks.launch_ranks(train, 2, plan, tmp_path)
    assert survivor.exit_code == 1
    _, refusal, rest = survivor.output.partition("this rank did not save the last step: ")
    assert refusal, survivor.story()
    assert reason in rest.splitlines()[0]
    assert "RankDiedError: rank 1 " in survivor.output
    assert not list(tmp_path.rglob(STOP_CHECKPOINT))
