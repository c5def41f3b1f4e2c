"""The replies of ranks to a survey: a short one, a report, or none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_ddp_ext.rendezvous.named_barrier import Call
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.flight_recorder import GroupProgress


@dataclass(frozen=True)
class Glance:
    """The short reply of a rank, which does not disturb its work."""

    open_calls: list[str]
    """The calls in which the rank waits, or in which its device does."""
    is_blocked: bool
    """As in a :class:`Report`."""
    is_in_run: bool
    """As in a :class:`Report`."""


@dataclass(frozen=True)
class Report:
    """A rank's report about itself.

    =====================  =========  ==============================================
    ``makes_no_progress``  ``waits``  The rank
    =====================  =========  ==============================================
    no                     any        works, or has not waited for long
    yes                    yes        waits for other ranks
    yes                    no         is stuck in its own code, or ``is_outside``
    =====================  =========  ==============================================
    """

    who: RankInfo

    # Progress.

    idle: float = 0.0
    """Seconds since its last progress."""
    makes_no_progress: bool = False
    """Whether ``idle`` exceeds the timeout, or the rank has left the watched code."""
    progress: str = ""
    """Its progress: epoch, step, batch."""

    # The main thread.

    doing: str = ""
    """The activity of its main thread, such as ``train_dataloader_next``."""
    place: str = ""
    """File and line in the user's code."""
    is_outside: bool = False
    """Whether it has left the watched code, so it may no longer need the other ranks.
    """
    is_waiting: bool = False
    """Whether its main thread is waiting for other ranks, in a collective or elsewhere.
    """
    is_blocked: bool = False
    """Whether its main thread cannot continue before other ranks make the calls that it
    waits in.
    """
    cpu_seconds: float = 0.0
    """The processor time of its main thread."""
    stacks: str = ""
    """The stacks of its threads."""

    # Collectives and named barriers.

    groups: list[GroupProgress] = field(default_factory=list)
    """Its collectives in each group, as far as torch records them."""
    has_timed_out: bool = False
    """Whether it has waited in a collective for the timeout."""
    calls: int = 0
    """The number of calls of named barriers that it has started."""
    awaited: Call | None = None
    """The call of a named barrier that it waits in."""

    # The Trainer's run.

    run: int = 0
    """The ordinal of its Trainer's run, or of the last one."""
    is_in_run: bool = True
    """Whether that run is under way."""

    @property
    def where(self) -> str:
        """Its activity, with file and line."""
        return f"{self.doing}, {self.place}" if self.place else self.doing

    @property
    def waits(self) -> bool:
        """Whether another rank may be the reason why it is making no progress."""
        return self.is_waiting or bool(self.unfinished)

    @property
    def unfinished(self) -> list[GroupProgress]:
        """Its progress in the groups in which it has an unfinished collective."""
        return [progress for progress in self.groups if progress.pending]

    def progress_in(self, group: str) -> GroupProgress | None:
        """Return its progress in a group, if torch recorded it."""
        return next((progress for progress in self.groups if progress.group == group), None)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Report:
        """Restore a report from the result of ``dataclasses.asdict``."""
        who = RankInfo(**values["who"])
        groups = [GroupProgress.from_dict(progress) for progress in values["groups"]]
        awaited = None if values["awaited"] is None else Call(**values["awaited"])
        return cls(**{**values, "who": who, "groups": groups, "awaited": awaited})


@dataclass(frozen=True)
class Silence:
    """A rank that did not reply."""

    who: RankInfo
    seconds: float

    def __str__(self) -> str:
        return f"{self.who} has not answered for {self.seconds:.0f} s"
