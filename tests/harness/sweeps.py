"""Play the cases of a sweep: choose few that cover much, draw a seed, run them on shared
ranks, and report failures.
"""

import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from tests.harness.ranks import by_hand_env, launch_ranks, stories

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
    results: dict[C, list[Any] | str] = {}
    for ranks in sorted({*map(ranks_of, cases)}):
        left = [case for case in cases if ranks_of(case) == ranks]
        while left:
            played = _play_on_same_ranks(play, left, ranks, directory / f"{ranks}-{len(left)}")
            finished = len(played.results)
            results.update(zip(left, played.results, strict=False))
            if finished < len(left):
                results[left[finished]] = f"ends its processes:\n{played.story}"
            left = left[finished + 1 :]
    return results


class _Played(NamedTuple):
    """The results of each rank for the cases that all ranks finished, and how the ranks
    ended.
    """

    results: list[list[Any]]
    story: str


def _play_on_same_ranks(
    play: Callable[[C, int, int, Path], Any], cases: Sequence[C], ranks: int, directory: Path
) -> _Played:
    directory.mkdir(parents=True)
    env = by_hand_env(ranks)
    time_limit = 60.0 + 60.0 * len(cases)
    try:
        outcomes = launch_ranks(
            _play_on_rank, ranks, play, cases, directory, env=env, time_limit=time_limit
        )
        story = stories(outcomes)
    except AssertionError as error:  # at the time limit
        story = str(error)
    results = []
    for number in range(len(cases)):
        files = [directory / str(number) / f"{rank}.played" for rank in range(ranks)]
        if not all(path.exists() for path in files):
            break
        results.append([pickle.loads(path.read_bytes()) for path in files])
    return _Played(results, story)


def _play_on_rank(
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
        result = play(case, rank, ranks, place)
        (place / f"{rank}.played").write_bytes(pickle.dumps(result))


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
