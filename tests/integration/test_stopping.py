"""A signal to any rank: all stop after the same step, saved, and what is resumed goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import by_hand_env, run_ranks
from tests.harness.training import make_strategy
from tests.integration.stopping import Moment, Signalled, fit, shuffled

# When the signal comes, and after how many steps all have stopped, or one later where the other rank was past that: in
# 3 epochs of 3 steps, each followed by 2 of validation.
MOMENTS: dict[Moment, int] = {
    ("on_train_start", 0): 1,
    ("on_train_batch_start", 1): 2,
    ("on_before_optimizer_step", 1): 2,
    ("on_train_batch_end", 1): 2,
    ("on_train_batch_end", 2): 3,
    ("on_validation_batch_start", 1): 3,
    ("on_train_epoch_end", 0): 3,
    ("on_train_epoch_start", 1): 3,
    ("on_train_batch_start", 8): 9,
    ("on_train_epoch_end", 2): 9,
    ("on_train_end", 0): 9,
}


def stop_and_resume(
    rank: int, world_size: int, directory: Path, cases: dict[str, tuple[dict[str, Any], list[Moment]]]
) -> list[str]:
    """What differs from runs that were not stopped, by the moment of the signal, to one rank and the other by turns."""
    return [
        wrong
        for name, (options, moments) in cases.items()
        for wrong in differences(rank, world_size, directory / name, moments, **options)
    ]


def differences(
    rank: int, world_size: int, directory: Path, moments: list[Moment], *, loader: Any = None, **options: Any
) -> list[str]:
    loaders = shuffled(**(loader or {}))
    settings: dict[str, Any] = {"max_epochs": 3, **options}
    whole = fit(make_strategy("ours", directory.parent), directory / "whole", loaders, **settings)
    wrong = []
    for number, moment in enumerate(moments):
        place = directory / f"{moment[0]}-{moment[1]}"
        callbacks = [Signalled(moment)] if rank == number % world_size else []
        stopped = fit(make_strategy("ours", directory.parent), place, loaders, callbacks=callbacks, **settings)
        path = place / "preempted.ckpt"
        resumed = fit(make_strategy("ours", directory.parent), place, loaders, ckpt_path=str(path), **settings)
        name = f"{directory.name} {place.name}: "
        if (stopped.status, stopped.files) != (143, ["preempted.ckpt"]):
            wrong.append(f"{name}status {stopped.status}, files {stopped.files}")
        if directory.name == "epochs" and len(stopped.steps) - MOMENTS[moment] not in (0, 1):
            wrong.append(f"{name}stopped after {len(stopped.steps)}")
        again = len(stopped.steps) % 3 % options.get("accumulate_grad_batches", 1)  # without a step, so done again
        if options.get("validated") and stopped.validated % 100 == 0:
            wrong.append(f"{name}validation went on to its end")
        if resumed.results != whole.results[len(whole.results) - len(resumed.results) :]:
            wrong.append(f"{name}results {resumed.results} instead of {whole.results}")
        if stopped.steps[: len(stopped.steps) - again] + resumed.steps != whole.steps:
            wrong.append(f"{name}{stopped.steps} and then {resumed.steps} instead of {whole.steps}")
        if not torch.equal(resumed.weights, whole.weights):
            wrong.append(f"{name}other weights")
        if resumed.steps and resumed.counts != whole.counts:
            wrong.append(f"{name}counts {resumed.counts} instead of {whole.counts}")
    return wrong


# What a run has beside shuffled batches and validation at each epoch's end, and when the signal comes.
CASES: dict[str, tuple[dict[str, Any], list[Moment]]] = {
    "accumulating": ({"accumulate_grad_batches": 2}, [("on_train_batch_start", 0), ("on_train_batch_start", 4)]),
    "validating often": ({"val_check_interval": 1}, [("on_validation_batch_start", 2)]),
    "plateau": (
        {"plateau": True},
        [("on_train_batch_start", 3), ("on_train_batch_start", 2), ("on_validation_batch_start", 0)],
    ),
    "workers": ({"loader": {"num_workers": 1, "multiprocessing_context": "fork"}}, [("on_train_batch_start", 4)]),
    "long validation": (
        {"val_check_interval": 2, "validated": 200},
        [("on_validation_batch_start", 3), ("on_validation_batch_start", 103)],
    ),
    "max_steps": ({"max_steps": 8, "max_epochs": -1}, [("on_train_batch_start", 2), ("on_train_batch_start", 6)]),
}


@pytest.mark.lowest
def test_a_run_that_stops_for_a_signal_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Whatever the moment, and whichever of the ranks got it: same step, saved, status 143, and then the same run."""
    wrong = run_ranks(stop_and_resume, 2, tmp_path, {"epochs": ({}, list(MOMENTS))}, env=by_hand_env(2), time_limit=120)
    assert wrong == [[], []]


def test_other_runs_do_so_too(tmp_path: Path) -> None:
    """With gradients that are accumulated, validation within the epoch, workers, and a last step."""
    assert run_ranks(stop_and_resume, 2, tmp_path, CASES, env=by_hand_env(2), time_limit=120) == [[], []]
