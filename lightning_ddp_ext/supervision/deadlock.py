"""Find the rank that others wait for, from the statuses of ranks.

In a deadlock, ranks made different calls, so none of them can continue. A rank that
waits in a call needs all ranks that have not made this call. One of them never will if
it waits in another call for a rank that never will.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ddp_ext.rank_lists import activities_in_words, grouped, listed
from lightning_ddp_ext.rendezvous.named_barrier import SAME_CALLS, remedies_of
from lightning_ddp_ext.rendezvous.peers import PeerEvent, event_of
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.flight_recorder import Collective, GroupProgress
from lightning_ddp_ext.supervision.status import Status

# Functions whose inputs must have the same number of elements on all ranks.
_OF_SAME_SIZE = ("all_reduce", "broadcast", "reduce")
# Seconds of processor time between two statuses; a thread that waits takes none.
_COMPUTING = 0.01
_TAKES_LONGER = (
    "make sure that every rank makes the same calls; if one takes longer, pass a longer timeout to"
    " the strategy"
)


@dataclass(frozen=True)
class Deadlock:
    """Ranks that wait for each other in different calls.

    Attributes:
        statuses: the statuses of these ranks, in the order of ranks.
        calls: the call of each of these ranks, in this order, with file and line.
    """

    statuses: list[Status]
    calls: dict[RankInfo, str]

    @property
    def event(self) -> PeerEvent:
        """The event that all ranks raise; it accuses a rank that is in the rarest call."""
        _, ranks_in_rarest_call = grouped(self.calls)[0]
        accused = ranks_in_rarest_call[0]
        activities = activities_in_words(self.calls, "is in")
        return event_of(
            "absent",
            accused,
            f"ranks are waiting for each other in different calls: {activities};"
            f" {self._remedies()}",
        )

    def _remedies(self) -> str:
        awaited = [status.awaited for status in self.statuses if status.awaited is not None]
        return "; ".join(remedies_of(awaited)) or SAME_CALLS

    # Compared with the same deadlock, found earlier: its statuses are of the same ranks.

    def is_pushed_after(self, earlier: Deadlock) -> bool:
        """Whether each rank has pushed its status again."""
        pairs = zip(earlier.statuses, self.statuses, strict=True)
        return all(new.number > old.number for old, new in pairs)

    def has_computed_since(self, earlier: Deadlock) -> bool:
        """Whether a blocked rank took processor time."""
        pairs = zip(earlier.statuses, self.statuses, strict=True)
        seconds = [new.cpu_seconds - old.cpu_seconds for old, new in pairs if new.is_blocked]
        return max(seconds, default=0.0) >= _COMPUTING


def deadlock_in(statuses: Sequence[Status]) -> Deadlock | None:
    """Return a deadlock that is certain once it is found twice, if any."""
    calls = {_call_of(status) for status in statuses if status.awaited or status.unfinished}
    if len(calls) < 2:  # a common case, also with hundreds of ranks
        return None
    return _mismatch_in(statuses) or _circular_wait_in(statuses)


# Answers to a rank that asks; ``wait`` is the part of the message about this rank.


def silent_rank(silent: Sequence[RankInfo], wait: str) -> PeerEvent:
    """Return the event of the first of the ranks that did not push their status."""
    silence = listed((f"{who} has not answered" for who in silent), separator="; ")
    return event_of("hung", silent[0], f"{silence}; {wait}")


def rank_outside_collective(statuses: Sequence[Status], wait: str) -> PeerEvent | None:
    """Return the event of a rank that others wait for in a collective, if any.

    It entered another collective, or is not waiting while others time out.
    """
    mismatch = _mismatch_in(statuses)
    if mismatch is not None:
        return mismatch.event
    elsewhere = [status for status in statuses if not status.waits]
    has_timed_out = any(status.waits and status.has_timed_out for status in statuses)
    if not elsewhere or not has_timed_out:
        return None
    places = listed(
        (f"{status.who} is in {status.place or 'library code'}" for status in elsewhere),
        separator=" and ",
    )
    return event_of("absent", elsewhere[0].who, f"{wait}, but {places}; {_TAKES_LONGER}")


# Ranks in different collectives of the same group.


@dataclass(frozen=True)
class _Entered:
    """A collective that a rank has entered."""

    status: Status
    progress: GroupProgress
    number: int

    @property
    def collective(self) -> Collective:
        return self.progress.collective(self.number)

    def __str__(self) -> str:
        place = self.collective.place or self.status.place
        return f"{self.progress.describe(self.number)}, {place}"


def _mismatch_in(statuses: Sequence[Status]) -> Deadlock | None:
    """Return ranks that entered different collectives with the same number, if any.

    At least one of them is waiting in its collective.
    """
    # Hundreds of ranks may be waiting in one collective.
    pending = {(each.progress.group, each.number): each for each in _pending_in(statuses)}
    for (group, number), waiting in pending.items():
        entered = _entered_by_ranks(statuses, group, number)
        if any(_differ(waiting.collective, other.collective) for other in entered):
            return Deadlock(
                [each.status for each in entered],
                {each.status.who: str(each) for each in entered},
            )
    return None


def _pending_in(statuses: Sequence[Status]) -> list[_Entered]:
    return [
        _Entered(status, progress, progress.pending)
        for status in statuses
        for progress in status.unfinished
    ]


def _entered_by_ranks(statuses: Sequence[Status], group: str, number: int) -> list[_Entered]:
    """Return a collective of a group as each rank entered it."""
    entered = []
    for status in statuses:
        progress = status.progress_in(group)
        if progress is not None and progress.has_entered(number):
            entered.append(_Entered(status, progress, number))
    return entered


def _differ(one: Collective, other: Collective) -> bool:
    is_of_same_size = one.elements == other.elements or one.name not in _OF_SAME_SIZE
    return one.name != other.name or not is_of_same_size


# Ranks that wait for each other.


def _circular_wait_in(statuses: Sequence[Status]) -> Deadlock | None:
    """Return the blocked ranks that wait for each other, if any.

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
    if not stuck:
        return None
    return Deadlock(stuck, {status.who: _call_of(status) for status in stuck})


def _waiting_for_each_other(statuses: Sequence[Status]) -> list[Status]:
    """Return the ranks that wait in a call that another one has not made."""
    fewest_calls = min((status.calls_made for status in statuses), default=0)
    pending = {(each.progress.group, each.number): each for each in _pending_in(statuses)}
    incomplete = {
        key
        for key, each in pending.items()
        if any(other.is_missing_in(each.progress) for other in statuses)
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
    return str(_pending_in([status])[0])
