"""The reports of all ranks give one sentence: the stuck rank, and the ranks that wait
for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_ddp_ext.rendezvous.named_barrier import Call
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision import flight as flight_module
from lightning_ddp_ext.supervision.diagnosis import deadlock_in
from lightning_ddp_ext.supervision.flight import Collective, Flight, flights_in
from lightning_ddp_ext.supervision.report import Report


def who(rank: int) -> RankInfo:
    return RankInfo(rank, f"host{rank}", 100 + rank, "network")


def report(rank: int, flights: list[Flight] | None = None, **values: Any) -> Report:
    chosen = {
        "idle": 61.0,
        "is_still": True,
        "doing": "train_dataloader_next",
        "place": "dataset.py:41",
        **values,
    }
    return Report(who(rank), flights=flights or [], **chosen)


def flight(
    entered: int, pending: int | None = None, name: str = "all_reduce", label: str = ""
) -> Flight:
    recent = {str(number): Collective("all_reduce") for number in range(1, entered)}
    return Flight(label or "0", label, entered, pending, {**recent, str(entered): Collective(name)})


def entry(number: int, op: int, state: str = "completed", **values: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "op_id": op,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": "nccl:all_reduce",
        "state": state,
        **values,
    }


def test_collectives_of_a_trace() -> None:
    """Each group has its last entered and its first unfinished collective.

    A new group with an old name starts at 0.
    """
    old = [entry(1, 1), entry(2, 2, "started")]
    new = [entry(number, 6 + number, pg_id=1) for number in (1, 2)]
    started = [entry(number, 6 + number, "started", pg_id=1) for number in (3, 4)]
    other_group = entry(1, 1, pg_id=2, process_group=["5", "undefined"])
    first, other = flights_in({"entries": [*old, *new, *started, other_group]}, {})
    assert (first.label, first.entered, first.pending) == ("", 4, 3)
    assert (other.label, other.entered, other.pending) == ("5", 1, None)


def test_sends_and_coalesced_collectives_of_a_trace() -> None:
    """Neither hides the collectives before it, nor one that is unfinished.

    NCCL gives an entry that joins sends the number of the last collective, and each of
    several coalesced collectives the same number.
    """
    joined = {"profiling_name": "nccl:coalesced"}
    coalesced = [entry(2, 3), entry(2, 4), entry(2, 4, **joined)]
    sends = [
        entry(1, 5, is_p2p=True, profiling_name="nccl:send 0->1"),
        entry(2, 5, "started", **joined),
    ]
    (flight,) = flights_in({"entries": [entry(1, 1, "started"), *coalesced, *sends]}, {})
    assert (flight.entered, flight.pending, sorted(flight.recent)) == (2, 1, ["1", "2"])


@pytest.mark.parametrize(("completed", "is_waiting"), [(60, False), (59, True), (2000, True)])
def test_a_collective_after_many_sends_is_unfinished(
    completed: int, is_waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL reports the number of the last send as that of the last completed collective."""
    status = {"last_enqueued_collective": 60, "last_completed_collective": completed}
    monkeypatch.setattr(flight_module, "_dump", lambda *_: {"pg_status": {"0": status}})
    assert bool(flight_module.unfinished()) == is_waiting


def waiting(
    rank: int, *groups: tuple[str, int, int | None], calls: int = 0, call: int = 0, **values: Any
) -> Report:
    """Return the report of a rank.

    Each group has its label, and the numbers of the last entered and of the first
    unfinished collective; ``calls`` counts calls of named barriers, and ``call`` is the
    one that the rank waits in.
    """
    flights = [
        Flight(group, group, entered, number, members=[0, 1, 2])
        for group, entered, number in groups
    ]
    awaited = Call(rank, call, 0, "saving", "saving", "train.py:7") if call else None
    chosen = {"is_blocked": True, "calls": calls, "awaited": awaited, "run": 1, **values}
    return Report(who(rank), place="train.py:5", flights=flights, **chosen)


COMPUTING = {"is_blocked": False}
LEFT = {"is_blocked": False, "is_in_run": False}
# Reports, and the ranks of the deadlock.
WAITS: dict[str, tuple[list[Report], set[int]]] = {
    "a collective and a barrier": (
        [
            waiting(0, ("", 5, 5)),
            waiting(1, ("", 4, None), calls=3, call=3),
            waiting(2, ("", 5, 5)),
        ],
        {0, 1, 2},
    ),
    "a circle of three groups": (
        [waiting(0, ("a", 1, 1)), waiting(1, ("b", 1, 1)), waiting(2, ("c", 1, 1))],
        {0, 1, 2},
    ),
    "one computes": ([waiting(0, ("", 5, 5)), waiting(1, ("", 4, None), **COMPUTING)], set()),
    "one computes, others wait for each other": (
        [
            waiting(0, ("", 5, 5)),
            waiting(1, ("", 4, None), calls=1, call=1),
            waiting(2, **COMPUTING),
        ],
        {0, 1},
    ),
    "all are in the same call": ([waiting(0, ("", 5, 5)), waiting(1, ("", 5, 5))], set()),
    "one has left the run": ([waiting(0, ("", 5, 5)), waiting(1, ("", 4, None), **LEFT)], {0, 1}),
    "one has not started the run": (
        [waiting(0, ("", 5, 5), run=2), waiting(1, ("", 4, None), **LEFT)],
        set(),
    ),
    "both work after the run": ([waiting(0, **LEFT), waiting(1, **LEFT)], set()),
}


@pytest.mark.parametrize("name", WAITS)
def test_ranks_of_a_deadlock(name: str) -> None:
    """Only ranks that certainly cannot continue are part of a deadlock."""
    reports, expected = WAITS[name]
    found = deadlock_in(reports)
    assert (set(found.calls) if found is not None else set()) == expected


def test_a_deadlock_must_persist() -> None:
    """It is certain if a second look finds the same calls, and no rank that waits has
    computed since.
    """
    first = [waiting(0, ("", 5, 5)), waiting(1, ("", 4, None), calls=1, call=1)]
    found = deadlock_in(first)
    assert found is not None
    assert found.persists_in(deadlock_in(first))
    assert not found.persists_in(None)
    assert not found.persists_in(deadlock_in([waiting(0, ("", 6, 6)), first[1]]))
    assert not found.persists_in(deadlock_in([replace(first[0], cpu_seconds=0.5), first[1]]))
