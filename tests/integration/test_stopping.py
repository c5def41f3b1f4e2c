"""A signal to any rank: all stop after the same step, saved, and what is resumed goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import by_hand_env, run_ranks
from tests.harness.training import make_strategy
from tests.integration.stopping import fit, shuffled, signalled

Moment = tuple[str, int]  # a hook of a callback, and how often it has been called before

# When the signal comes, and after how many steps all have stopped, or one later where the other rank was past that: in
# 3 epochs of 3 steps, each followed by 2 of validation.
MOMENTS: dict[Moment, int] = {
    ("on_train_batch_start", 0): 1,
    ("on_train_batch_start", 1): 2,
    ("on_train_batch_end", 2): 3,
    ("on_validation_batch_start", 1): 3,
    ("on_train_batch_start", 8): 9,
    ("on_train_epoch_end", 2): 9,
    ("on_train_end", 0): 9,
}
# What a run has beside shuffled batches and validation at each epoch's end, and when the signal comes.
Case = tuple[dict[str, Any], list[Moment]]
CASES: dict[str, Case] = {
    "accumulating": ({"accumulate_grad_batches": 2}, [("on_train_batch_start", 0), ("on_train_batch_start", 4)]),
    "validating often": ({"val_check_interval": 1}, [("on_validation_batch_start", 2)]),
    "plateau": ({"plateau": True}, [("on_train_batch_start", 2)]),
    "workers": ({"loader": {"num_workers": 1, "multiprocessing_context": "fork"}}, [("on_train_batch_start", 4)]),
    "long validation": (
        {"val_check_interval": 2, "validated": 200},
        [("on_validation_batch_start", 3), ("on_validation_batch_start", 103)],
    ),
    "max_steps": ({"max_steps": 8, "max_epochs": -1}, [("on_train_batch_start", 6)]),
}


def stop_and_resume(rank: int, world_size: int, directory: Path, cases: dict[str, Case]) -> list[str]:
    """What differs from runs that were not stopped, by the moment of the signal, to one rank and the other by turns."""
    wrong = []
    for case, (options, moments) in cases.items():
        settings = {"max_epochs": 3, **options}
        loaders = shuffled(**settings.pop("loader", {}))
        whole = fit(make_strategy("ours", directory), directory / case, loaders, **settings)
        for number, moment in enumerate(moments):
            place = directory / f"{case} {moment}"
            callbacks = [signalled(*moment)] if rank == number % world_size else []
            stopped = fit(make_strategy("ours", directory), place, loaders, callbacks=callbacks, **settings)
            path = str(place / "preempted.ckpt")
            resumed = fit(make_strategy("ours", directory), place, loaders, ckpt_path=path, **settings)
            done = len(stopped.steps)
            done -= done % 3 % options.get("accumulate_grad_batches", 1)  # those without a step are done again
            seen = {
                "status and files": (stopped.status, stopped.files) == (143, ["preempted.ckpt"]),
                "moment": case != "epochs" or len(stopped.steps) - MOMENTS[moment] in (0, 1),
                "stopped in validation": "validated" not in options or stopped.validated % 100 != 0,
                "results": resumed.results == whole.results[len(whole.results) - len(resumed.results) :],
                "steps": stopped.steps[:done] + resumed.steps == whole.steps,
                "weights": torch.equal(resumed.weights, whole.weights),
                "counts": not resumed.steps or resumed.counts == whole.counts,
            }
            wrong += [f"{place.name}: {what}, {stopped}, {resumed}" for what, right in seen.items() if not right]
    return wrong


@pytest.mark.lowest
def test_a_run_that_stops_for_a_signal_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Whatever the moment, and whichever of the ranks got it: same step, saved, status 143, and then the same run."""
    wrong = run_ranks(stop_and_resume, 2, tmp_path, {"epochs": ({}, list(MOMENTS))}, env=by_hand_env(2), time_limit=120)
    assert wrong == [[], []]


def test_other_runs_do_so_too(tmp_path: Path) -> None:
    """With gradients that are accumulated, validation within the epoch, workers, and a last step."""
    assert run_ranks(stop_and_resume, 2, tmp_path, CASES, env=by_hand_env(2), time_limit=120) == [[], []]
