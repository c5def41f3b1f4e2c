"""After a signal to any rank, all ranks save and stop after the same step, and the same
command continues there.

``test_resume_sweep`` and ``test_stop_sweep`` compare resumed runs with runs that were
not stopped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.harness import ranks
from tests.integration import continuing


class Place(NamedTuple):
    """Where a run saves when it is stopped, and the options that choose this, made on a
    rank from its root directory.
    """

    pattern: str
    options: Callable[[Path], dict[str, Any]]


OF_COMMAND = "checkpoints/*-*/last-preempted.ckpt"
PLACES = {
    "as Lightning chooses": Place(OF_COMMAND, lambda root: {"logger": True}),
    "save_last": Place(
        OF_COMMAND,
        lambda root: {"logger": True, "callbacks": [ModelCheckpoint(save_last=True)]},
    ),
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
    stop_checkpoint = chosen.pop("stop_checkpoint", "last-preempted.ckpt")
    chosen["callbacks"] = [*chosen.pop("callbacks", ()), *callbacks]
    command = continuing.Training(
        continuing.shuffled(), root.parent, strategy={"stop_checkpoint": stop_checkpoint}
    )
    run = command.run(max_epochs=2, default_root_dir=root, ckpt_path="last", **chosen)
    dist.barrier()  # loggers of the next run look for directories of this one
    return run


class Commands(NamedTuple):
    """A command that was stopped, the same again, and, without checkpoints, once more."""

    stopped: continuing.Run
    saved: list[Path]
    resumed: continuing.Run
    left: list[Path]
    whole: continuing.Run


def stop_rank_one() -> L.Callback:
    """Return a callback that sends SIGTERM to rank 1 in the second step."""
    return continuing.signalled("on_train_batch_end", 1, ranks=[1])


def run_three_times(rank: int, world_size: int, directory: Path, name: str) -> Commands:
    place = PLACES[name]
    root = directory / name
    stopped = run_command(place, root, stop_rank_one())
    saved = list(root.glob(place.pattern))
    dist.barrier()
    resumed = run_command(place, root)
    left = list(root.rglob(Path(place.pattern).name))
    whole = run_command(place, directory / "whole")
    return Commands(stopped, saved, resumed, left, whole)


# One of them is enough for `make fast`.
NAMES = [name for name in PLACES if name != "no logger"]


@pytest.mark.parametrize("name", [*NAMES, pytest.param("no logger", marks=pytest.mark.lowest)])
def test_the_same_command_continues_wherever_it_saves(name: str, tmp_path: Path) -> None:
    """It also resumes if Lightning's directory is new in each run.

    A finished run leaves no stop checkpoint.
    """
    by_rank = ranks.run_ranks(run_three_times, 2, tmp_path, name)
    for found in by_rank:
        assert found.stopped.status == 143
        assert len(found.saved) == 1
        assert found.resumed.status is None
        assert found.stopped.steps + found.resumed.steps == found.whole.steps
        assert len(found.whole.steps) == STEPS
        assert found.left == []


def run_alone(
    rank: int,
    world_size: int,
    directory: Path,
    *words: str,
    stops: bool,
    ckpt_path: str | None = "last",
) -> str:
    """Run a command with these words on one rank, and say where it begins; it is stopped
    in its second step, or runs to its end.
    """
    sys.argv = ["train.py", *words]
    options = {
        "logger": True,
        "enable_checkpointing": True,
        "max_epochs": 2,
        "default_root_dir": directory,
    }
    callbacks = [continuing.signalled("on_train_batch_end", 1)] if stops else []
    command = continuing.Training(continuing.shuffled(), directory, 1, options)
    return begin_of(command.run(callbacks=callbacks, ckpt_path=ckpt_path))


def begin_of(run: continuing.Run) -> str:
    return "from the start" if run.steps[0].moment == (0, 0) else "resumed"


def launch_alone(directory: Path, *words: str, **options: Any) -> tuple[str, str]:
    """Return where a command begins, and its output."""
    [outcome] = ranks.launch_ranks(run_alone, 1, directory, *words, **options)
    assert outcome.exit_code == 0, outcome.story()
    return outcome.result, outcome.output


def test_another_command_leaves_a_stop_checkpoint(tmp_path: Path) -> None:
    """Two experiments may share a directory."""
    begun, _ = launch_alone(tmp_path, "--lr", "1", stops=True)
    assert begun == "from the start"
    begun, _ = launch_alone(tmp_path, "--lr", "2", stops=False)
    assert begun == "from the start"
    begun, _ = launch_alone(tmp_path, "--lr", "1", "--ckpt_path", "last", stops=False)
    assert begun == "resumed"


def test_a_first_run_with_last_names_the_file_of_a_later_one(tmp_path: Path) -> None:
    """It starts from the beginning."""
    begun, output = launch_alone(tmp_path, stops=False)
    assert begun == "from the start"
    line = "ckpt_path='last': no checkpoint yet; if the ranks are stopped, they save "
    assert output.count(line) == 1


class Fold(continuing.Net):
    """Has hyperparameters, as most models have."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.save_hyperparameters({"width": WIDTH})


WIDTH = 1
FOLDS = 3


def cross_validate(
    rank: int, world_size: int, directory: Path, name: str, stopped_fold: int | None, width: int
) -> list[str]:
    """Return where each fold begins, until one is stopped."""
    global WIDTH
    WIDTH = width
    begun = []
    for fold in range(FOLDS):
        callbacks = [stop_rank_one()] if fold == stopped_fold else []
        run = run_command(PLACES[name], directory / name, *callbacks, model=Fold)
        begun.append(begin_of(run))
        if run.status is not None:
            break
    return begun


OF_FOLDS = ("as Lightning chooses", "no logger", "path")


@pytest.mark.parametrize("name", OF_FOLDS)
def test_each_fit_of_a_script_finds_its_own_stop_checkpoint(name: str, tmp_path: Path) -> None:
    """In a cross-validation, no fold resumes from another fold's weights, nor replaces
    another fold's file.
    """

    def again(stopped_fold: int | None, *, width: int = 1) -> list[str]:
        first, second = ranks.run_ranks(cross_validate, 2, tmp_path, name, stopped_fold, width)
        assert first == second
        return list(first)

    assert again(1) == ["from the start"] * 2
    assert again(0) == ["from the start"]
    assert len(list(tmp_path.rglob("*.ckpt"))) >= 2
    assert again(0, width=2) == ["from the start"], "another model is in the same fold"
    assert again(None) == ["resumed", "resumed", "from the start"]
    assert again(None, width=2) == ["resumed", "from the start", "from the start"]
    assert not [path for path in tmp_path.rglob("*.ckpt") if "epoch" not in path.name]


def test_runs_that_differ_by_environment_keep_their_stop_checkpoints(tmp_path: Path) -> None:
    """Each finds its own file; one without a file says in which variables it differs
    from the run that saved it.
    """

    def launch(part: str, **options: Any) -> tuple[str, str]:
        return launch_alone(tmp_path, env={"PART": part}, **options)

    assert launch("a", stops=True)[0] == "from the start"
    begun, output = launch("z", stops=False)  # may be the same run, in another shell
    assert begun == "resumed"
    assert "if that was another run, move the file away" in output
    assert launch("b", stops=True, ckpt_path=None)[0] == "from the start"
    begun, output = launch("c", stops=True)
    assert begun == "resumed"
    assert ".ckpt, saved by a run with other values of PART" in output
    begun, output = launch("a", stops=False)
    assert begun == "resumed"
    assert "belongs to a run with other values of PART; pass its path" in output
    assert ", saved by" not in output


def saved_by_a_callback(rank: int, world_size: int, directory: Path, stops: bool) -> int:
    """Return the first step of a run whose ``ModelCheckpoint`` saves to the path of the
    stop checkpoint.
    """
    saver = ModelCheckpoint(directory, save_last=True)
    place = Place("last.ckpt", lambda root: {"stop_checkpoint": "last.ckpt"})
    callbacks = [saver, stop_rank_one()] if stops else [saver]
    return STEPS - len(run_command(place, directory / "run", *callbacks).steps)


def test_a_finished_run_keeps_a_file_that_it_has_written_again(tmp_path: Path) -> None:
    """Only the file that it resumed from is removed, and only if it is unchanged since."""
    ranks.run_ranks(saved_by_a_callback, 2, tmp_path, True)
    first, second = ranks.run_ranks(saved_by_a_callback, 2, tmp_path, False)
    assert first == second > 0
    [last] = tmp_path.glob("last*.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == STEPS


def in_relative_directories(rank: int, world_size: int, directory: Path) -> list[list[str]]:
    """Return the files that finished runs leave, after each was stopped and resumed in
    its directory.
    """
    os.chdir(directory)
    left = []
    for number in range(6):
        place = Path(f"run{number}")
        for callbacks in ([continuing.signalled("on_train_batch_end", 1)], []):
            options = {"enable_checkpointing": True, "default_root_dir": place, "max_epochs": 1}
            continuing.Training(continuing.shuffled(), directory, 1, options).run(
                callbacks=callbacks, ckpt_path="last"
            )
        left.append([path.name for path in place.rglob("*.ckpt") if "preempted" in path.name])
    return left


def test_a_file_has_one_name_though_the_root_directory_is_relative(tmp_path: Path) -> None:
    """A run removes the stop checkpoint that it resumed from, by whichever name it
    found it.
    """
    assert ranks.run_ranks(in_relative_directories, 1, tmp_path) == [[[]] * 6]
