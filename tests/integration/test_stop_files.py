"""A stopped run saves where the same command looks for it, and only that command continues
there and removes the file. On SLURM, a requeued job resumes from its own file.
"""

import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.harness import ranks, training
from tests.harness.environment import Environment, by_srun
from tests.harness.scripts import run_script
from tests.integration import continuing

FROM_START = "from the start"
RESUMED = "resumed"
STEPS = 6  # of two epochs on two ranks
# The folder of a command's first fit: the script's name, a digest of the command, and the
# number of the fit.
FOLDER = "*-????????-1"


class Command(NamedTuple):
    """What a command chooses, and where it therefore saves when it is stopped.

    Attributes:
        file: a pattern of the stop checkpoint's path, below the root directory.
        options: of the Trainer.
        strategy: options of the strategy.
        callbacks: of the Trainer.
    """

    file: str
    options: Mapping[str, Any] = {}
    strategy: Mapping[str, Any] = {}
    callbacks: Sequence[L.Callback] = ()


BY_DEFAULT = Command(f"checkpoints/{FOLDER}/last-preempted.ckpt", {"logger": True})
NO_CALLBACK = BY_DEFAULT._replace(options={"logger": True, "enable_checkpointing": False})


def commands_in(root: Path) -> dict[str, Command]:
    """Return commands that have this root directory, by what each chooses."""
    return {
        "as Lightning chooses": BY_DEFAULT,
        "no logger": BY_DEFAULT._replace(options={}),
        "no callback": NO_CALLBACK,
        "dirpath": Command(
            f"own/{FOLDER}/last-preempted.ckpt", callbacks=[ModelCheckpoint(root / "own")]
        ),
        "name": Command(
            f"checkpoints/{FOLDER}/stop.ckpt", strategy={"stop_checkpoint": "stop.ckpt"}
        ),
        "path": Command(
            "given/stop.ckpt", {"logger": True}, {"stop_checkpoint": f"{root}/given/stop.ckpt"}
        ),
    }


def run_command(
    command: Command,
    root: Path,
    stop: L.Callback | None = None,
    *,
    ckpt_path: str | None = "last",
    **options: Any,
) -> continuing.Run:
    """Run a command for two epochs, or until the stop; from its last checkpoint if there is
    one. The other options are the Trainer's.
    """
    training_run = continuing.Training(
        continuing.shuffled(),
        root.parent,
        options={"enable_checkpointing": True, **command.options},
        strategy=dict(command.strategy),
    )
    run = training_run.run(
        max_epochs=2,
        default_root_dir=root,
        callbacks=[*command.callbacks, *([stop] if stop else [])],
        ckpt_path=ckpt_path,
        **options,
    )
    dist.barrier()  # loggers of the next run look for directories of this one
    return run


def begin_of(run: continuing.Run) -> str:
    return FROM_START if run.steps[0].moment == (0, 0) else RESUMED


def run_twice(rank: int, world_size: int, directory: Path, name: str) -> dict[str, Any]:
    """Run a command that is stopped, and run it again; return both runs, and the files that
    each of them leaves.
    """
    root = directory / name
    command = commands_in(root)[name]
    stopped = run_command(command, root, continuing.signal_rank_one())
    saved = list(root.glob(command.file))
    dist.barrier()  # the next run removes the file
    resumed = run_command(command, root)
    left = [*root.rglob(Path(command.file).name), *root.rglob(FOLDER)]
    return {"stopped": stopped, "saved": saved, "resumed": resumed, "left": left}


@pytest.mark.parametrize(
    "name",
    [  # one of them is enough for `make fast`
        pytest.param(name, marks=[pytest.mark.lowest] * (name == "no logger"))
        for name in commands_in(Path())
    ],
)
def test_the_same_command_continues_wherever_it_saves(name: str, tmp_path: Path) -> None:
    """The directory may be new in each run. A finished run leaves neither the stop checkpoint
    nor its folder.
    """
    for runs in ranks.run_ranks(run_twice, 2, tmp_path, name):
        assert runs["stopped"].status == training.STOPPED
        assert len(runs["saved"]) == 1
        assert (runs["resumed"].status, begin_of(runs["resumed"])) == (None, RESUMED)
        assert len(runs["stopped"].steps + runs["resumed"].steps) == STEPS
        assert runs["left"] == []


def run_alone(
    rank: int, world_size: int, directory: Path, *words: str, is_stopped: bool, **options: Any
) -> str:
    """Run a command with these words on one rank, to its end or until a stop in its second
    step; return where it begins.
    """
    sys.argv = ["train.py", *words]
    stop = training.signalled("on_train_batch_end", 1) if is_stopped else None
    run = run_command(BY_DEFAULT, directory / "run", stop, devices=1, **options)
    return begin_of(run) if run.steps else "without a step"


def launch_alone(directory: Path, *words: str, **options: Any) -> ranks.Outcome:
    [outcome] = ranks.launch_ranks(run_alone, 1, directory, *words, **options)
    assert outcome.exit_code == 0, outcome.story()
    return outcome


def test_another_command_leaves_a_stop_checkpoint(tmp_path: Path) -> None:
    """Two experiments may share a directory. One line names the folder that is left.

    A first run logs where it would save.
    """
    first = launch_alone(tmp_path, "--lr", "1", is_stopped=True)
    assert first.result == FROM_START
    line = "ckpt_path='last': no checkpoint yet; if the run ends early, it saves "
    assert first.output.count(line) == 1
    [left] = tmp_path.rglob(FOLDER)
    other = launch_alone(tmp_path, "--lr", "2", is_stopped=False)
    assert other.result == FROM_START
    assert f"in {left.parent}, {left.name} belong to other commands or fits" in other.output
    resumed = launch_alone(tmp_path, "--lr", "1", "--ckpt_path", "last", is_stopped=False)
    assert resumed.result == RESUMED


def test_a_trial_run_keeps_the_stop_checkpoint(tmp_path: Path) -> None:
    """A trial run finishes without a step, so the next run still needs the file."""
    launch_alone(tmp_path, is_stopped=True)
    for trial in ({"fast_dev_run": True}, {"limit_train_batches": 0}):
        assert launch_alone(tmp_path, is_stopped=False, **trial).result == "without a step"
    assert launch_alone(tmp_path, is_stopped=False).result == RESUMED


def cross_validate(
    rank: int, world_size: int, directory: Path, stopped_fold: int | None
) -> list[str]:
    """Return where each fold begins, until one is stopped."""
    begins = []
    for fold in range(3):
        stop = continuing.signal_rank_one() if fold == stopped_fold else None
        run = run_command(BY_DEFAULT, directory / "folds", stop)
        begins.append(begin_of(run))
        if run.status is not None:
            break
    return begins


def test_each_fit_of_a_script_finds_its_own_stop_checkpoint(tmp_path: Path) -> None:
    """No fold of a cross-validation resumes from or replaces another fold's file."""

    def run_again(stopped_fold: int | None) -> list[str]:
        first, second = ranks.run_ranks(cross_validate, 2, tmp_path, stopped_fold)
        assert first == second
        return list(first)

    assert run_again(1) == [FROM_START, FROM_START]
    assert run_again(0) == [FROM_START]
    assert len(list(tmp_path.rglob("*preempted*.ckpt"))) == 2
    assert run_again(None) == [RESUMED, RESUMED, FROM_START]
    assert not [path for path in tmp_path.rglob("*.ckpt") if "epoch" not in path.name]


def save_by_a_callback(rank: int, world_size: int, directory: Path, is_stopped: bool) -> str:
    """Run a command whose ``ModelCheckpoint`` saves to the path of the stop checkpoint;
    return where it begins.
    """
    command = Command(
        "last.ckpt",
        strategy={"stop_checkpoint": directory / "last.ckpt"},
        callbacks=[ModelCheckpoint(directory, save_last=True)],
    )
    stop = continuing.signal_rank_one() if is_stopped else None
    return begin_of(run_command(command, directory / "run", stop))


def test_a_finished_run_keeps_a_file_that_it_has_written_again(tmp_path: Path) -> None:
    """Only the file that it resumed from is removed, and only if it is unchanged since."""
    ranks.run_ranks(save_by_a_callback, 2, tmp_path, True)
    assert ranks.run_ranks(save_by_a_callback, 2, tmp_path, False) == [RESUMED, RESUMED]
    [last] = tmp_path.glob("last*.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == STEPS


SCRIPT = """
import os
import signal
from pathlib import Path

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_ddp_ext


class Ending(L.Callback):
    def on_train_start(self, trainer, module):
        print(f"starts at step {trainer.global_step}", flush=True)

    def on_train_batch_start(self, trainer, *_):
        if str(trainer.global_step) == os.environ["ENDS_AT"]:
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    trainer = L.Trainer(
        strategy="ddp_ext",
        devices=1,
        accelerator="cpu",
        max_epochs=1,
        default_root_dir="run",
        enable_progress_bar=False,
        callbacks=[Ending()],
    )
    trainer.fit(BoringModel(), ckpt_path="last")
"""


def test_a_command_continues_however_it_is_started(tmp_path: Path) -> None:
    """Each of three runs continues the one before, with a relative root directory."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "elsewhere").mkdir()
    for start, first_step, ends_at, exit_code in [
        ("python train.py", 0, "10", training.STOPPED),
        ("cd elsewhere; python ../train.py", 11, "20", training.STOPPED),
        ("python -m torch.distributed.run --nproc-per-node=1 $0", 21, "never", 0),
    ]:
        options = {"launcher": ("sh", "-c", start), "env": {"ENDS_AT": ends_at}}
        output = run_script(script, cwd=tmp_path, exit_code=exit_code, **options)
        assert f"starts at step {first_step}\n" in output, start
    assert not list(tmp_path.rglob("*preempted*"))
    assert not list(tmp_path.rglob("train-*"))


# Jobs of SLURM.


def run_job(
    rank: int, world_size: int, directory: Path, *, is_stopped: bool, ckpt_path: str | None = None
) -> str:
    """Train in a directory that all jobs share; return where the run begins.

    If ``is_stopped``, the signal that announces the time limit of a job stops the run.
    """
    stop = continuing.signal_rank_one(signal.SIGUSR1) if is_stopped else None
    return begin_of(run_command(NO_CALLBACK, directory / "run", stop, ckpt_path=ckpt_path))


def requeued(job: Environment) -> Environment:
    return {**job, "SLURM_RESTART_COUNT": "1"}


def stop_job(directory: Path, job: Environment) -> Path:
    """Stop a job; return its checkpoint."""
    earlier = set(directory.rglob("*.ckpt"))
    outcome, _ = ranks.launch_ranks(run_job, 2, directory, env=job, is_stopped=True)
    assert outcome.result == FROM_START, outcome.story()
    assert "the ranks will finish the current step, save and stop" in outcome.output
    assert f"SLURM did not requeue job {job['SLURM_JOB_ID']}" in outcome.output
    [saved] = set(directory.rglob("*.ckpt")) - earlier
    assert job["SLURM_JOB_ID"] in saved.parent.name
    return saved


@pytest.mark.parametrize("ckpt_path", [None, "last"])
def test_a_requeued_job_resumes_from_its_own_file(ckpt_path: str | None, tmp_path: Path) -> None:
    """As with stock, no ``ckpt_path`` is needed. Another job of the same command leaves a newer
    file, which stays; a finished job leaves none.
    """
    job = by_srun()
    own = stop_job(tmp_path, job)
    newer = stop_job(tmp_path, by_srun())
    outcomes = ranks.launch_ranks(
        run_job, 2, tmp_path, is_stopped=False, ckpt_path=ckpt_path, env=requeued(job)
    )
    assert [outcome.result for outcome in outcomes] == [RESUMED] * 2, outcomes[0].story()
    assert f"from the checkpoint path at {own}\n" in outcomes[0].output
    assert list(tmp_path.rglob("*.ckpt")) == [newer]


@pytest.mark.parametrize("ckpt_path", [None, "last"])
def test_another_job_resumes_only_if_it_is_asked_to(ckpt_path: str | None, tmp_path: Path) -> None:
    """A job without a file of its own, requeued or not, continues an earlier one with "last"."""
    saved = stop_job(tmp_path, by_srun())
    outcomes = ranks.launch_ranks(
        run_job, 2, tmp_path, is_stopped=False, ckpt_path=ckpt_path, env=requeued(by_srun())
    )
    begin = FROM_START if ckpt_path is None else RESUMED
    assert [outcome.result for outcome in outcomes] == [begin] * 2, outcomes[0].story()
    assert saved.exists() is (ckpt_path is None)
