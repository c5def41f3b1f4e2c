"""The reports of all ranks give one sentence: the stuck rank, and the ranks that wait for it."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_ddp_ext.rendezvous.rank_table import RankInfo
from lightning_ddp_ext.supervision.diagnosis import Findings, Report, Silence
from lightning_ddp_ext.supervision.flight import Collective, Flight, flights_in


def who(rank: int) -> RankInfo:
    return RankInfo(rank, f"host{rank}", 100 + rank, "network")


def report(rank: int, flights: list[Flight] | None = None, **values: Any) -> Report:
    chosen = {"idle": 61.0, "is_still": True, "doing": "train_dataloader_next", "place": "dataset.py:41", **values}
    return Report(who(rank), flights=flights or [], **chosen)


def flight(entered: int, pending: int | None = None, name: str = "all_reduce", label: str = "") -> Flight:
    recent = {str(number): Collective("all_reduce") for number in range(1, entered)}
    return Flight(label or "0", label, entered, pending, {**recent, str(entered): Collective(name)})


MOVING = {"is_still": False, "idle": 0.5}
CASES: dict[str, tuple[Findings, str | None]] = {
    "several never came": (
        Findings([report(0, [flight(5, 5)]), report(1, [flight(4)]), report(2)]),
        "rank 1 (host host1, pid 101) never entered all_reduce #5 (nor did rank 2); it is in "
        "train_dataloader_next, dataset.py:41; rank 0 has waited for it for 61 s",
    ),
    "all are in it": (
        Findings([report(0, [flight(5, 5)]), report(1, [flight(5, 5)], idle=62.0)]),
        "rank 1 (host host1, pid 101) has made no progress for 62 s; it is in all_reduce #5, train_dataloader_next, "
        "dataset.py:41; rank 0 has been in all_reduce #5, train_dataloader_next, dataset.py:41 for 61 s",
    ),
    "one does not answer while others move": (
        Findings([report(0, [flight(5, 5)]), report(2, [flight(5)], **MOVING)], [Silence(who(1), 5.0)]),
        None,
    ),
    "waiting for one that moves": (Findings([report(0, [flight(5, 5)]), report(1, [flight(4)], **MOVING)]), None),
    "stuck while another moves": (
        Findings([report(0), report(1, [flight(4)], **MOVING)]),
        "rank 0 (host host0, pid 100) has made no progress for 61 s; it is in train_dataloader_next, dataset.py:41",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_sentence(name: str) -> None:
    """The reports give the sentence that a user reads."""
    case, expected = CASES[name]
    assert (case.diagnosis.reason if case.diagnosis else None) == expected


def entry(number: int, op: int, state: str = "completed", group: str = "0") -> dict[str, Any]:
    label = "default_pg" if group == "0" else "undefined"
    return {"collective_seq_id": number, "op_id": op, "process_group": [group, label], "state": state}


def test_collectives_of_a_trace() -> None:
    """Each group has its last entered and its first unfinished collective; a new group with an old name starts at 0."""
    old = [entry(1, 1), entry(2, 2, "started")]
    new = [entry(1, 7), entry(2, 8), entry(3, 9, "started"), entry(4, 10, "started")]
    first, other = flights_in({"entries": [*old, *new, entry(1, 1, group="5"), {**entry(9, 9), "is_p2p": True}]}, {})
    assert (first.label, first.entered, first.pending) == ("", 4, 3)
    assert (other.label, other.entered, other.pending) == ("5", 1, None)
