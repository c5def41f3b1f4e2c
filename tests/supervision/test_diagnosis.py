"""The reports of all ranks give one sentence: the stuck rank, and the ranks that wait
for it.
"""

from typing import Any

import pytest

from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.diagnosis import Findings
from lightning_ddp_ext.supervision.flight_recorder import Collective, GroupProgress
from lightning_ddp_ext.supervision.report import Report

IDLE = 61.0  # seconds
PLACE = "train_dataloader_next, dataset.py:41"


def who(rank: int) -> RankInfo:
    return RankInfo(rank, f"host{rank}", 100 + rank, "network")


def stalled(rank: int, *groups: GroupProgress, idle: float = IDLE, **values: Any) -> Report:
    """Return the report of a rank without progress."""
    doing, place = PLACE.split(", ")
    chosen = {"makes_no_progress": True, "idle": idle, "doing": doing, "place": place, **values}
    return Report(who(rank), groups=list(groups), **chosen)


def moving(rank: int, *groups: GroupProgress) -> Report:
    return stalled(rank, *groups, idle=0.5, makes_no_progress=False)


def progress(entered: int, *, pending: int = 0) -> GroupProgress:
    return GroupProgress("0", "", entered, pending, {str(entered): Collective("all_reduce")})


WAITING = progress(5, pending=5)
BEHIND = progress(4)
WAITING_BEHIND = progress(4, pending=4)


@pytest.mark.parametrize(
    ("findings", "sentence"),
    [
        pytest.param(
            Findings([stalled(0, WAITING), stalled(1, BEHIND), stalled(2)]),
            f"rank 1 (host host1, pid 101) never entered all_reduce #5; it is in {PLACE}; rank 0"
            " waited for it for 61 s",
            id="several ranks never entered a collective",
        ),
        pytest.param(
            Findings([stalled(0, WAITING), stalled(1, WAITING_BEHIND)]),
            "rank 1 (host host1, pid 101) never entered all_reduce #5; it is in all_reduce #4,"
            f" {PLACE}; rank 0 waited for it for 61 s",
            id="the absent rank waits in an earlier collective",
        ),
        pytest.param(
            Findings([stalled(0, WAITING), stalled(1)]),
            f"rank 1 (host host1, pid 101) has made no progress for 61 s; it is in {PLACE}",
            id="a rank's recorder did not answer",
        ),
        pytest.param(
            Findings([stalled(0, WAITING), stalled(1, WAITING, idle=62.0)]),
            "rank 1 (host host1, pid 101) has made no progress for 62 s; it is in all_reduce #5,"
            f" {PLACE}",
            id="all ranks are in the same collective",
        ),
        pytest.param(
            Findings([stalled(0), moving(1, BEHIND)]),
            f"rank 0 (host host0, pid 100) has made no progress for 61 s; it is in {PLACE}",
            id="a rank is stuck while another one makes progress",
        ),
        pytest.param(
            Findings([stalled(0, is_watched=False), stalled(1)]),
            f"rank 1 (host host1, pid 101) has made no progress for 61 s; it is in {PLACE}",
            id="a rank that is no longer watched does not count",
        ),
    ],
)
def test_the_sentence(findings: Findings, sentence: str) -> None:
    """The reports give the sentence that a user reads."""
    event = findings.stuck_rank
    assert event is not None
    assert event.reason == sentence


@pytest.mark.parametrize(
    "findings",
    [
        pytest.param(
            Findings([stalled(0, WAITING), moving(2, progress(5))], [who(1)]),
            id="a rank does not reply while another one makes progress",
        ),
        pytest.param(
            Findings([stalled(0, WAITING), moving(1, BEHIND)]),
            id="the awaited rank makes progress",
        ),
    ],
)
def test_no_rank_is_stuck(findings: Findings) -> None:
    """Ranks without progress that only wait for ranks with progress are not reported."""
    assert findings.stuck_rank is None


def test_the_report_file_names_every_silent_rank() -> None:
    """It is not shortened as an error is, since all ranks of a host may be silent."""
    silent = [who(rank) for rank in range(10)]
    assert str(Findings([], silent)).split("\n\n") == [
        f"{each} has not answered" for each in silent
    ]
