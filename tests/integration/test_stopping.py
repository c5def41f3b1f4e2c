"""After a signal to any rank, all ranks save and stop after the same step, and the same command continues there.

``test_resume_sweep`` and ``test_stop_sweep`` compare resumed runs with runs that were not stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.harness.ranks import by_hand_env, launch_ranks, run_ranks
from tests.integration.continuing import Run, Training, shuffled, signalled

Moment = tuple[str, int]  # a hook of a callback, and how often it has been called before

# The moment of the signal, and the fewest steps after which the ranks stop; a run has 2 epochs, each with 3 training
# and 2 validation steps. The ranks agree on the step by messages, so on a busy machine they stop some steps later.
MOMENTS: dict[Moment, int] = {
    ("on_train_batch_start", 0): 1,
    ("on_train_batch_start", 1): 2,
    ("on_train_batch_end", 2): 3,
    ("on_validation_batch_start", 1): 3,
    ("on_train_epoch_end", 0): 3,
    ("on_train_end", 0): 6,
}


def stop_at_moments(rank: int, world_size: int, directory: Path) -> list[tuple[Any, ...]]:
    """Return how runs end after a signal to one of the ranks: status, files, and steps made after it."""
    found = []
    for number, (moment, steps) in enumerate(MOMENTS.items()):
        place = directory / str(moment)
        training = Training(shuffled(), directory, options={"max_epochs": 2, "limit_val_batches": 1.0})
        callbacks = [signalled(*moment)] if rank == number % world_size else []
        stopped = training.run(callbacks=callbacks, default_root_dir=place)
        found.append((stopped.status, [path.name for path in place.glob("*.ckpt")], len(stopped.steps) - steps))
    return found


@pytest.mark.lowest
def test_all_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    """At every moment, and on either rank: the ranks stop after the same step, save, and exit with status 143."""
    first, second = run_ranks(stop_at_moments, 2, tmp_path, env=by_hand_env(2))
    assert first == second
    assert all(end in [(143, ["last-preempted.ckpt"], later) for later in range(4)] for end in first), first


# Trainer options that choose the checkpoint directory, made on a rank; each with a pattern for the stop checkpoint.
OF_COMMAND = "checkpoints/*-*/last-preempted.ckpt"
PLACES: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
    "as Lightning chooses": (OF_COMMAND, lambda place: {"logger": True}),
    "save_last": (OF_COMMAND, lambda place: {"logger": True, "callbacks": [ModelCheckpoint(save_last=True)]}),
    "fixed version": (OF_COMMAND, lambda place: {"logger": CSVLogger(place, version="fixed")}),
    "no logger": ("checkpoints/last-preempted.ckpt", lambda place: {}),
    "no callback": ("last-preempted.ckpt", lambda place: {"logger": True, "enable_checkpointing": False}),
    "dirpath": ("own/last-preempted.ckpt", lambda place: {"callbacks": [ModelCheckpoint(place / "own")]}),
    "path": ("given/stop.ckpt", lambda place: {"logger": True, "stop_checkpoint": f"{place}/given/stop.ckpt"}),
}


def commands(rank: int, world_size: int, directory: Path) -> list[str]:
    """List faults of a command that runs until a signal, again to its end, and once more; by its save path."""
    wrong = []
    for name, (pattern, make) in PLACES.items():
        place = directory / name

        def run(*callbacks: Any, place: Path = place, make: Any = make) -> Run:
            options = make(place)
            strategy = {each: options.pop(each) for each in ("stop_checkpoint",) if each in options}
            own = [*options.pop("callbacks", ()), *callbacks]
            training = Training(shuffled(), directory, strategy=strategy)
            chosen = {"max_epochs": 2, "enable_checkpointing": True, "default_root_dir": place, **options}
            return training.run(callbacks=own, ckpt_path="last", **chosen)

        stopped = run(*([signalled("on_train_batch_end", 1)] if rank == 1 else []))
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
        wrong += [f"{name}: {what}, {stopped} {resumed}" for what, is_right in seen.items() if not is_right]
    return wrong


def test_the_same_command_continues_wherever_it_saves(tmp_path: Path) -> None:
    """It also resumes if Lightning's directory is new in each run. A finished run leaves no stop checkpoint."""
    assert run_ranks(commands, 2, tmp_path, env=by_hand_env(2)) == [[], []]


def commands_in_turn(rank: int, world_size: int, directory: Path, words: list[str], stops: bool) -> tuple[int, ...]:
    """Return the first step of a command, which is stopped in its second one or runs to its end."""
    sys.argv = ["train.py", *words]
    options = {"logger": True, "enable_checkpointing": True, "max_epochs": 1, "default_root_dir": directory}
    callbacks = [signalled("on_train_batch_end", 1)] if stops else []
    return Training(shuffled(), directory, 1, options).run(callbacks=callbacks, ckpt_path="last").steps[0][:2]


def test_another_command_names_a_stop_checkpoint_and_leaves_it(tmp_path: Path) -> None:
    """Two experiments may share a directory."""
    begun, output = [], ""
    for words, stops in ((["--lr", "1"], True), (["--lr", "2"], False), (["--lr", "1", "--ckpt_path", "last"], False)):
        [outcome] = launch_ranks(commands_in_turn, 1, tmp_path, words, stops)
        begun.append(outcome.result)
        output += outcome.output
    assert begun == [(0, 0), (0, 0), (0, 2)], output
    assert output.count("last-preempted.ckpt belongs to another command; pass its path to resume from it") == 1
