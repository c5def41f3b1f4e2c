"""A signal in any hook, beside any callback, and the same command again: as if there had been none.

``make test`` plays a cover, ``make nightly`` cases of a new seed (``SWEEP_SEED``, ``SWEEP_COUNT``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.harness.sweeps import chosen_cases, expect_nothing_wrong, greedy_cover, new_seed, play_cases
from tests.integration.stop_sweeping import EVALUATIONS, HOOKS, KINDS, SIGNALS, Case, play

# Cases that fail, with which others of the same cause are left out.
KNOWN: dict[str, Callable[[Case], bool]] = {
    # Lightning's callback saves weights that are pruned for good, and prunes those of a resumed run anew.
    "hook=module.on_train_batch_end kind=pruning earlier=3 ranks=1": lambda case: case.kind == "pruning",
    # Lightning's callback makes its scheduler when an epoch starts, and so not in one that is resumed in its middle.
    "hook=module.on_train_batch_end kind=swa earlier=3 ranks=1": lambda case: case.kind == "swa",
    # Lightning's callback unfreezes the backbone when an epoch starts, and so not in one that is resumed in its middle.
    "hook=callback.on_train_batch_start kind=finetuning earlier=3 ranks=1": lambda case: case.kind == "finetuning",
    # Lightning's callback sets the accumulation when an epoch starts, and so not in one that is resumed in its middle.
    "hook=module.on_train_batch_end kind=accumulation earlier=4 ranks=1": lambda case: case.kind == "accumulation",
}
# Callbacks that the daily cover leaves to the nightly sweep: they do nearly what others do.
NIGHTLY = ("saves", "save_steps", "average", "summary", "lambda", "rich", "devices", "lr_monitor")
REPEAT = "SWEEP='{}' .venv/bin/python -m pytest tests/integration/test_stop_sweep.py -k stopped"


def drawn(chance: random.Random) -> Case:
    """Draw a case that can be played and is not known to fail."""
    while True:
        function = chance.choice(("fit",) * 9 + EVALUATIONS)
        case = Case(
            chance.choice(HOOKS),
            chance.choice([*KINDS]),
            chance.choice(SIGNALS),
            chance.choice((1, 2)),
            chance.choice((0, 0, 1, 3, 8)),
            function,
        )
        if case.is_played and not any(may_fail(case) for may_fail in KNOWN.values()):
            return case


def cover(seed: int = 0) -> list[Case]:
    """Return cases that try each hook, and each callback, signal and number of ranks in each phase, found greedily.

    A module's hook and that of a callback count as one, and so do those of the three evaluations.
    """
    chance = random.Random(seed)

    def tried_by(case: Case) -> set[tuple[object, ...]]:
        levels = ("kind", case.kind), ("signal", case.signal), ("ranks", case.ranks)
        is_fit, name = case.function == "fit", case.hook.partition(".")[2]
        return {(is_fit, name), (case.function, case.phase), *((is_fit, case.phase, *level) for level in levels)}

    cases = [case for _ in range(4000) if (case := drawn(chance)).kind not in NIGHTLY]
    tried = {case: tried_by(case) for case in cases}
    return greedy_cover(tried, lambda case: case.ranks)


def play_all(cases: Sequence[Case], directory: Path) -> dict[Case, str]:
    """Play cases; by case, what is wrong."""
    played = play_cases(play, cases, lambda case: case.ranks, directory)
    found = {case: texts if isinstance(texts, str) else max(texts, key=len) for case, texts in played.items()}
    return {case: text for case, text in found.items() if text}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stopped_run_continues_as_if_uninterrupted(ranks: int, tmp_path: Path) -> None:
    """Steps, validations and weights are the same, and no rank waits for another one in vain."""
    cases = [case for case in chosen_cases(Case.parse, cover()) if case.ranks == ranks]
    expect_nothing_wrong(play_all(cases, tmp_path), REPEAT)


@pytest.mark.nightly
@pytest.mark.timeout(0)  # SWEEP_COUNT says how long it takes
def test_cases_of_a_new_seed_do_so_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cases are drawn from all hooks, callbacks and signals."""
    seed, count = new_seed(capsys, 300)
    chance = random.Random(seed)
    expect_nothing_wrong(play_all([drawn(chance) for _ in range(count)], tmp_path), REPEAT)
