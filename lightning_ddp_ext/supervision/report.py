"""A rank's reply to a survey, and how it makes the reply."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_ddp_ext.rendezvous.named_barrier import Call
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.flight_recorder import (
    GroupProgress,
    groups_in_collectives,
    has_timed_out,
    read_progress,
)
from lightning_ddp_ext.supervision.stacks import (
    call_site_of,
    is_in_backward,
    is_in_collective,
    main_frame,
)


@dataclass(frozen=True)
class Report:
    """A rank's report about itself."""

    who: RankInfo

    # The main thread.

    place: str = ""
    """File and line in the user's code."""
    is_in_collective: bool = False
    """Whether its main thread is in C++, in code of a collective or a backward pass."""
    cpu_seconds: float = 0.0
    """The processor time of its main thread; 0 with CUDA, which may poll while it waits.
    """

    # Collectives and named barriers.

    groups: list[GroupProgress] = field(default_factory=list)
    """Its collectives in each group, as far as torch records them."""
    has_broken_collective: bool = False
    """Whether another rank probably broke its collective, which it handles now."""
    has_timed_out: bool = False
    """Whether it has waited in a collective for the timeout."""
    calls_made: int = 0
    """The number of calls of named barriers that it has started."""
    awaited: Call | None = None
    """The call of a named barrier that it waits in."""

    @property
    def is_blocked(self) -> bool:
        """Whether its main thread cannot continue before other ranks make its calls."""
        return self.is_in_collective or self.awaited is not None

    @property
    def waits(self) -> bool:
        """Whether another rank may be the reason why it is making no progress."""
        return self.is_blocked or self.has_broken_collective or bool(self.unfinished)

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

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Report:
        """Restore a report from the result of ``dataclasses.asdict``."""
        who = RankInfo(**values["who"])
        groups = [GroupProgress.from_dict(progress) for progress in values["groups"]]
        awaited = None if values["awaited"] is None else Call(**values["awaited"])
        return cls(**{**values, "who": who, "groups": groups, "awaited": awaited})


class Reporter:
    """Describes this rank from the channel's thread.

    Attributes:
        has_broken_collective: whether another rank probably broke a collective of this
            one, which therefore counts as waiting.
    """

    def __init__(self, context: ProcessContext) -> None:
        self.has_broken_collective = False
        self._who = context.peers.mine
        self._groups = context.groups
        self._barriers = context.barriers

    def report(self) -> Report:
        """Return this rank's report; not for the main thread, whose stack it reads."""
        frame = main_frame()
        groups = read_progress()
        return Report(
            self._who,
            place=call_site_of(frame),
            is_in_collective=is_in_collective(frame) or is_in_backward(frame),
            cpu_seconds=0.0 if torch.cuda.is_initialized() else _cpu_seconds(),
            groups=groups,
            has_broken_collective=self.has_broken_collective,
            has_timed_out=has_timed_out(groups, self._groups.timeout),
            calls_made=self._barriers.made,
            awaited=self._barriers.awaited,
        )

    def open_calls(self) -> list[str]:
        """Return a key of each call in which this rank waits, or in which its device does.

        The key changes with the next call. Finding out does not disturb the main thread or
        the device.
        """
        call = self._barriers.awaited
        barriers = [] if call is None else [f"call {call.number}"]
        return groups_in_collectives() + barriers


def _cpu_seconds() -> float:
    """Return the processor time of the main thread."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    return time.clock_gettime(time.pthread_getcpuclockid(main_thread))
