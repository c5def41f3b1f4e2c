"""Only ranks that certainly cannot continue are in a deadlock."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_ddp_ext.rendezvous.named_barrier import Call
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.deadlock import deadlock_in
from lightning_ddp_ext.supervision.flight_recorder import GroupProgress
from lightning_ddp_ext.supervision.report import Report

DEFAULT = ""  # the label of the default group


def report(rank: int, *groups: GroupProgress, **values: Any) -> Report:
    who = RankInfo(rank, f"host{rank}", 100 + rank, "network")
    return Report(who, place="train.py:5", groups=list(groups), **values)


def in_collective(rank: int, number: int, group: str = DEFAULT, **values: Any) -> Report:
    """Return the report of a rank that waits in a collective."""
    progress = GroupProgress(group, group, number, pending=number, members=[0, 1, 2])
    return report(rank, progress, is_in_collective=True, **values)


def in_barrier(rank: int, call: int, *, after_collective: int) -> Report:
    """Return the report of a rank that waits in a named barrier."""
    awaited = Call(rank, call, 0, "saving", "saving", "train.py:7")
    progress = GroupProgress(DEFAULT, DEFAULT, after_collective)
    return report(rank, progress, calls_made=call, awaited=awaited)


def computing(rank: int, *, after_collective: int) -> Report:
    return report(rank, GroupProgress(DEFAULT, DEFAULT, after_collective))


@pytest.mark.parametrize(
    ("reports", "ranks_in_deadlock"),
    [
        pytest.param(
            [in_collective(0, 5), in_barrier(1, 3, after_collective=4), in_collective(2, 5)],
            {0, 1, 2},
            id="a collective and a barrier",
        ),
        pytest.param(
            [in_collective(0, 1, "a"), in_collective(1, 1, "b"), in_collective(2, 1, "c")],
            {0, 1, 2},
            id="a circle of three groups",
        ),
        pytest.param(
            [in_collective(0, 5), computing(1, after_collective=4)], set(), id="one computes"
        ),
        pytest.param(
            [
                in_collective(0, 5),
                in_barrier(1, 1, after_collective=4),
                computing(2, after_collective=4),
            ],
            {0, 1},
            id="one computes, others wait for each other",
        ),
        pytest.param(
            [in_collective(0, 5), in_collective(1, 5)], set(), id="all are in the same call"
        ),
    ],
)
def test_ranks_in_a_deadlock(reports: list[Report], ranks_in_deadlock: set[int]) -> None:
    """A rank is in a deadlock if none of the ranks that it waits for can continue."""
    deadlock = deadlock_in(reports)
    calls = {} if deadlock is None else deadlock.calls
    assert {who.rank for who in calls} == ranks_in_deadlock


FIRST = [in_collective(0, 5), in_barrier(1, 1, after_collective=4)]


@pytest.mark.parametrize(
    ("later", "persists"),
    [
        pytest.param(FIRST, True, id="unchanged"),
        pytest.param([in_collective(0, 5), in_collective(1, 5)], False, id="resolved"),
        pytest.param([in_collective(0, 6), FIRST[1]], False, id="in another call"),
        pytest.param([replace(FIRST[0], cpu_seconds=0.5), FIRST[1]], False, id="has computed"),
    ],
)
def test_a_deadlock_must_persist(later: list[Report], persists: bool) -> None:
    """A deadlock is certain if a second survey finds the same calls and no computation."""
    deadlock = deadlock_in(FIRST)
    assert deadlock is not None
    assert deadlock.persists_in(deadlock_in(later)) == persists
