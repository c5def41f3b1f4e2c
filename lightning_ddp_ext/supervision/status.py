"""What ranks do, as they push it to rank 0, and the rank that others wait for.

In a deadlock, ranks made different calls, so none of them can continue. A rank that
waits in a call needs all ranks that have not made this call. One of them never will if
it waits in another call for a rank that never will.
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
from lightning_ddp_ext.supervision.flight_recorder import GroupProgress

_LONGER = "pass a longer timeout (after a signal: save_deadline) to the strategy"
_BE_IN_TIME = f"find out what takes it so long, or {_LONGER}"
_TAKES_LONGER = f"make sure that every rank makes the same calls; if one takes longer, {_LONGER}"


@dataclass(frozen=True)
class Status:
    """What a rank does.

    Attributes:
        who: the rank.
        question: where and how long a rank has waited, as long as this one asks which rank
            it waits for; empty otherwise.
        place: file and line of its main thread, in the user's code.
        is_in_collective: whether its main thread is in C++, in code of a collective or
            a backward pass.
        groups: its collectives in each group, as far as torch records them.
        has_timed_out: whether it has waited in a collective for the timeout.
        calls_made: the number of calls of named barriers that it has started.
        awaited: the call of a named barrier that it waits in.
        is_settled: whether its calls are those of the status before, without processor
            time of a blocked main thread in between.
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
    def calls(self) -> tuple[object, ...]:
        """The calls that it waits in, which differ after each further call."""
        pending = [(progress.group, progress.pending) for progress in self.unfinished]
        return self.place, self.calls_made, self.awaited, pending

    @property
    def is_blocked(self) -> bool:
        """Whether its main thread cannot continue before other ranks make its calls."""
        return self.is_in_collective or self.awaited is not None

    @property
    def waits(self) -> bool:
        """Whether it may be waiting for another rank."""
        return self.is_blocked or bool(self.question) or bool(self.unfinished)

    @property
    def unfinished(self) -> list[GroupProgress]:
        """Its progress in the groups in which it has an unfinished collective."""
        return [progress for progress in self.groups if progress.pending]

    def progress_in(self, group: str) -> GroupProgress | None:
        """Return its progress in a group, if torch recorded it."""
        return next((progress for progress in self.groups if progress.group == group), None)

    def is_missing_in(self, waiting: GroupProgress) -> bool:
        """Whether it is a member of a group and has not entered a pending collective.

        ``waiting`` is the progress of a rank that has entered the collective.
        """
        own = self.progress_in(waiting.group)
        if own is not None:
            return own.entered < waiting.pending
        is_default_group = not waiting.label
        return is_default_group or self.who.rank in waiting.members


def deadlock_in(statuses: Sequence[Status]) -> PeerEvent | None:
    """Return the event of a deadlock among the ranks whose calls are settled, if any.

    These ranks wait for each other in different calls.
    """
    statuses = [status for status in statuses if status.is_settled]
    calls = {_call_of(status) for status in statuses if status.awaited or status.unfinished}
    if len(calls) < 2:  # a common case, also with hundreds of ranks
        return None
    return _mismatch_in(statuses) or _circular_wait_in(statuses)


# Answers to a rank that asks; ``wait`` is the part of the message about this rank.


def silent_rank(silent: Sequence[RankInfo], wait: str) -> PeerEvent:
    """Return the event of the first of the ranks that did not push their status."""
    silence = listed((f"{who} has not answered" for who in silent), separator="; ")
    return event_of("hung", silent[0], f"{silence}; {wait}")


def rank_outside_barrier(statuses: Sequence[Status], call: Call) -> PeerEvent | None:
    """Return the event of ranks that have not started a call in time, if any."""
    absent = [status.who for status in statuses if status.calls_made < call.number]
    if not absent or call.may_be_late:
        return None
    return event_of_absence(call, absent, "did not do so in time", _BE_IN_TIME)


def rank_outside_collective(statuses: Sequence[Status], wait: str) -> PeerEvent | None:
    """Return the event of a rank that others wait for in a collective, if any.

    It entered another collective, or is not waiting while others time out.
    """
    mismatch = _mismatch_in(statuses)
    if mismatch is not None:
        return mismatch
    elsewhere = [status for status in statuses if not status.waits]
    has_timed_out = any(status.waits and status.has_timed_out for status in statuses)
    if not elsewhere or not has_timed_out:
        return None
    places = listed(
        (f"{status.who} is in {status.place or 'library code'}" for status in elsewhere),
        separator=" and ",
    )
    return event_of("absent", elsewhere[0].who, f"{wait}, but {places}; {_TAKES_LONGER}")


def _deadlock_of(calls: Sequence[tuple[Status, str]]) -> PeerEvent:
    """Return the event that accuses a rank in the rarest call.

    ``calls`` has the call of each rank in the deadlock, with file and line.
    """
    awaited = [status.awaited for status, _ in calls if status.awaited is not None]
    return event_of_different_calls({status.who: call for status, call in calls}, "is in", awaited)


# Ranks in different collectives of the same group.


def _mismatch_in(statuses: Sequence[Status]) -> PeerEvent | None:
    """Return the event of ranks that entered different collectives with the same number.

    At least one of them is waiting in its collective.
    """
    for group, number in _pending_in(statuses):
        entered = [
            (status, progress)
            for status in statuses
            if (progress := status.progress_in(group)) is not None and number in progress.recent
        ]
        if len({progress.collective(number).signature for _, progress in entered}) > 1:
            return _deadlock_of(
                [(status, _in_words(status, progress, number)) for status, progress in entered]
            )
    return None


def _pending_in(statuses: Sequence[Status]) -> dict[tuple[str, int], GroupProgress]:
    """Return the progress of one rank in each pending collective, by group and number."""
    # Hundreds of ranks may be waiting in one collective.
    return {
        (progress.group, progress.pending): progress
        for status in statuses
        for progress in status.unfinished
    }


def _in_words(status: Status, progress: GroupProgress, number: int) -> str:
    """Describe a collective that a rank has entered, with file and line."""
    collective = progress.collective(number)
    return f"{collective.text}, {collective.place or status.place}"


# Ranks that wait for each other.


def _circular_wait_in(statuses: Sequence[Status]) -> PeerEvent | None:
    """Return the event of blocked ranks that wait for each other, if any.

    For example, rank 0 waits in an ``all_reduce`` that rank 1 has not entered, and rank
    1 in a named barrier that rank 0 has not entered. If rank 1 were computing, rank 0
    could continue later.
    """
    blocked = [status for status in statuses if status.is_blocked]
    stuck = _waiting_for_each_other(blocked)
    # A rank that turns out not to be stuck may make the call that others wait for.
    while len(stuck) < len(blocked):
        blocked = stuck
        stuck = _waiting_for_each_other(blocked)
    return _deadlock_of([(status, _call_of(status)) for status in stuck]) if stuck else None


def _waiting_for_each_other(statuses: Sequence[Status]) -> list[Status]:
    """Return the ranks that wait in a call that another one has not made."""
    fewest_calls = min((status.calls_made for status in statuses), default=0)
    incomplete = {
        key
        for key, progress in _pending_in(statuses).items()
        if any(other.is_missing_in(progress) for other in statuses)
    }
    return [
        status
        for status in statuses
        if (
            status.awaited.number > fewest_calls
            if status.awaited is not None
            else any((each.group, each.pending) in incomplete for each in status.unfinished)
        )
    ]


def _call_of(status: Status) -> str:
    """Describe the call that a rank waits in."""
    if status.awaited is not None:
        return f"{status.awaited.what}, {status.awaited.where or status.place}"
    progress = status.unfinished[0]
    return _in_words(status, progress, progress.pending)
