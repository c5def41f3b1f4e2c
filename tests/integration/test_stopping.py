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
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.harness import ranks
from tests.integration import continuing
from tests.integration.continuing import Net, Run, Training

# Trainer options that choose the checkpoint directory, made on a rank; each with a
# pattern for the stop checkpoint.
OF_COMMAND = "checkpoints/*-*/last-preempted.ckpt"
PLACES: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
    "as Lightning chooses": (OF_COMMAND, lambda place: {"logger": True}),
    "save_last": (
        OF_COMMAND,
        lambda place: {"logger": True, "callbacks": [ModelCheckpoint(save_last=True)]},
    ),
    "fixed version": (OF_COMMAND, lambda place: {"logger": CSVLogger(place, version="fixed")}),
    "no logger": ("checkpoints/last-preempted.ckpt", lambda place: {}),
    "no callback": (
        "last-preempted.ckpt",
        lambda place: {"logger": True, "enable_checkpointing": False},
    ),
    "dirpath": (
        "own/last-preempted.ckpt",
        lambda place: {"callbacks": [ModelCheckpoint(place / "own")]},
    ),
    "path": (
        "given/stop.ckpt",
        lambda place: {"logger": True, "stop_checkpoint": f"{place}/given/stop.ckpt"},
    ),
}


def commands(rank: int, world_size: int, directory: Path) -> list[str]:
    """List faults of a command that runs until a signal, again to its end, and once
    more; by its save path.
    """
    wrong = []
    for name, (pattern, make) in PLACES.items():
        place = directory / name

        def run(*callbacks: Any, place: Path = place, make: Any = make) -> Run:
            options = make(place)
            strategy = {each: options.pop(each) for each in ("stop_checkpoint",) if each in options}
            own = [*options.pop("callbacks", ()), *callbacks]
            training = Training(continuing.shuffled(), directory, strategy=strategy)
            chosen = {
                "max_epochs": 2,
                "enable_checkpointing": True,
                "default_root_dir": place,
                **options,
            }
            return training.run(callbacks=own, ckpt_path="last", **chosen)

        stopped = run(*([continuing.signalled("on_train_batch_end", 1)] if rank == 1 else []))
        dist.barrier()  # loggers of the next run look for directories of this one
        saved = list(place.glob(pattern))
        dist.barrier()
        resumed = run()
        dist.barrier()
        left = list(place.rglob(Path(pattern).name))
        whole = run() if name != "save_last" else None  # whose last.ckpt may be found
        done = len(stopped.steps)
        seen = {
            "status": stopped.status == 143,
            "saved": len(saved) == 1,
            "left": not left,
            "continues": whole is None or stopped.steps + resumed.steps == whole.steps,
            "steps": (len(resumed.steps), resumed.status) == (6 - done, None),
        }
        wrong += [
            f"{name}: {what}, {stopped} {resumed}"
            for what, is_right in seen.items()
            if not is_right
        ]
    return wrong


@pytest.mark.lowest
def test_the_same_command_continues_wherever_it_saves(tmp_path: Path) -> None:
    """It also resumes if Lightning's directory is new in each run.

    A finished run leaves no stop checkpoint.
    """
    assert ranks.run_ranks(commands, 2, tmp_path, env=ranks.by_hand_env(2)) == [[], []]


def commands_in_turn(
    rank: int, world_size: int, directory: Path, words: list[str], stops: bool
) -> tuple[int, ...]:
    """Return the first step of a command, which is stopped in its second one or runs to
    its end.
    """
    sys.argv = ["train.py", *words]
    options = {
        "logger": True,
        "enable_checkpointing": True,
        "max_epochs": 1,
        "default_root_dir": directory,
    }
    callbacks = [continuing.signalled("on_train_batch_end", 1)] if stops else []
    return (
        Training(continuing.shuffled(), directory, 1, options)
        .run(callbacks=callbacks, ckpt_path="last")
        .steps[0]
        .moment
    )


def test_another_command_names_a_stop_checkpoint_and_leaves_it(tmp_path: Path) -> None:
    """Two experiments may share a directory."""
    begun = []
    output = ""
    for words, stops in (
        (["--lr", "1"], True),
        (["--lr", "2"], False),
        (["--lr", "1", "--ckpt_path", "last"], False),
    ):
        [outcome] = ranks.launch_ranks(commands_in_turn, 1, tmp_path, words, stops)
        begun.append(outcome.result)
        output += outcome.output
    assert begun == [(0, 0), (0, 0), (0, 2)], output
    assert (
        output.count(
            "last-preempted.ckpt belongs to another command; pass its path to resume from it"
        )
        == 1
    )


def test_a_first_run_with_last_gets_one_hint(tmp_path: Path) -> None:
    """The line names the file of a later run; Lightning's hint about ``save_last``
    would be a second one.
    """
    [outcome] = ranks.launch_ranks(commands_in_turn, 1, tmp_path, [], False)
    assert outcome.result == (0, 0)
    assert (
        outcome.output.count(
            "ckpt_path='last': no checkpoint yet; if the ranks are stopped, they save "
        )
        == 1
    )
    assert "no last checkpoint available" not in outcome.output


class Fold(Net):
    """Has hyperparameters, as most models have."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.save_hyperparameters({"width": WIDTH})


WIDTH = 1
FOLDS = 3
# The number of a fold, and the hook in whose second call rank 1 gets a signal.
Stop = tuple[int, str] | None


def cross_validate(
    rank: int, world_size: int, directory: Path, name: str, stop: Stop, **model: int
) -> list[Any]:
    """Return the first batch of each fold, and the files that its end leaves."""
    global WIDTH
    WIDTH = model.get("width", 1)
    place = directory / name
    begun = []
    for fold in range(FOLDS):
        options = PLACES[name][1](place)
        strategy = {"stop_checkpoint": options.pop("stop_checkpoint", "last-preempted.ckpt")}
        training = Training(continuing.shuffled(), directory, strategy=strategy)
        own = options.pop("callbacks", [])
        if stop is not None and stop[0] == fold and rank == 1:
            own.append(continuing.signalled(stop[1], 1))
        defaults = {"max_epochs": 2, "enable_checkpointing": True, "default_root_dir": place}
        run = training.run(model=Fold, callbacks=own, ckpt_path="last", **{**defaults, **options})
        begun.append(run.steps[0].moment)
        dist.barrier()  # the next fold's loggers look for directories of this one
        if run.status is not None:
            break
    return begun


def in_words(begun: list[tuple[int, int]]) -> list[str]:
    return ["from the start" if first == (0, 0) else "resumed" for first in begun]


OF_FOLDS = ("as Lightning chooses", "no logger", "path")


@pytest.mark.parametrize("name", OF_FOLDS)
def test_each_fit_of_a_script_finds_its_own_stop_checkpoint(name: str, tmp_path: Path) -> None:
    """In a cross-validation, no fold resumes from another fold's weights, nor replaces
    another fold's file.
    """

    def again(stop: Stop, **model: int) -> list[str]:
        first, second = ranks.run_ranks(
            cross_validate, 2, tmp_path, name, stop, env=ranks.by_hand_env(2), **model
        )
        assert first == second
        return in_words(first)

    assert again((1, "on_train_batch_end")) == ["from the start"] * 2
    assert again((0, "on_train_batch_end")) == ["from the start"]
    assert len(list(tmp_path.rglob("*.ckpt"))) >= 2
    assert again((0, "on_train_batch_end"), width=2) == ["from the start"], (
        "another model is in the same fold"
    )
    assert again(None) == ["resumed", "resumed", "from the start"]
    assert again(None, width=2) == ["resumed", "from the start", "from the start"]
    assert not [path for path in tmp_path.rglob("*.ckpt") if "epoch" not in path.name]


def in_an_environment(
    rank: int, world_size: int, directory: Path, stops: bool, last: str | None
) -> tuple[Any, ...]:
    """Return the first batch of a run whose environment selects its data, with a
    directory that all such runs share.
    """
    options = {
        "enable_checkpointing": True,
        "logger": True,
        "default_root_dir": directory,
        "max_epochs": 2,
    }
    callbacks = [continuing.signalled("on_train_batch_end", 1)] if stops else []
    return (
        Training(continuing.shuffled(), directory, 1, options)
        .run(callbacks=callbacks, ckpt_path=last)
        .steps[0]
        .moment
    )


def test_runs_that_differ_by_environment_keep_their_stop_checkpoints(tmp_path: Path) -> None:
    """Each finds its own file; one without a file says in which variables it differs
    from the run that saved it.
    """

    def launch(part: str, stops: bool, last: str | None = "last") -> tuple[str, str]:
        [outcome] = ranks.launch_ranks(
            in_an_environment, 1, tmp_path, stops, last, env={"PART": part}
        )
        assert outcome.exit_code == 0, outcome.story()
        return in_words([outcome.result])[0], outcome.output

    assert launch("a", stops=True)[0] == "from the start"
    begun, output = launch("z", stops=False)  # may be the same run, in another shell
    assert begun == "resumed"
    assert "if that was another run, move the file away" in output
    assert launch("b", stops=True, last=None)[0] == "from the start"
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
    callbacks: list[Any] = [ModelCheckpoint(directory, save_last=True)]
    if stops and rank == 1:
        callbacks.append(continuing.signalled("on_train_batch_end", 1))
    training = Training(
        continuing.shuffled(),
        directory,
        strategy={"stop_checkpoint": "last.ckpt"},
        options={"max_epochs": 2},
    )
    run = training.run(callbacks=callbacks, enable_checkpointing=True, ckpt_path="last")
    return 6 - len(run.steps)


def test_a_finished_run_keeps_a_file_that_it_has_written_again(tmp_path: Path) -> None:
    """Only the file that it resumed from is removed, and only if it is unchanged since."""
    ranks.run_ranks(saved_by_a_callback, 2, tmp_path, True, env=ranks.by_hand_env(2))
    first, second = ranks.run_ranks(
        saved_by_a_callback, 2, tmp_path, False, env=ranks.by_hand_env(2)
    )
    assert first == second > 0
    [last] = tmp_path.glob("last*.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 6


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
            Training(continuing.shuffled(), directory, 1, options).run(
                callbacks=callbacks, ckpt_path="last"
            )
        left.append([path.name for path in place.rglob("*.ckpt") if "preempted" in path.name])
    return left


def test_a_file_has_one_name_though_the_root_directory_is_relative(tmp_path: Path) -> None:
    """A run removes the stop checkpoint that it resumed from, by whichever name it
    found it.
    """
    assert ranks.run_ranks(in_relative_directories, 1, tmp_path) == [[[]] * 6]
