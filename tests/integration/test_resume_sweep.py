"""Resume anywhere equals never stopped: generated runs, stops and resumes, whatever is read and however.

``make test`` plays a pairwise cover of all factors, ``make nightly`` cases of a new seed, which ``SWEEP_SEED`` and
``SWEEP_COUNT`` choose. A failure prints the line that plays its case again.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.harness.outcomes import stories
from tests.harness.ranks import by_hand_env, launch_ranks
from tests.integration.continuing import Step
from tests.integration.sweeping import FACTORS, Case, Half, Played, play_all

# By what is wrong, the levels that fail together. Such cases are left out; a nightly test tells when one is mended.
KNOWN: dict[str, dict[str, str]] = {}
Level = tuple[str, str]
# Levels that the daily cover leaves to the nightly sweep, as others do nearly the same.
NIGHTLY = {"dict", "max_size_cycle", "first", "3", "fresh"}
REPEAT = "SWEEP='{}' .venv/bin/python -m pytest tests/integration/test_resume_sweep.py"


# Which cases.


def drawn(chance: random.Random, **fixed: str) -> Case | None:
    """A case with these levels; ``None`` if none is found that can be played and is not known to fail."""
    for _ in range(50):
        case = Case(**{**{factor: chance.choice(levels) for factor, levels in FACTORS.items()}, **fixed})
        if case.is_valid and not any(known.items() <= vars(case).items() for known in KNOWN.values()):
            return case
    return None


def levels_of(case: Case) -> set[Level]:
    """What a case tries; where it stops for the second time counts as where it stops."""
    others = {"ranks": case.ranks if case.before == case.after else "other", "again": str(case.again != "no")}
    return {*({**vars(case), **others}.items()), *([] if case.again == "no" else [("stop", case.again)])}


def pairs_of(case: Case) -> set[frozenset[Level]]:
    """The pairs of levels that a case tries; on other ranks, where less is compared, only those of that level."""
    pairs = {frozenset(pair) for pair in itertools.combinations(levels_of(case), 2)}
    return pairs if case.before == case.after else {pair for pair in pairs if ("ranks", "other") in pair}


def cost_of(case: Case) -> float:
    """About how long a case takes; most of that is starting workers, for each iterator unless they are kept."""
    started = {"none": 0.0, "kept": 1.5, "fresh": 1.5 * case.epochs}[case.workers] * len(case.kinds)
    return max(1.5, case.before, case.after) * (2 + (case.again != "no")) * (1 + started)


@functools.cache
def pairwise_cover(seed: int = 0) -> list[Case]:
    """Cases that together try each pair of levels of two factors, found greedily."""
    chance = random.Random(seed)
    pool = [case for _ in range(10000) if (case := drawn(chance)) and not NIGHTLY & {*vars(case).values()}]
    tried = {case: pairs_of(case) for case in pool}
    chosen, missing = [], set().union(*tried.values())
    while missing:
        best = max(tried, key=lambda case: len(tried[case] & missing) / cost_of(case) ** 0.5)
        missing -= tried[best]
        chosen.append(best)
    return chosen


def cases() -> list[Case]:
    given = os.environ.get("SWEEP")
    return [Case.parse(text) for text in given.split(";")] if given else pairwise_cover()


# Playing them.


def play_halves(halves: Sequence[Half], ranks: int, directory: Path) -> list[list[Played]]:
    """What each rank has seen of each half of a case. One that ends its processes does not keep others from playing."""
    found: list[list[Played]] = []
    while len(found) < len(halves):
        first = len(found)
        place = directory / f"{ranks}-{first}"
        place.mkdir(parents=True)
        try:
            limit = 30.0 + 5.0 * (len(halves) - first)
            arguments = (place, halves[first:])
            story = stories(launch_ranks(play_all, ranks, *arguments, env=by_hand_env(ranks), time_limit=limit))
        except AssertionError as error:  # the time limit
            story = str(error)
        for number in range(len(halves) - first):
            files = [place / str(number) / f"{rank}.played" for rank in range(ranks)]
            if not all(path.exists() for path in files):
                found.append([Played(wrong=f"ends its processes:\n{story}")])
                break
            found.append([pickle.loads(path.read_bytes()) for path in files])
    return found


def play(chosen: Iterable[Case], directory: Path) -> dict[Case, str]:
    """Play cases, many to a process; by case, what is wrong."""
    remaining = list(dict.fromkeys(chosen))
    by_case: dict[Case, list[list[Played]]] = {case: [] for case in remaining}
    for part in ("before", "after"):
        for ranks in (1, 2, 3):
            halves: list[Half] = [
                (case, by_case[case][0][0].path if part == "after" else None)
                for case in remaining
                if getattr(case, part) == ranks and (part == "before" or is_to_be_resumed(case, by_case[case][0]))
            ]
            for (case, _), played in zip(halves, play_halves(halves, ranks, directory / part), strict=True):
                by_case[case].append(played)
    return {case: text for case, halves in by_case.items() if (text := judge(case, *halves))}


def is_to_be_resumed(case: Case, befores: list[Played]) -> bool:
    return case.before != case.after and not any(played.wrong or played.refused for played in befores)


def judge(case: Case, befores: list[Played], afters: list[Played] | None = None) -> str:
    """What is wrong with a case; empty: nothing."""
    for half in (befores, afters or []):
        texts = [f"rank {rank} {played.wrong}" for rank, played in enumerate(half) if played.wrong]
        if texts:
            return "; ".join(texts)
    if any(played.refused for played in befores):
        return f"is refused on the same ranks: {befores[0].refused}"
    return "" if afters is None else judge_others(case, befores, afters)


def judge_others(case: Case, befores: list[Played], afters: list[Played]) -> str:
    """What is wrong with a resume on another number of ranks.

    What was left of the epoch is shared out, or refused where each rank's loader decides by itself what it reads. The
    next epochs are those of the ranks that there are then.
    """
    epoch, done = divmod(len(befores[0].before), case.length(case.before))
    can_share = all(map(case.is_shared, case.kinds))
    if any(played.refused for played in afters):
        is_right = done and not can_share and all("had ranks=" in played.refused for played in afters)
        return "" if is_right else f"is refused: {afters[0].refused}"
    if done and not can_share:
        return "is not refused, although only the ranks that saved know what is left"
    for played in afters:
        later, whole = (
            [step for step in steps if step[0] >= epoch + bool(done)] for steps in (played.after, played.whole)
        )
        if not can_share:  # their order may be drawn
            later, whole = ([step[:2] for step in steps] for steps in (later, whole))
        if later != whole:
            return f"reads {later} in later epochs instead of {whole}"
    return judge_rest(case, epoch, befores, afters) if done else ""


def judge_rest(case: Case, epoch: int, befores: list[Played], afters: list[Played]) -> str:
    """What is wrong with the rest of an epoch: each sample of the loader that ends it is read, beside some padding."""
    deciding = 1 if case.loaders == "min_size" else 0
    kind = case.kinds[deciding]

    def of_epoch(steps: Iterable[Step]) -> Counter[int]:
        return Counter(sample for step in steps if step[0] == epoch for sample in step[2:] if sample // 100 == deciding)

    whole = sum((of_epoch(played.whole) for played in befores), Counter[int]())
    read = sum((of_epoch([*played.before]) for played in befores), Counter[int]())
    read += sum((of_epoch(played.after) for played in afters), Counter[int]())
    if kind == "dealt":  # on two ranks one of nine batches is read twice
        whole = Counter(set(whole))
    missing, twice = whole - read, read - whole
    allowed = (case.after - 1) * (2 if kind == "dealt" else 1) + (2 if kind == "dealt" else 0)
    if missing or sum(twice.values()) > allowed:
        return f"leaves out {sorted(missing)} and reads {sorted(twice)} twice"
    return "" if len({len(played.after) for played in afters}) == 1 else "has ranks with other numbers of steps"


def expect_nothing_wrong(wrong: dict[Case, str]) -> None:
    texts = [f"{REPEAT.format(case)}\n    {text}" for case, text in wrong.items()]
    assert not texts, f"{len(texts)} cases:\n" + "\n".join(texts)


@pytest.mark.parametrize("ranks", ["1", "2", "3", "other"])
def test_a_run_that_is_resumed_equals_one_that_is_not(ranks: str, tmp_path: Path) -> None:
    """Each pair of ways to read, to stop and to go on: same batches, same weights to the last bit."""
    chosen = [case for case in cases() if (case.ranks if case.before == case.after else "other") == ranks]
    expect_nothing_wrong(play(chosen, tmp_path))


@pytest.mark.nightly
def test_runs_of_a_new_seed_do_so_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Drawn from all levels of all factors."""
    seed, count = int(os.environ.get("SWEEP_SEED", time.time_ns() // 10**6)), int(os.environ.get("SWEEP_COUNT", 60))
    with capsys.disabled():
        print(f"\nSWEEP_SEED={seed} SWEEP_COUNT={count}")
    chance = random.Random(seed)
    expect_nothing_wrong(play((case for _ in range(count) if (case := drawn(chance))), tmp_path))


@pytest.mark.nightly
@pytest.mark.parametrize("why", KNOWN)
def test_what_is_known_to_fail_still_does(why: str, tmp_path: Path) -> None:
    """Else its line of ``KNOWN`` has to go."""
    assert play([Case(**KNOWN[why])], tmp_path)
