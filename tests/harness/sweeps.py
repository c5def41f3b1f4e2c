"""What sweeps have in common: a cover of few cases, a seed that is new each time, and how a failing case is told."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pytest

C = TypeVar("C")


def greedy_cover(tried: Mapping[C, set[Any]], cost: Callable[[C], float]) -> list[C]:
    """Choose cases that together try all that any of them tries, each time what tries most for its cost."""
    chosen, missing = list[C](), set[Any]().union(*tried.values())
    while missing:
        chosen.append(max(tried, key=lambda case: len(tried[case] & missing) / cost(case)))
        missing -= tried[chosen[-1]]
    return chosen


def new_seed(capsys: pytest.CaptureFixture[str], count: int) -> tuple[int, int]:
    """Print and return the seed and the number of cases: ``SWEEP_SEED`` and ``SWEEP_COUNT``, else new and ``count``."""
    seed, count = int(os.environ.get("SWEEP_SEED", time.time_ns() // 10**6)), int(os.environ.get("SWEEP_COUNT", count))
    with capsys.disabled():
        print(f"\nSWEEP_SEED={seed} SWEEP_COUNT={count}")
    return seed, count


def expect_nothing_wrong(wrong: Mapping[Any, str], repeat: str) -> None:
    """Fail with what is wrong by case, and with the command that repeats it."""
    texts = [f"{repeat.format(case)}\n    {text}" for case, text in wrong.items()]
    assert not texts, f"{len(texts)} cases:\n" + "\n".join(texts)
