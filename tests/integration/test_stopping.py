"""A signal to any rank: all stop after the same step, saved, and what is resumed goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import by_hand_env, run_ranks
from tests.integration.continuing import Training, difference
from tests.integration.stopping import LongValidated, Validated, shuffled, signalled

Moment = tuple[str, int]  # a hook of a callback, and how often it has been called before

# When the signal comes, and after how many steps all have stopped, or one later where the other rank was past that: in
# 2 epochs of 3 steps, each followed by 2 of validation.
MOMENTS: dict[Moment, int] = {
    ("on_train_batch_start", 0): 1,
    ("on_train_batch_start", 1): 2,
    ("on_train_batch_end", 2): 3,
    ("on_validation_batch_start", 1): 3,
    ("on_train_epoch_end", 0): 3,
    ("on_train_end", 0): 6,
}
# What a run has beside shuffled batches and validation at each epoch's end, and when the signal comes.
Case = tuple[dict[str, Any], list[Moment]]
CASES: dict[str, Case] = {
    "accumulating": ({"accumulate_grad_batches": 2}, [("on_train_batch_start", 0), ("on_train_batch_start", 4)]),
    "long validation": ({"kind": LongValidated}, [("on_validation_batch_start", 63)]),
}


def stop_and_resume(rank: int, world_size: int, directory: Path, cases: dict[str, Case]) -> list[str]:
    """What differs from runs that were not stopped, by the moment of the signal, to one rank and the other by turns."""
    wrong = []
    for case, (options, moments) in cases.items():
        chosen = {"max_epochs": 2, "limit_val_batches": 1.0, "kind": Validated, **options}
        training = Training(shuffled(), directory, options=chosen)
        whole = training.run()
        for number, moment in enumerate(moments):
            place = directory / f"{case} {moment}"
            callbacks = [signalled(*moment)] if rank == number % world_size else []
            stopped = training.run(callbacks=callbacks, default_root_dir=place)
            done = len(stopped.steps)
            resumed = training.run(ckpt_path=str(place / "preempted.ckpt"))
            validations = [[what for what, *_ in run.events].count("result") for run in (stopped, resumed)]
            seen = {
                "status": stopped.status == 143,
                "files": [path.name for path in place.glob("*.ckpt")] == ["preempted.ckpt"],
                "moment": case != "epochs" or done - MOMENTS[moment] in (0, 1),
                "validates again where it was stopped": case != "long validation" or validations == [1, 1],
                "steps before": stopped.steps == whole.steps[:done],
            }
            wrong += [f"{place.name}: {what}, {stopped}" for what, is_right in seen.items() if not is_right]
            wrong += [f"{place.name}: {text}" for text in [difference(training, whole, done, resumed)] if text]
    return wrong


EPOCHS: dict[str, Case] = {"epochs": ({}, list(MOMENTS))}


@pytest.mark.parametrize("cases", [pytest.param(EPOCHS, marks=pytest.mark.lowest), CASES], ids=["epochs", "others"])
def test_a_run_that_stops_for_a_signal_goes_on_as_if_nothing_had_been(cases: dict[str, Case], tmp_path: Path) -> None:
    """Whatever the moment, and whichever of the ranks got it: same step, saved, status 143, and then the same run."""
    assert run_ranks(stop_and_resume, 2, tmp_path, cases, env=by_hand_env(2)) == [[], []]
