"""A trace of torch's Flight Recorder gives the progress of a rank in each group."""

import time
from datetime import timedelta
from typing import Any

import pytest

from lightning_ddp_ext.supervision.flight_recorder import (
    GroupProgress,
    has_timed_out,
    last_completed_of_unfinished,
    progress_in,
)

UNFINISHED = "started"


def entry(number: int, op_id: int, state: str = "completed", **values: Any) -> dict[str, Any]:
    """Return the record of a collective, in the format of torch."""
    return {
        "collective_seq_id": number,
        "op_id": op_id,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": "nccl:all_reduce",
        "state": state,
        **values,
    }


def test_a_new_group_with_the_name_of_a_closed_one_starts_anew() -> None:
    """Collectives of the closed group, even an unfinished one, do not count."""
    closed = [entry(1, 1), entry(2, 2), entry(3, 3, UNFINISHED)]
    (progress,) = progress_in({"entries": [*closed, entry(1, 4, pg_id=1)]}, {})
    assert (progress.entered, progress.pending) == (1, 0)


def test_sends_and_coalesced_collectives_hide_no_collective() -> None:
    """Neither hides the collectives before it, nor one that is unfinished.

    NCCL gives an entry that joins sends the number of the last collective, and each of
    several coalesced collectives the same number.
    """
    joining = {"profiling_name": "nccl:coalesced"}
    coalesced = [entry(2, 3), entry(2, 4), entry(2, 4, **joining)]
    sends = [
        entry(1, 5, is_p2p=True, profiling_name="nccl:send 0->1"),
        entry(2, 5, UNFINISHED, **joining),
    ]
    (progress,) = progress_in({"entries": [entry(1, 1, UNFINISHED), *coalesced, *sends]}, {})
    assert (progress.entered, progress.pending, sorted(progress.recent)) == (2, 1, [1, 2])


@pytest.mark.parametrize(
    ("completed", "is_waiting"),
    [
        pytest.param(60, False, id="finished"),
        pytest.param(59, True, id="unfinished"),
        pytest.param(2000, True, id="after many sends"),
    ],
)
def test_a_rank_waits_in_an_unfinished_collective(completed: int, is_waiting: bool) -> None:
    """A collective counts as unfinished even if torch reports a later send as completed."""
    statuses = {"0": {"last_enqueued_collective": 60, "last_completed_collective": completed}}
    assert bool(last_completed_of_unfinished(statuses)) == is_waiting


def progress_of(seconds: float, pending: int = 0) -> GroupProgress:
    """Return the progress of a group that has entered one collective."""
    return GroupProgress(
        f"{seconds}", "", entered=1, pending=pending, entered_at=time.time() - seconds
    )


HOUR = 3600.0


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        pytest.param([], True, id="nothing is recorded"),
        pytest.param([progress_of(HOUR), progress_of(1.0)], False, id="a group is unused"),
        pytest.param(
            [progress_of(HOUR), progress_of(1.0, pending=1)], False, id="a wait has begun"
        ),
        pytest.param([progress_of(HOUR, pending=1), progress_of(1.0)], True, id="a wait is long"),
        pytest.param([progress_of(HOUR)], True, id="the last one counts as finished"),
    ],
)
def test_a_rank_has_timed_out_if_it_has_waited_for_long(
    groups: list[GroupProgress], expected: bool
) -> None:
    """The age of other collectives means nothing."""
    assert has_timed_out(groups, timedelta(seconds=HOUR)) is expected
