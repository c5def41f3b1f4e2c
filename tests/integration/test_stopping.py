"""After a signal to any rank, all ranks save and stop after the same step, and the same
command continues there.

``test_resume_sweep`` and ``test_stop_sweep`` compare resumed runs with runs that were
not stopped.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.harness import ranks
from tests.integration import continuing

SIGTERM_STATUS = 128 + signal.SIGTERM
FROM_START = "from the start"
RESUMED = "resumed"


class Place(NamedTuple):
    """Where a run saves when it is stopped, below its root directory, and the options
    that choose this, made on a rank from that directory.
    """

    pattern: str
    options: Callable[[Path], dict[str, Any]]


OF_COMMAND = "checkpoints/*-*/last-preempted.ckpt"
PLACES = {
    "as Lightning chooses": Place(OF_COMMAND, lambda root: {"logger": True}),
    "fixed version": Place(OF_COMMAND, lambda root: {"logger": CSVLogger(root, version="fixed")}),
    "no logger": Place("checkpoints/last-preempted.ckpt", lambda root: {}),
    "no callback": Place(
        "last-preempted.ckpt", lambda root: {"logger": True, "enable_checkpointing": False}
    ),
    "dirpath": Place(
        "own/last-preempted.ckpt",
        lambda root: {"callbacks": [ModelCheckpoint(root / "own")]},
    ),
    "path": Place(
        "given/stop.ckpt",
        lambda root: {"logger": True, "stop_checkpoint": f"{root}/given/stop.ckpt"},
    ),
}
STEPS = 6  # of two epochs on two ranks


def run_command(place: Place, root: Path, *callbacks: L.Callback, **options: Any) -> continuing.Run:
    """Run a command for two epochs, from its last checkpoint if there is one."""
    chosen: dict[str, Any] = {"enable_checkpointing": True, **place.options(root), **options}
    strategy = {"stop_checkpoint": chosen.pop("stop_checkpoint", "last-preempted.ckpt")}
    chosen["callbacks"] = [*chosen.pop("callbacks", ()), *callbacks]
    command = continuing.Training(continuing.shuffled(), root.parent, strategy=strategy)
    run = command.run(max_epochs=2, default_root_dir=root, ckpt_path="last", **chosen)
    dist.barrier()  # loggers of the next run look for directories of this one
    return run


def begin_of(run: continuing.Run) -> str:
    return FROM_START if run.steps[0].moment == (0, 0) else RESUMED


def stop_rank_one() -> L.Callback:
    """Return a callback that sends SIGTERM to rank 1 in the second step."""
    return continuing.signalled("on_train_batch_end", 1, ranks=[1])


class TwoRuns(NamedTuple):
    """A stopped run, and the same command run again.

    Attributes:
        saved: the stop checkpoints after the stopped run.
        remaining: the stop checkpoints after the resumed run.
    """

    stopped: continuing.Run
    saved: list[Path]
    resumed: continuing.Run
    remaining: list[Path]


def run_twice(rank: int, world_size: int, directory: Path, name: str) -> TwoRuns:
    """Run a command that is stopped, and run it again."""
    place = PLACES[name]
    root = directory / name
    stopped = run_command(place, root, stop_rank_one())
    saved = list(root.glob(place.pattern))
    dist.barrier()
    resumed = run_command(place, root)
    return TwoRuns(stopped, saved, resumed, list(root.rglob(Path(place.pattern).name)))


# One of them is enough for `make fast`.
NAMES = [name for name in PLACES if name != "no logger"]


@pytest.mark.parametrize("name", [*NAMES, pytest.param("no logger", marks=pytest.mark.lowest)])
def test_the_same_command_continues_wherever_it_saves(name: str, tmp_path: Path) -> None:
    """The directory may be new in each run. A finished run leaves no stop checkpoint."""
    for runs in ranks.run_ranks(run_twice, 2, tmp_path, name):
        assert (runs.stopped.status, runs.resumed.status) == (SIGTERM_STATUS, None)
        assert len(runs.saved) == 1
        assert begin_of(runs.resumed) == RESUMED
        assert len(runs.stopped.steps + runs.resumed.steps) == STEPS
        assert runs.remaining == []


def run_alone(
    rank: int,
    world_size: int,
    directory: Path,
    *words: str,
    stops: bool,
    ckpt_path: str | None = "last",
    trial: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Run a command with these words, to its end or until a stop in its second step;
    return where it begins.
    """
    sys.argv = ["train.py", *words]
    command = continuing.Training(continuing.shuffled(), directory, devices=1)
    run = command.run(
        callbacks=[continuing.signalled("on_train_batch_end", 1)] if stops else [],
        ckpt_path=ckpt_path,
        logger=True,
        enable_checkpointing=True,
        max_epochs=2,
        default_root_dir=directory,
        **trial,
    )
    return begin_of(run) if run.steps else "without a step"


class Launched(NamedTuple):
    """A command on one rank."""

    begin: str
    output: str


def launch_alone(directory: Path, *words: str, **options: Any) -> Launched:
    [outcome] = ranks.launch_ranks(run_alone, 1, directory, *words, **options)
    assert outcome.exit_code == 0, outcome.story()
    return Launched(outcome.result, outcome.output)


def test_another_command_leaves_a_stop_checkpoint(tmp_path: Path) -> None:
    """Two experiments may share a directory."""
    assert launch_alone(tmp_path, "--lr", "1", stops=True).begin == FROM_START
    assert launch_alone(tmp_path, "--lr", "2", stops=False).begin == FROM_START
    same = launch_alone(tmp_path, "--lr", "1", "--ckpt_path", "last", stops=False)
    assert same.begin == RESUMED


def test_a_trial_run_keeps_the_stop_checkpoint(tmp_path: Path) -> None:
    """A trial run finishes without a step, so the next run still needs the file."""
    launch_alone(tmp_path, stops=True)
    for trial in ({"fast_dev_run": True}, {"limit_train_batches": 0}):
        assert launch_alone(tmp_path, stops=False, trial=trial).begin == "without a step"
    assert launch_alone(tmp_path, stops=False).begin == RESUMED


def test_a_first_run_with_last_names_the_file_of_a_later_one(tmp_path: Path) -> None:
    """A run without a checkpoint starts anew, and logs where it would save one."""
    launched = launch_alone(tmp_path, stops=False)
    assert launched.begin == FROM_START
    line = "ckpt_path='last': no checkpoint yet; if the run ends early, it saves "
    assert launched.output.count(line) == 1


class Fold(continuing.Net):
    """Has hyperparameters, as most models have."""

    def __init__(self, width: int, *args: Any) -> None:
        super().__init__(*args)
        self.save_hyperparameters({"width": width})


FOLDS = 3


def cross_validate(
    rank: int, world_size: int, directory: Path, name: str, stopped_fold: int | None, width: int
) -> list[str]:
    """Return where each fold begins, until one is stopped."""
    begins = []
    for fold in range(FOLDS):
        callbacks = [stop_rank_one()] if fold == stopped_fold else []
        model = partial(Fold, width)
        run = run_command(PLACES[name], directory / name, *callbacks, model=model)
        begins.append(begin_of(run))
        if run.status is not None:
            break
    return begins


@pytest.mark.parametrize("name", ["as Lightning chooses", "no logger", "path"])
def test_each_fit_of_a_script_finds_its_own_stop_checkpoint(name: str, tmp_path: Path) -> None:
    """No fold of a cross-validation resumes from or replaces another fold's file."""

    def run_again(stopped_fold: int | None, *, width: int = 1) -> list[str]:
        first, second = ranks.run_ranks(cross_validate, 2, tmp_path, name, stopped_fold, width)
        assert first == second
        return list(first)

    assert run_again(1) == [FROM_START, FROM_START]
    assert run_again(0) == [FROM_START]
    assert len(list(tmp_path.rglob("*.ckpt"))) >= 2
    assert run_again(0, width=2) == [FROM_START], "another model is in the same fold"
    assert run_again(None) == [RESUMED, RESUMED, FROM_START]
    assert run_again(None, width=2) == [RESUMED, FROM_START, FROM_START]
    assert not [path for path in tmp_path.rglob("*.ckpt") if "epoch" not in path.name]


def test_runs_that_differ_by_environment_keep_their_stop_checkpoints(tmp_path: Path) -> None:
    """Each run finds its own file.

    A run without one resumes from another's, and names the variables that differ.
    """

    def launch(part: str, **options: Any) -> Launched:
        return launch_alone(tmp_path, env={"PART": part}, **options)

    assert launch("a", stops=True).begin == FROM_START
    other_shell = launch("z", stops=False)  # may be the same run, in another shell
    assert other_shell.begin == RESUMED
    assert "if that was another run, move the file away" in other_shell.output
    assert launch("b", stops=True, ckpt_path=None).begin == FROM_START
    other_run = launch("c", stops=True)
    assert other_run.begin == RESUMED
    assert ".ckpt, saved by a run with other values of PART" in other_run.output
    same_run = launch("a", stops=False)
    assert same_run.begin == RESUMED
    assert "belongs to a run with other values of PART; pass its path" in same_run.output
    assert ", saved by" not in same_run.output


def save_by_a_callback(rank: int, world_size: int, directory: Path, stops: bool) -> str:
    """Run a command whose ``ModelCheckpoint`` saves to the path of the stop checkpoint;
    return where it begins.
    """
    saver = ModelCheckpoint(directory, save_last=True)
    place = Place("last.ckpt", lambda root: {"stop_checkpoint": "last.ckpt"})
    callbacks = [saver, stop_rank_one()] if stops else [saver]
    return begin_of(run_command(place, directory / "run", *callbacks))


def test_a_finished_run_keeps_a_file_that_it_has_written_again(tmp_path: Path) -> None:
    """Only the file that it resumed from is removed, and only if it is unchanged since."""
    ranks.run_ranks(save_by_a_callback, 2, tmp_path, True)
    assert ranks.run_ranks(save_by_a_callback, 2, tmp_path, False) == [RESUMED, RESUMED]
    [last] = tmp_path.glob("last*.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == STEPS


RUNS = 6  # several, because one of two names for the same file would be chosen by chance


def run_in_relative_directories(rank: int, world_size: int, directory: Path) -> list[str]:
    """Stop and resume runs in relative directories; return the remaining stop checkpoints."""
    os.chdir(directory)
    for number in range(RUNS):
        options = {
            "enable_checkpointing": True,
            "default_root_dir": Path(f"run{number}"),
            "max_epochs": 1,
        }
        command = continuing.Training(continuing.shuffled(), directory, 1, options)
        command.run(callbacks=[continuing.signalled("on_train_batch_end", 1)], ckpt_path="last")
        assert list(directory.rglob("*preempted*.ckpt"))
        command.run(ckpt_path="last")
    return [str(path) for path in directory.rglob("*preempted*.ckpt")]


def test_a_stop_checkpoint_in_a_relative_root_directory_is_removed(tmp_path: Path) -> None:
    """Lightning and this package name the file differently; it is found and removed once."""
    assert ranks.run_ranks(run_in_relative_directories, 1, tmp_path) == [[]]
