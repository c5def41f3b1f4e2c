"""Only ranks that certainly cannot continue are in a deadlock."""

import re
from dataclasses import replace
from typing import Any

import pytest

from lightning_ddp_ext.rendezvous.named_barrier import Call
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.flight_recorder import GroupProgress
from lightning_ddp_ext.supervision.status import Status, deadlock_in

DEFAULT = ""  # the label of the default group


def status(rank: int, *groups: GroupProgress, **values: Any) -> Status:
    who = RankInfo(rank, f"host{rank}", 100 + rank, "network")
    values = {"place": "train.py:5", "is_settled": True, **values}
    return Status(who, groups=list(groups), **values)


def in_collective(rank: int, number: int, group: str = DEFAULT, **values: Any) -> Status:
    """Return the status of a rank that waits in a collective."""
    progress = GroupProgress(group, group, number, pending=number, members=[0, 1, 2])
    return status(rank, progress, is_in_collective=True, **values)


def in_barrier(rank: int, call: int, *, after_collective: int) -> Status:
    """Return the status of a rank that waits in a named barrier."""
    awaited = Call(rank, call, 0, "saving", "saving", "train.py:7")
    progress = GroupProgress(DEFAULT, DEFAULT, after_collective)
    return status(rank, progress, calls_made=call, awaited=awaited)


def computing(rank: int, *, after_collective: int) -> Status:
    return status(rank, GroupProgress(DEFAULT, DEFAULT, after_collective))


@pytest.mark.parametrize(
    ("statuses", "ranks_in_deadlock"),
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
def test_ranks_in_a_deadlock(statuses: list[Status], ranks_in_deadlock: set[int]) -> None:
    """A rank is in a deadlock if none of the ranks that it waits for can continue."""
    deadlock = deadlock_in(statuses)
    sentence = "" if deadlock is None else deadlock.reason
    assert {int(rank) for rank in re.findall(r"\(host host(\d)", sentence)} == ranks_in_deadlock


def test_a_rank_that_has_made_a_call_since_its_last_status_is_not_in_a_deadlock() -> None:
    """Its calls are certain only in the next status, unless it computes in between."""
    unsettled = replace(in_collective(0, 5), is_settled=False)
    assert deadlock_in([unsettled, in_barrier(1, 1, after_collective=4)]) is None
