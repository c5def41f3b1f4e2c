"""After a rank's death a survivor saves the last step, whatever happens meanwhile, to
the place where the same command looks for it.
"""

import errno
import os
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_ddp_ext import RankZeroCheckpointIO
from lightning_ddp_ext.checkpoint import rank_records
from tests.harness import ranks, training
from tests.harness.outcomes import stories
from tests.harness.scripts import run_script
from tests.integration import rescuing
from tests.integration.rescuing import Kill, Net, Plan, StruckIO

ROOT = Path(__file__).resolve().parents[2]
SLOW = 6.0  # seconds; longer than ranks have after a failure that do not save
FINISHED = 5  # steps before the kill
IN_SIXTH_STEP = Kill("on_after_backward", earlier=FINISHED, ranks=[1])


class Norms(Net):
    """Adds the gradients' norms of all ranks before each optimiser step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = [weight.grad.norm() for weight in self.parameters() if weight.grad is not None]
        dist.all_reduce(torch.stack(norms))


def test_a_rank_that_dies_before_the_optimiser_changes_weights(tmp_path: Path) -> None:
    """The other rank waits in a collective of a hook, and saves the finished steps."""
    plan = Plan(Kill("on_before_optimizer_step", earlier=FINISHED), kind=Norms)
    survivor, _ = ranks.launch_ranks(rescuing.train, 2, plan, tmp_path)
    assert survivor.exit_code == 1
    assert rescuing.saved(tmp_path) == FINISHED


# Where the file is.


def train_with_loggers(rank: int, world_size: int, directory: Path) -> None:
    """Kill rank 0 of a run in which loggers have different versions, as ``WandbLogger``
    has.
    """
    logger = CSVLogger(directory, version=f"of_rank_{rank}")
    kill = training.At(
        "on_after_backward",
        lambda trainer: os.kill(os.getpid(), signal.SIGKILL),
        earlier=FINISHED,
        ranks=[0],
    )
    options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": directory}
    strategy = {"rescue_checkpoint": rescuing.NAME}
    training.fit("ours", directory, Net(), kill, strategy=strategy, logger=logger, **options)


def test_any_survivor_saves_where_rank_zero_would_look(tmp_path: Path) -> None:
    """Loggers may give the run's directory to rank 0 alone."""
    _, survivor = ranks.launch_ranks(train_with_loggers, 2, tmp_path)
    [saved_to] = tmp_path.rglob(rescuing.NAME)
    assert saved_to.parent.parent == tmp_path / "checkpoints", survivor.story()


def test_a_run_that_resumes_from_an_older_file_keeps_it(tmp_path: Path) -> None:
    """The older file may be the last one of another run."""
    ranks.run_ranks(rescuing.train, 2, Plan(trainer={"max_epochs": 1}), tmp_path)
    [older] = tmp_path.glob("*.ckpt")
    ranks.launch_ranks(rescuing.train, 2, Plan(IN_SIXTH_STEP), tmp_path)
    ranks.run_ranks(rescuing.train, 2, Plan(trainer={"max_epochs": 2}, resumed=older), tmp_path)
    assert (tmp_path / rescuing.NAME).exists()


def train_twice(rank: int, world_size: int, kill: Kill | None, directory: Path) -> None:
    """Train in two fits of one script, of which a kill hits the second one."""
    for plan in (Plan(), Plan(kill)):
        rescuing.train(rank, world_size, plan, directory)


def test_the_fits_of_a_script_do_not_resume_from_each_others_rescue(tmp_path: Path) -> None:
    """After a rescue in the second fit, only the second resumes from the file."""
    path = tmp_path / rescuing.NAME
    ranks.launch_ranks(train_twice, 2, IN_SIXTH_STEP, tmp_path)
    first, _ = ranks.launch_ranks(train_twice, 2, None, tmp_path)
    assert first.exit_code == 0, first.story()
    before_second_fit, resumed, _ = first.output.partition(f"ckpt_path='last' is {path}")
    assert resumed
    refusal = f"{path} belongs to a fit with another number in its script; pass its path"
    assert refusal in before_second_fit
    assert not path.exists()


def test_a_place_without_locks_is_refused_at_the_start(tmp_path: Path) -> None:
    """Every rank raises, before it trains, if a path is in an object store."""
    plan = Plan(strategy={"rescue_checkpoint": "memory://run/it.ckpt"})
    for outcome in ranks.launch_ranks(rescuing.train, 2, plan, tmp_path):
        assert outcome.failure.type_name == "ConfigurationError"
        assert "(got memory://run/it.ckpt); pass a local path" in outcome.failure.message


# What survivors have recorded.


def train_until_space_ends(
    rank: int, world_size: int, plan: Plan, directory: Path, *, writes: int
) -> Any:
    """Train with space for ``writes`` records on rank 0, which records the buffers."""
    spaces = iter(range(writes))
    pwrite = os.pwrite

    def write_while_space(*args: Any) -> int:
        if rank == 0 and next(spaces, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*args)

    with patch.object(os, "pwrite", write_while_space):
        return rescuing.train(rank, world_size, plan, directory)


def test_a_rank_without_space_for_its_states_trains_on(tmp_path: Path) -> None:
    """Full shared memory does not end training."""
    unbroken = rescuing.survive(2, Plan(), (), tmp_path / "unbroken")
    full = ranks.run_ranks(train_until_space_ends, 2, Plan(), tmp_path, writes=0)
    torch.testing.assert_close(full, unbroken, rtol=0, atol=0)


def test_buffers_of_an_earlier_step_are_not_saved(tmp_path: Path) -> None:
    """The rank that recorded them trained on without space for newer ones."""
    # Nine records are those of the first two steps; the ninth step needs newer ones.
    plan = Plan(Kill("on_after_backward", earlier=8, ranks=[0]))
    _, survivor = ranks.launch_ranks(train_until_space_ends, 2, plan, tmp_path, writes=9)
    refusal = "did not save the last step: the buffers of this step are not recorded"
    assert refusal in survivor.output, survivor.story()
    assert not (tmp_path / rescuing.NAME).exists()


def train_on_two_hosts(rank: int, world_size: int, plan: Plan, directory: Path) -> Any:
    """Each rank sees only its own records, as where the others are on other hosts."""
    rank_records._open = lambda path: None
    return rescuing.train(rank, world_size, plan, directory)


def test_a_rank_of_another_host_continues_with_random_states_from_the_seed(tmp_path: Path) -> None:
    """The survivor names the rank whose random states are derived; no step is lost."""
    survivor, _ = ranks.launch_ranks(train_on_two_hosts, 2, Plan(IN_SIXTH_STEP), tmp_path)
    report = (
        "; this host has no record of the random states of rank 1, so those states are derived from"
        " the seed"
    )
    assert report in survivor.output
    assert rescuing.saved(tmp_path) >= FINISHED
    states = torch.load(tmp_path / rescuing.NAME, weights_only=True)["lightning_ddp_ext"]["ranks"]
    assert str(states[0]["random"]) != str(states[1]["random"])
    ranks.run_ranks(train_on_two_hosts, 2, Plan(), tmp_path)


# Faults while a survivor saves.


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def wait_for_ever() -> None:
    threading.Event().wait()


def wait_long(*_: Any) -> None:
    threading.Event().wait(SLOW)


def kill_first(marker: Path) -> None:
    """Kill the first process that calls this."""
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class SlowInSixthStep(Net):
    """Takes long for a backward pass on a rank that survives."""

    def on_before_backward(self, loss: Tensor) -> None:
        is_resumed = self.trainer.ckpt_path is not None
        if self.global_step == FINISHED and self.global_rank == 0 and not is_resumed:
            wait_long()


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_the_process_that_starts_ranks_lets_a_survivor_save(
    start_method: str, tmp_path: Path
) -> None:
    """The process waits for a slow step and a slow save, and then raises the cause."""
    unbroken, _ = rescuing.survive(2, Plan(), (), tmp_path / "unbroken")
    strategy = {"start_method": start_method}
    slow = {**strategy, "checkpoint_io": StruckIO(wait_long)}
    kill = Kill("on_before_backward", earlier=FINISHED)
    killed = Plan(kill, strategy=slow, kind=SlowInSixthStep)
    [outcome] = ranks.launch_ranks(rescuing.train, 1, killed, tmp_path)
    assert "RankDiedError: local rank 1 " in outcome.output, outcome.story()
    assert rescuing.saved(tmp_path) >= FINISHED
    [resumed] = ranks.run_ranks(rescuing.train, 1, Plan(strategy=strategy), tmp_path)
    torch.testing.assert_close(resumed, unbroken, rtol=0, atol=0)


ORPHANED = """
    import threading
    from pathlib import Path
    from tests.harness.training import At
    from tests.integration.rescuing import Kill, Plan, train

    stuck = At("on_exception", lambda trainer: threading.Event().wait())
    kill = Kill("on_after_backward", earlier=5, ranks=[0])
    popen = {"start_method": "popen"}
    train(0, 1, Plan(kill, strategy=popen, trainer={"callbacks": [stuck]}), Path.cwd())
"""


@pytest.mark.nightly
def test_a_rank_whose_launcher_was_killed_names_the_cause(tmp_path: Path) -> None:
    """The rank saves, and exits even if a hook is stuck."""
    # The shell's output ends when rank 1 exits, after the script.
    shell = ("sh", "-c", '(python "$0") 2>&1 | cat')
    script = run_script(ORPHANED, launcher=shell, cwd=tmp_path)
    assert "RankDiedError: rank 0 " in script.output, script.output
    assert rescuing.saved(tmp_path) >= FINISHED


def test_another_survivor_saves_if_the_first_is_killed_meanwhile(tmp_path: Path) -> None:
    """The kernel releases the lock of the rank that was killed while it saved."""
    io = StruckIO(partial(kill_first, tmp_path / "killed"))
    kill = Kill("on_after_backward", earlier=FINISHED, ranks=[0])
    plan = Plan(kill, strategy={"checkpoint_io": io})
    outcomes = ranks.launch_ranks(rescuing.train, 3, plan, tmp_path)
    assert sorted(outcome.exit_code for outcome in outcomes) == [-9, -9, 1], stories(outcomes)
    assert rescuing.saved(tmp_path) >= FINISHED


@pytest.mark.parametrize(
    ("strike", "report"),
    [
        pytest.param(fill_disk, "No space left on device", id="full disk"),
        pytest.param(wait_for_ever, "will finish writing its checkpoint", id="stuck disk"),
    ],
)
def test_a_disk_that_does_not_take_the_checkpoint_hides_no_error(
    strike: Callable[[], None], report: str, tmp_path: Path
) -> None:
    """Each survivor names the rank that died, within ``save_deadline``."""
    plan = Plan(IN_SIXTH_STEP, {"save_deadline": 1, "checkpoint_io": StruckIO(strike)})
    survivor, _ = ranks.launch_ranks(rescuing.train, 2, plan, tmp_path)
    assert survivor.exit_code == 1
    assert report in survivor.output, survivor.story()
    assert "RankDiedError: rank 1 " in survivor.output
    assert not (tmp_path / rescuing.NAME).exists()


class FailingIO(RankZeroCheckpointIO):
    """Saves in the background, and fails to save the Trainer's own checkpoints."""

    def __init__(self) -> None:
        super().__init__(background=True)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        is_rescue = Path(path).name == rescuing.NAME
        place = path if is_rescue else "/dev/null/not-a-directory"
        super().save_checkpoint(checkpoint, place, storage_options)


def test_an_earlier_save_error_does_not_prevent_the_rescue(tmp_path: Path) -> None:
    """A survivor saves although an earlier save in the background failed.

    That error was not raised before the other rank died.
    """
    finished = 15  # in the second epoch, after the first save
    kill = Kill("on_before_backward", earlier=finished)
    plan = Plan(kill, strategy={"checkpoint_io": FailingIO()})
    survivor, _ = ranks.launch_ranks(rescuing.train, 2, plan, tmp_path)
    assert f"saved step {finished} to" in survivor.output, survivor.story()
    assert "cannot save checkpoint /dev/null/" in survivor.output


SCRIPT = """
    import os, signal, sys
    import lightning as L
    import torch
    from lightning_ddp_ext import DDPExtStrategy
    from tests.integration.rescuing import Net

    class Killed(Net):
        def on_after_backward(self):
            restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            if restart == self.global_rank == 0 and self.trainer.global_step == 5:
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_start(self):
            step = self.trainer.global_step
            sys.stdout.write(f"rank {self.global_rank} starts at step {step}\\n")

    names = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    quiet = dict.fromkeys(names, False)
    strategy = DDPExtStrategy(rescue_checkpoint="last-rescued.ckpt")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=2,
        num_sanity_val_steps=0,
        **quiet,
    )
    torch.manual_seed(0)
    trainer.fit(Killed(), ckpt_path="last")
    assert trainer.global_step == 24
"""


@pytest.mark.nightly
def test_torchrun_starts_the_ranks_again_where_they_were(tmp_path: Path) -> None:
    """Training continues with ``--max-restarts`` and ``"last"``.

    At the end no file is left.
    """
    launcher = ("torchrun", "--nproc-per-node=2", "--max-restarts=1")
    script = run_script(SCRIPT, launcher=launcher, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert script.exit_code == 0, script.output
    starts = [int(step) for step in re.findall(r"starts at step (\d+)", script.output)]
    assert starts in ([0, 0, 5, 5], [0, 0, 6, 6])
    assert not list(tmp_path.glob("*rescued*"))
