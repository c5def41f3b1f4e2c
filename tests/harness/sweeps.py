"""What sweeps of generated cases share: choose cases, play them on ranks, and report
those that went wrong. Each sweep generates and judges its cases itself.
"""

import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.harness.ranks import by_hand_env, launch_ranks, stories

C = TypeVar("C")  # a case
# ``play(case, rank, ranks, place)``: on one of some ranks, in a directory for this case.
Play = Callable[[C, int, int, Path], Any]

# Choose cases.


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


def new_seed(capsys: pytest.CaptureFixture[str], count: int) -> tuple[int, int]:
    """Print and return the seed and the number of cases: ``SWEEP_SEED`` and
    ``SWEEP_COUNT``, else new and ``count``.
    """
    seed = int(os.environ.get("SWEEP_SEED", time.time_ns() // 10**6))
    count = int(os.environ.get("SWEEP_COUNT", count))
    with capsys.disabled():
        print(f"\nSWEEP_SEED={seed} SWEEP_COUNT={count}")
    return seed, count


# Play cases on ranks.


def play_cases(
    play: Play[C],
    cases: Sequence[C],
    ranks_of: Callable[[C], int],
    directory: Path,
) -> dict[C, list[Any] | str]:
    """Play cases one after another; cases of one world size share their ranks.

    Return the results of each rank, by case. A case that ends its processes gets the
    story of their ends instead, and the cases after it with as many ranks are not played.
    """
    results: dict[C, list[Any] | str] = {}
    for ranks in sorted({*map(ranks_of, cases)}):
        played = [case for case in cases if ranks_of(case) == ranks]
        shared = directory / str(ranks)
        shared.mkdir(parents=True)
        story = _play_on_ranks(play, played, ranks, shared)
        results |= _results_in(shared, played, ranks, story)
    return results


def _play_on_ranks(play: Play[C], cases: Sequence[C], ranks: int, directory: Path) -> str:
    """Play cases until one ends its processes; return how the ranks ended."""
    options = {"env": by_hand_env(ranks), "time_limit": 60.0 + 60.0 * len(cases)}
    try:
        return stories(launch_ranks(_play_on_rank, ranks, play, cases, directory, **options))
    except AssertionError as error:  # at the time limit
        return str(error)


def _play_on_rank(
    rank: int,
    ranks: int,
    play: Play[C],
    cases: Sequence[C],
    directory: Path,
) -> None:
    """Write each result to a file, because a later case may end this process."""
    for number, case in enumerate(cases):
        place = directory / str(number)
        place.mkdir(exist_ok=True)
        result = play(case, rank, ranks, place)
        (place / f"{rank}.played").write_bytes(pickle.dumps(result))


def _results_in(
    directory: Path, cases: Sequence[C], ranks: int, story: str
) -> dict[C, list[Any] | str]:
    """Return the results in the files of these cases; ``story`` is how the ranks ended."""
    results: dict[C, list[Any] | str] = {}
    for number, case in enumerate(cases):
        files = [directory / str(number) / f"{rank}.played" for rank in range(ranks)]
        if not all(path.exists() for path in files):
            later = dict.fromkeys(cases[number + 1 :], f"was not played after {case}")
            return {**results, case: f"ends its processes:\n{story}", **later}
        results[case] = [pickle.loads(path.read_bytes()) for path in files]
    return results


# Report.


def expect_nothing_wrong(wrong: Mapping[Any, str], repeat: str) -> None:
    """Fail with the faults of each case, and the command that repeats it."""
    texts = [f"{repeat.format(case)}\n    {text}" for case, text in wrong.items()]
    assert not texts, f"{len(texts)} cases:\n" + "\n".join(texts)
