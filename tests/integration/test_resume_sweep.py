"""A resumed run equals one that never stopped, for generated combinations of data, stops and resumes.

``make test`` plays a pairwise cover, ``make nightly`` cases of a new seed (``SWEEP_SEED``, ``SWEEP_COUNT``).
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.harness.sweeps import chosen_cases, expect_nothing_wrong, greedy_cover, new_seed, play_cases
from tests.integration.continuing import Step
from tests.integration.sweeping import ENDING, FACTORS, INJECTED, SIGNALS, WITH_RANKS, Case, Half, Played, play_half

# Levels that the daily cover leaves to the nightly sweep: they take long, or do nearly what others do.
NIGHTLY = {"dict", "max_size", "max_size_cycle", "first", "validation", "3", "fresh", "shared"}
FAMILIES = {**dict.fromkeys(INJECTED, "injected"), **dict.fromkeys(WITH_RANKS, "shares out"), "sized": "stream"}
# What the nightly sweep found, and no pair of levels shows.
FOUND = (
    "stop=before ranks=1 workers=fresh epoch=1 generator=own injected=no",
    "sampler=sized loaders=list beside=shuffled ranks=1 workers=fresh optimizing=third generator=own injected=no",
)
REPEAT = "SWEEP='{}' .venv/bin/python -m pytest tests/integration/test_resume_sweep.py -k equals"


def drawn(chance: random.Random) -> Case | None:
    """Draw a case; ``None`` for one that cannot be played."""
    case = Case(**{factor: chance.choice(levels) for factor, levels in FACTORS.items()})
    return case if case.is_valid else None


def ranks_of(case: Case) -> str:
    return case.ranks if case.stays else "other"


def pairs_of(case: Case) -> set[frozenset[tuple[str, str]]]:
    """Return the pairs of levels that a case tries; on other ranks, where less is compared, only those with that level.

    Samplers of one family are the same to all factors but the ranks, which share out what they yield.
    """
    levels = {*{**vars(case), "ranks": ranks_of(case), "again": str(case.again != "no")}.items(), ("stop", case.again)}
    family = {*levels - {("sampler", case.sampler)}, ("sampler", FAMILIES.get(case.sampler, case.sampler))}
    pairs = {frozenset(pair) for pair in itertools.combinations(family - {("stop", "no")}, 2)}
    pairs.add(frozenset({("sampler", case.sampler), ("ranks", ranks_of(case))}))
    return pairs if case.stays else {pair for pair in pairs if ("ranks", "other") in pair}


@functools.cache
def pairwise_cover(seed: int = 0) -> list[Case]:
    """Return cases that together try each pair of levels of two factors, found greedily."""
    chance = random.Random(seed)
    cases = [case for _ in range(10_000) if (case := drawn(chance)) and not NIGHTLY & {*vars(case).values()}]
    # Torch waits for seconds for workers whose iterator is garbage, as those of a step that takes an iterator are.
    with_workers = [case for case in cases if len(case.kinds) * case.sizes[0] < 3 and case.again == "no"]
    pool = [case for case in cases if case.workers == "none" or (case in with_workers and case.step == "batch")]
    tried = {case: pairs_of(case) for case in pool}
    return greedy_cover(tried, lambda case: (case.epochs + (case.stop in ENDING) + 4) * (sum(case.sizes) + 2))


def played(halves: Sequence[Half], number: int, directory: Path) -> dict[Case, list[Played]]:
    """Return each rank's record of the first or second halves of cases."""
    found = play_cases(play_half, halves, lambda half: half[0].sizes[number], directory)
    return {case: [Played(each)] if isinstance(each, str) else each for (case, _), each in found.items()}


def play(cases: Iterable[Case], directory: Path) -> dict[Case, str]:
    """Run cases, many to a process; return the faults by case."""
    befores = played([(case, None) for case in cases], 0, directory)
    paths = {case: records[0].path for case, records in befores.items() if not case.stays}
    afters = played([(case, path) for case, path in paths.items() if path], 1, directory / "after")
    judged = {case: judge(case, befores[case], afters.get(case, [])) for case in befores}
    return {case: text for case, text in judged.items() if text}


def judge(case: Case, befores: list[Played], afters: list[Played]) -> str:
    """Describe the faults of a case; empty without any.

    On other ranks what is left of the epoch is shared out, or refused if only the ranks that saved it know what that
    is; later epochs are those of the new ranks.
    """
    for rank, played in [*enumerate(befores), *enumerate(afters)]:
        if played.wrong or (played.refused and played in befores):
            return f"rank {rank}: {played.wrong or played.refused}"
    if not afters:
        return ""
    epoch, done = divmod(len(befores[0].before), case.length(case.sizes[0]))
    can_share = all(map(case.can_share, case.kinds))
    if refused := [played.refused for played in afters if played.refused]:
        is_within = done or (case.stop in (*SIGNALS, "last") and case.ends_unannounced)
        is_right = is_within and not can_share and len(refused) == case.sizes[1] and "had ranks=" in refused[0]
        return "" if is_right else f"is refused: {refused}"
    if done and not can_share:
        return "is not refused, although the rest is unknown to other ranks"
    for played in afters:
        later, whole = (
            [step for step in steps if step[0] >= epoch + bool(done)] for steps in (played.after, played.whole)
        )
        is_same = later == whole if can_share else [step[:2] for step in later] == [step[:2] for step in whole]
        if not is_same:
            return f"reads {later} in later epochs instead of {whole}"
    return judge_rest(case, epoch, befores, afters) if done else ""


def judge_rest(case: Case, epoch: int, befores: list[Played], afters: list[Played]) -> str:
    """Describe the faults of an epoch's rest: it must have each sample of the loader that ends it."""
    number = int(case.loaders == "min_size")

    def count(steps: Iterable[Step]) -> Counter[int]:
        return Counter(sample for step in steps if step[0] == epoch for sample in step[2:] if sample // 100 == number)

    whole = count(step for played in befores for step in played.whole)
    read = count(step for played in befores for step in played.before)
    read += count(step for played in afters for step in played.after)
    allowed = case.sizes[1] - 1
    if case.kinds[number] == "dealt":  # pads by batches, and already on two ranks, which share nine of them
        whole, allowed = Counter(set(whole)), 2 * case.sizes[1]
    if whole - read or (read - whole).total() > allowed:
        return f"leaves out {sorted(whole - read)} and reads {sorted(read - whole)} twice"
    return "" if len({len(played.after) for played in afters}) == 1 else "ranks do other numbers of steps"


@pytest.mark.parametrize("ranks", ["1", "2", "other"])
def test_a_run_that_is_resumed_equals_one_that_is_not(ranks: str, tmp_path: Path) -> None:
    """For each pair of ways to read, to stop and to resume, batches and weights are the same, to the last bit."""
    cases = chosen_cases(Case.parse, [*map(Case.parse, FOUND), *pairwise_cover()])
    expect_nothing_wrong(
        play([case for case in cases if ("2" if ranks_of(case) == "3" else ranks_of(case)) == ranks], tmp_path), REPEAT
    )


@pytest.mark.nightly
@pytest.mark.timeout(0)  # SWEEP_COUNT says how long it takes
def test_runs_of_a_new_seed_do_so_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cases are drawn from all levels of all factors."""
    seed, count = new_seed(capsys, 60)
    chance = random.Random(seed)
    expect_nothing_wrong(
        play(itertools.islice(filter(None, (drawn(chance) for _ in itertools.count())), count), tmp_path), REPEAT
    )
