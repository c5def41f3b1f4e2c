"""Describe the state of a rank, and find in the states of all the rank that others wait for.

A rank waits in **calls**: in a named barrier, which blocks its main thread, and in the
pending collective of each group, which may run in the background. Named barriers are
numbered, as are the collectives of each group, in the same way on all ranks. A rank is
thus in the same call as another one if it has the same number.

The functions get the statuses of ranks, and return the event to report, or ``None``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.rendezvous.named_barrier import (
    Call,
    event_of_absence,
    event_of_different_calls,
)
from lightning_ddp_ext.rendezvous.peers import PeerEvent, event_of
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.flight_recorder import Collective, GroupProgress

_LONGER = "pass a longer timeout (after a signal: save_deadline) to the strategy"
_BE_IN_TIME = f"find out what takes it so long, or {_LONGER}"
_TAKES_LONGER = f"make sure that every rank makes the same calls; if one takes longer, {_LONGER}"


@dataclass(frozen=True)
class Status:
    """The state of a rank at one moment, as it pushes it to rank 0.

    Attributes:
        who: the rank.
        question: a sentence about its wait if it asks rank 0 which rank it waits for;
            otherwise empty.
        place: file and line of its main thread, in the user's code.
        is_in_collective: whether its main thread is in C++, in code of a collective or
            a backward pass.
        groups: its collectives in each group, as far as torch records them.
        has_timed_out: whether it has waited in a collective for the timeout.
        calls_made: the number of named barriers that it has entered.
        awaited: the named barrier in which it waits, if any.
        is_settled: whether it has the same pending calls as in its previous status, and
            its main thread, if blocked, has not computed since. It is thus not between
            two calls.
    """

    who: RankInfo
    question: str = ""
    place: str = ""
    is_in_collective: bool = False
    groups: list[GroupProgress] = field(default_factory=list)
    has_timed_out: bool = False
    calls_made: int = 0
    awaited: Call | None = None
    is_settled: bool = False

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Status:
        """Restore a status from the result of ``dataclasses.asdict``."""
        awaited = values["awaited"]
        restored = {
            "who": RankInfo(**values["who"]),
            "groups": [GroupProgress.from_dict(each) for each in values["groups"]],
            "awaited": None if awaited is None else Call(**awaited),
        }
        return Status(**{**values, **restored})

    @property
    def is_blocked(self) -> bool:
        """Whether its main thread cannot continue before other ranks make its calls."""
        return self.is_in_collective or self.awaited is not None

    @property
    def pending_groups(self) -> list[GroupProgress]:
        """Its progress in the groups in which it has a pending collective."""
        return [progress for progress in self.groups if progress.pending]

    @property
    def may_wait(self) -> bool:
        """Whether it may be waiting for another rank, even if torch records no collective."""
        return self.is_blocked or bool(self.question) or bool(self.pending_groups)

    @property
    def calls(self) -> tuple[object, ...]:
        """Its place and pending calls, as a value that changes with each further call."""
        collectives = [(progress.group, progress.pending) for progress in self.pending_groups]
        return self.place, self.calls_made, self.awaited, collectives

    def entered(self, group: str, number: int) -> Collective | None:
        """Return a collective that it has entered, if torch's record reaches back to it."""
        progress = self._progress_in(group)
        return None if progress is None else progress.recent.get(number)

    def must_enter(self, waiting: GroupProgress) -> bool:
        """Whether a collective that is pending on another rank waits for this one.

        ``waiting`` is the progress of the other rank in the collective's group.
        """
        own = self._progress_in(waiting.group)
        if own is None:  # this rank has not entered any collective of the group
            return waiting.has_member(self.who.rank)
        return own.entered < waiting.pending

    def _progress_in(self, group: str) -> GroupProgress | None:
        return next((progress for progress in self.groups if progress.group == group), None)


# Answers to a rank that asks; ``wait`` is its question, a sentence about its wait.


def answer_to(
    asking: Status, statuses: Sequence[Status], silent: Sequence[RankInfo]
) -> PeerEvent | None:
    """Return the event of the rank that the asking rank waits for, if any.

    Args:
        asking: the status of a rank with a question.
        statuses: those of all ranks that have pushed one in time.
        silent: the other ranks.
    """
    if silent:
        return silent_rank(silent, asking.question)
    if asking.awaited is not None:
        return _rank_outside_barrier(statuses, asking.awaited)
    return _mismatch_in(statuses) or _rank_outside_collective(statuses, asking.question)


def silent_rank(silent: Sequence[RankInfo], wait: str) -> PeerEvent:
    """Return the event of the first of the ranks that did not push their status."""
    silence = listed((f"{who} has not answered" for who in silent), separator="; ")
    return event_of("hung", silent[0], f"{silence}; {wait}")


def _rank_outside_barrier(statuses: Sequence[Status], call: Call) -> PeerEvent | None:
    """Return the event of ranks that have not started a call in time, if any."""
    absent = [status.who for status in statuses if status.calls_made < call.number]
    if not absent or call.may_be_late:
        return None
    return event_of_absence(call, absent, "did not do so in time", _BE_IN_TIME)


def _rank_outside_collective(statuses: Sequence[Status], wait: str) -> PeerEvent | None:
    """Return the event of a rank that does not wait while another one times out, if any."""
    elsewhere = [status for status in statuses if not status.may_wait]
    has_timed_out = any(status.may_wait and status.has_timed_out for status in statuses)
    if not elsewhere or not has_timed_out:
        return None
    places = listed(
        (f"{status.who} is in {status.place or 'library code'}" for status in elsewhere),
        separator=" and ",
    )
    return event_of("absent", elsewhere[0].who, f"{wait}, but {places}; {_TAKES_LONGER}")


# Deadlocks: ranks are in different calls, so none of them can continue. Hundreds of ranks
# may wait in one collective, so each collective is looked up once, not once for each rank.


def deadlock_in(statuses: Sequence[Status]) -> PeerEvent | None:
    """Return the event of a deadlock among ranks with settled calls, if any.

    It is one of these:

    - a *mismatch*: ranks entered different collectives with the same number in a group;
    - a *circular wait*: each rank is in a call that another one of them has not made.
    """
    settled = [status for status in statuses if status.is_settled]
    calls = {_call_of(status) for status in settled if status.awaited or status.pending_groups}
    if len(calls) < 2:  # a common case, also with hundreds of ranks
        return None
    return _mismatch_in(settled) or _circular_wait_in(settled)


def _mismatch_in(statuses: Sequence[Status]) -> PeerEvent | None:
    """Return the event of a mismatch, if any.

    At least one of its ranks is waiting in its collective.
    """
    for group, number in _pending_in(statuses):
        entered = [
            (status, collective)
            for status in statuses
            if (collective := status.entered(group, number)) is not None
        ]
        if len({collective.signature for _, collective in entered}) > 1:
            return _event_of([(status, _in_words(status, each)) for status, each in entered])
    return None


def _circular_wait_in(statuses: Sequence[Status]) -> PeerEvent | None:
    """Return the event of blocked ranks that wait for each other, if any.

    For example, rank 0 waits in an ``all_reduce`` that rank 1 has not entered, and rank
    1 in a named barrier that rank 0 has not entered. If rank 1 were computing, rank 0
    could continue later.
    """
    stuck = [status for status in statuses if status.is_blocked]
    # A rank that needs none of the others can continue, and may then make the call that
    # one of them waits for. So leave out such ranks until all that remain need another.
    while (remaining := _needing_another(stuck)) != stuck:
        stuck = remaining
    return _event_of([(status, _call_of(status)) for status in stuck]) if stuck else None


def _needing_another(statuses: Sequence[Status]) -> list[Status]:
    """Return the ranks in a call that another one of these ranks has not made."""
    fewest_barriers = min((status.calls_made for status in statuses), default=0)
    incomplete = {
        key
        for key, progress in _pending_in(statuses).items()
        if any(other.must_enter(progress) for other in statuses)
    }

    def needs_another(status: Status) -> bool:
        if status.awaited is not None:  # collectives in the background do not block it
            return status.awaited.number > fewest_barriers
        return any((each.group, each.pending) in incomplete for each in status.pending_groups)

    return [status for status in statuses if needs_another(status)]


def _pending_in(statuses: Sequence[Status]) -> dict[tuple[str, int], GroupProgress]:
    """Return one rank's progress in each pending collective, by group and number."""
    return {
        (progress.group, progress.pending): progress
        for status in statuses
        for progress in status.pending_groups
    }


def _event_of(calls: Sequence[tuple[Status, str]]) -> PeerEvent:
    """Return the event of a deadlock, which accuses a rank in the rarest call.

    ``calls`` has the call of each rank in the deadlock, with file and line.
    """
    awaited = [status.awaited for status, _ in calls if status.awaited is not None]
    return event_of_different_calls({status.who: call for status, call in calls}, "is in", awaited)


def _call_of(status: Status) -> str:
    """Describe the call that a rank waits in, with file and line."""
    if status.awaited is not None:
        return f"{status.awaited.what}, {status.awaited.where or status.place}"
    progress = status.pending_groups[0]
    return _in_words(status, progress.collective(progress.pending))


def _in_words(status: Status, collective: Collective) -> str:
    """Describe a collective that a rank has entered, with file and line."""
    return f"{collective.text}, {collective.place or status.place}"
