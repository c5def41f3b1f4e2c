"""After a failure one rank saves the last step, whatever happens meanwhile, to the place
where the same command looks for it.
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from tests.harness import ranks, training
from tests.harness.ranks import stories
from tests.harness.scripts import run_script
from tests.integration import early_ends
from tests.integration.background_saves import FailsWhenAwaited
from tests.integration.early_ends import FaultyIO, Kill, Net, Plan

# Steps before the kills; a survivor may also finish the step in which another rank dies.
FINISHED = 5
IN_SIXTH_STEP = Kill("on_after_backward", earlier=FINISHED)
RANK_ZERO_IN_SIXTH_STEP = Kill("on_after_backward", earlier=FINISHED, ranks=[0])


class Norms(Net):
    """Adds up the gradients' norms of all ranks before each optimiser step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = [weight.grad.norm() for weight in self.parameters() if weight.grad is not None]
        dist.all_reduce(torch.stack(norms))


def test_a_rank_that_waits_in_a_hooks_collective_saves_the_finished_steps(tmp_path: Path) -> None:
    """The hook is called before the optimiser changes the weights."""
    plan = Plan(Kill("on_before_optimizer_step", earlier=FINISHED), model=Norms)
    survivor, _ = ranks.launch_ranks(early_ends.train, 2, plan, tmp_path)
    assert survivor.exit_code == 1
    assert early_ends.saved_step(tmp_path) == FINISHED


class Profiled(L.Callback):
    """Notes which files of this package are entered from the third batch to the sixth."""

    def __init__(self) -> None:
        self.entered: set[str] = set()

    def note(self, frame: FrameType, event: str, _: object) -> None:
        _, is_ours, path = frame.f_code.co_filename.rpartition("lightning_ddp_ext/")
        if event == "call" and is_ours:
            self.entered.add(path)

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if trainer.current_epoch == 0 and index in (2, 6):
            sys.setprofile(self.note if index == 2 else None)


def files_entered_in_steps(rank: int, world_size: int, directory: Path) -> set[str]:
    profiled = Profiled()
    early_ends.train(rank, world_size, Plan(callbacks=[profiled]), directory)
    return profiled.entered


def test_no_code_of_the_early_end_runs_in_a_step(tmp_path: Path) -> None:
    """Only the question whether a signal has arrived is asked between two steps."""
    parts = ("integration/stopping/", "integration/checkpoints/", "checkpoint/")
    for entered in ranks.run_ranks(files_entered_in_steps, 2, tmp_path):
        assert "integration/strategy.py" in entered
        assert {path for path in entered if path.startswith(parts)} == {
            "integration/stopping/stops.py"
        }


# Where the file is.


def train_with_own_names(rank: int, world_size: int, directory: Path, kill: Kill | None) -> int:
    """Train on ranks that have different command lines and, as with ``WandbLogger``,
    log directories; return the step at which training starts.
    """
    sys.argv = ["train.py", str(rank)]
    starts: list[int] = []
    start = training.At("on_train_start", lambda trainer: starts.append(trainer.global_step))
    training.fit(
        "ours",
        directory,
        Net(),
        *([start] if kill is None else [start, kill.callback()]),
        ckpt_path="last",
        logger=CSVLogger(directory, version=f"of_rank_{rank}"),
        enable_checkpointing=True,
        default_root_dir=directory,
    )
    return starts[0]


def test_rank_zero_finds_the_file_of_any_survivor(tmp_path: Path) -> None:
    """Rank 1 saves under the name, and as the run, for which rank 0 looks later."""
    ranks.launch_ranks(train_with_own_names, 2, tmp_path, RANK_ZERO_IN_SIXTH_STEP)
    starts = ranks.run_ranks(train_with_own_names, 2, tmp_path, None)
    assert min(starts) >= FINISHED


def test_a_run_that_resumes_from_another_file_keeps_the_last_step(tmp_path: Path) -> None:
    """Only a run that found the stop checkpoint by ``"last"`` removes it."""
    ranks.run_ranks(early_ends.train, 2, Plan(trainer={"max_epochs": 1}), tmp_path)
    [older] = tmp_path.glob("*.ckpt")
    ranks.launch_ranks(early_ends.train, 2, Plan(IN_SIXTH_STEP), tmp_path)
    ranks.run_ranks(early_ends.train, 2, Plan(trainer={"max_epochs": 2}, ckpt_path=older), tmp_path)
    assert list(tmp_path.rglob(early_ends.NAME))


def train_twice(rank: int, world_size: int, kill: Kill | None, directory: Path) -> None:
    """Train in two fits of one script; the kill is in the second one."""
    for plan in (Plan(), Plan(kill)):
        early_ends.train(rank, world_size, plan, directory)


def test_the_fits_of_a_script_do_not_continue_each_other(tmp_path: Path) -> None:
    """After a failure in the second fit, only the second one resumes from the file."""
    ranks.launch_ranks(train_twice, 2, IN_SIXTH_STEP, tmp_path)
    [path] = tmp_path.rglob(early_ends.NAME)
    rank_zero, _ = ranks.launch_ranks(train_twice, 2, None, tmp_path)
    assert rank_zero.exit_code == 0, rank_zero.story()
    first_fit, resume, _ = rank_zero.output.partition(f"ckpt_path='last' is {path}")
    assert f"{path.parent.name} belong to other commands or fits; pass the path" in first_fit
    assert resume
    assert not path.exists()


# Faults while a survivor saves.


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def wait_for_ever() -> None:
    threading.Event().wait()


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
        is_resumed = self.trainer.ckpt_path is not None
        if self.global_step == FINISHED and self.global_rank == 0 and not is_resumed:
            wait_long()


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_the_process_that_starts_ranks_lets_a_survivor_save(
    start_method: str, tmp_path: Path
) -> None:
    """The process waits for a slow step and a slow save, and then raises the cause."""
    unbroken, _ = early_ends.survive(2, Plan(), (), tmp_path / "unbroken")
    strategy = {"start_method": start_method}
    killed = Plan(
        Kill("on_before_backward", earlier=FINISHED),
        strategy={**strategy, "checkpoint_io": FaultyIO(wait_long)},
        model=SlowInSixthStep,
    )
    [outcome] = ranks.launch_ranks(early_ends.train, 1, killed, tmp_path)
    assert "RankDiedError: local rank 1 " in outcome.output, outcome.story()
    assert early_ends.saved_step(tmp_path) >= FINISHED
    [resumed] = ranks.run_ranks(early_ends.train, 1, Plan(strategy=strategy), tmp_path)
    del unbroken["steps"]
    torch.testing.assert_close(resumed, unbroken, rtol=0, atol=0)


ORPHANED = """
    from pathlib import Path
    from tests.integration.early_ends import Kill, Plan, train

    kill = Kill("on_after_backward", earlier=5, ranks=[0])
    train(0, 1, Plan(kill, strategy={"start_method": "popen"}), Path.cwd())
"""


@pytest.mark.nightly
def test_a_rank_whose_launcher_was_killed_names_the_cause(tmp_path: Path) -> None:
    """The rank saves and exits."""
    # The shell's output ends when rank 1 exits, after the script.
    shell = ("sh", "-c", '(python "$0") 2>&1 | cat')
    script = run_script(ORPHANED, launcher=shell, cwd=tmp_path)
    assert "RankDiedError: rank 0 " in script.output, script.output
    assert early_ends.saved_step(tmp_path) >= FINISHED


def test_another_survivor_saves_if_the_first_is_killed_meanwhile(tmp_path: Path) -> None:
    """The kernel releases the lock of the rank that was killed while it saved."""
    io = FaultyIO(partial(kill_first, tmp_path / "killed"))
    plan = Plan(RANK_ZERO_IN_SIXTH_STEP, strategy={"checkpoint_io": io})
    outcomes = ranks.launch_ranks(early_ends.train, 3, plan, tmp_path)
    exit_codes = sorted(outcome.exit_code for outcome in outcomes)
    assert exit_codes == [-signal.SIGKILL, -signal.SIGKILL, 1], stories(outcomes)
    assert early_ends.saved_step(tmp_path) >= FINISHED


@pytest.mark.parametrize(
    ("fault", "report"),
    [
        pytest.param(fill_disk, "No space left on device", id="full disk"),
        pytest.param(wait_for_ever, "will finish writing its checkpoint", id="stuck disk"),
    ],
)
def test_a_disk_that_does_not_take_the_checkpoint_hides_no_error(
    fault: Callable[[], None], report: str, tmp_path: Path
) -> None:
    """The survivor also names the rank that died."""
    plan = Plan(IN_SIXTH_STEP, {"save_deadline": 1, "checkpoint_io": FaultyIO(fault)})
    survivor, _ = ranks.launch_ranks(early_ends.train, 2, plan, tmp_path)
    assert survivor.exit_code == 1
    assert report in survivor.output, survivor.story()
    assert "RankDiedError: rank 1 " in survivor.output
    assert not list(tmp_path.rglob(early_ends.NAME))


def is_not_stop_checkpoint(path: str) -> bool:
    return Path(path).name != early_ends.NAME


def test_an_earlier_save_error_does_not_prevent_the_save_of_the_last_step(tmp_path: Path) -> None:
    """A survivor saves although an earlier save in the background failed.

    That error was not raised before the other rank died.
    """
    finished = 15  # in the second epoch, after the first save
    kill = Kill("on_before_backward", earlier=finished)
    plan = Plan(kill, strategy={"checkpoint_io": FailsWhenAwaited(is_not_stop_checkpoint)})
    survivor, _ = ranks.launch_ranks(early_ends.train, 2, plan, tmp_path)
    assert f"saved step {finished} to" in survivor.output, survivor.story()
