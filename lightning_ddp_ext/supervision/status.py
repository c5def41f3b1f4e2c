"""Describe the state of a rank, as it pushes it to rank 0."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_ddp_ext.rendezvous.named_barrier import Call
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.flight_recorder import GroupProgress


@dataclass(frozen=True)
class Status:
    """The state of a rank at one moment.

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
            its main thread, if blocked, has not computed since.
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
        """Its pending calls, as a value that changes with each further call."""
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
