"""Share code among sweeps: choose few cases that cover much, draw a seed, run cases,
and report failures.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.harness.outcomes import stories
from tests.harness.ranks import by_hand_env, launch_ranks

C = TypeVar("C")


def greedy_cover(tried: Mapping[C, set[Any]], cost: Callable[[C], float]) -> list[C]:
    """Choose cases that together try everything; in each round, the one that tries most
    for its cost.
    """
    chosen = list[C]()
    missing = set[Any]().union(*tried.values())
    while missing:
        chosen.append(max(tried, key=lambda case: len(tried[case] & missing) / cost(case)))
        missing -= tried[chosen[-1]]
    return chosen


def chosen_cases(parse: Callable[[str], C], cover: Sequence[C]) -> Sequence[C]:
    """Return the cases in the variable ``SWEEP``, separated by semicolons, or else the
    cover.
    """
    given = os.environ.get("SWEEP")
    return [parse(text) for text in given.split(";")] if given else cover


def play_cases(
    play: Callable[[C, int, int, Path], Any],
    cases: Sequence[C],
    ranks_of: Callable[[C], int],
    directory: Path,
) -> dict[C, list[Any] | str]:
    """Run cases one after another by ``play(case, rank, ranks, place)``; cases of one
    world size share their ranks.

    Return the results of each rank, by case. If a case ends its processes, it gets the
    story of their ends instead, and the cases after it still run.
    """
    found: dict[C, list[Any] | str] = {}
    for ranks in sorted({*map(ranks_of, cases)}):
        chosen = [case for case in cases if ranks_of(case) == ranks]
        found.update(zip(chosen, _play_on_same_ranks(play, chosen, ranks, directory), strict=True))
    return found


def _play_on_same_ranks(
    play: Callable[[C, int, int, Path], Any], cases: Sequence[C], ranks: int, directory: Path
) -> list[list[Any] | str]:
    found: list[list[Any] | str] = []
    while len(found) < len(cases):
        place = directory / f"{ranks}-{len(found)}"
        left = cases[len(found) :]
        place.mkdir(parents=True)
        try:
            env = by_hand_env(ranks)
            limit = 60.0 + 60.0 * len(left)
            story = stories(
                launch_ranks(_play_each, ranks, play, left, place, env=env, time_limit=limit)
            )
        except AssertionError as error:  # at the time limit
            story = str(error)
        for number in range(len(left)):
            files = [place / str(number) / f"{rank}.played" for rank in range(ranks)]
            if not all(path.exists() for path in files):
                found.append(f"ends its processes:\n{story}")
                break
            found.append([pickle.loads(path.read_bytes()) for path in files])
    return found


def _play_each(
    rank: int,
    ranks: int,
    play: Callable[[C, int, int, Path], Any],
    cases: Sequence[C],
    directory: Path,
) -> None:
    """Write each result to a file, because a later case may end this process."""
    for number, case in enumerate(cases):
        place = directory / str(number)
        place.mkdir(exist_ok=True)
        (place / f"{rank}.played").write_bytes(pickle.dumps(play(case, rank, ranks, place)))


def new_seed(capsys: pytest.CaptureFixture[str], count: int) -> tuple[int, int]:
    """Print and return the seed and the number of cases: ``SWEEP_SEED`` and
    ``SWEEP_COUNT``, else new and ``count``.
    """
    seed = int(os.environ.get("SWEEP_SEED", time.time_ns() // 10**6))
    count = int(os.environ.get("SWEEP_COUNT", count))
    with capsys.disabled():
        print(f"\nSWEEP_SEED={seed} SWEEP_COUNT={count}")
    return seed, count


def expect_nothing_wrong(wrong: Mapping[Any, str], repeat: str) -> None:
    """Fail with the faults of each case, and the command that repeats it."""
    texts = [f"{repeat.format(case)}\n    {text}" for case, text in wrong.items()]
    assert not texts, f"{len(texts)} cases:\n" + "\n".join(texts)
