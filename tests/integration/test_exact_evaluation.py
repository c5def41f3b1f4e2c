"""Metrics of an evaluation on several ranks are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.evaluating import Case, Measured, Values, cases, loaders_of, measured, trainer_on
from tests.ranks import by_hand_env, run_ranks

WORLD_SIZES = (2, 3, 4, 5)
CASES = {world_size: cases(world_size) for world_size in WORLD_SIZES}


def evaluate(rank: int, world_size: int, directory: Path, numbers: list[Case], run: str = "validate") -> Values:
    """The values of an evaluation of loaders of these numbers, one after another."""
    trainer = trainer_on(rank, world_size, directory)
    model = Measured(len(numbers), all_kinds=3)
    getattr(trainer, run)(model, loaders_of(numbers), verbose=False)
    return measured(trainer, model)


def evaluate_all(rank: int, world_size: int, directory: Path) -> dict[int, Values]:
    return {ranks: evaluate(rank, world_size, directory, numbers) for ranks, numbers in CASES.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Values]:
    """What one process finds."""
    found: dict[int, Values] = run_ranks(evaluate_all, 1, tmp_path_factory.mktemp("alone"), env=by_hand_env(1))[0]
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_metrics_equal_those_of_one_process(world_size: int, alone: dict[int, Values], tmp_path: Path) -> None:
    """Every metric of every loader equals one process's on every rank, and each sample was counted once."""
    numbers = CASES[world_size]
    found = run_ranks(evaluate, world_size, tmp_path, numbers, env=by_hand_env(world_size))
    for values in found:
        assert_equal(values, alone[world_size])
    assert found[0]["seen"] == [list(range(samples)) for samples, _ in numbers]


def assert_equal(mine: Values, expected: Values) -> None:
    mine, expected = dict(mine), dict(expected)
    assert mine.pop("seen") == expected.pop("seen")
    assert mine == pytest.approx(expected, rel=1e-6, abs=1e-6)
