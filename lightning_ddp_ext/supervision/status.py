"""What a rank does, as it pushes it to rank 0.

A status is read in a thread, so a main thread that is blocked does not prevent it. It
has the stack (``stacks``) and torch's record of collectives (``flight_recorder``).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_ddp_ext.rendezvous.named_barrier import Call
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.flight_recorder import (
    GroupProgress,
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
class Status:
    """What a rank does.

    Attributes:
        who: the rank.
        number: counts what this rank has pushed.
        question: how long which rank has waited, while it asks which one it waits for.
        place: file and line of its main thread, in the user's code.
        is_in_collective: whether its main thread is in C++, in code of a collective or
            a backward pass.
        cpu_seconds: the processor time of its main thread; 0 with CUDA, which may poll
            while it waits.
        groups: its collectives in each group, as far as torch records them.
        has_timed_out: whether it has waited in a collective for the timeout.
        has_broken_collective: whether another rank probably broke its collective, which
            it handles now.
        calls_made: the number of calls of named barriers that it has started.
        awaited: the call of a named barrier that it waits in.
    """

    who: RankInfo
    number: int = 0
    question: str = ""
    place: str = ""
    is_in_collective: bool = False
    cpu_seconds: float = 0.0
    groups: list[GroupProgress] = field(default_factory=list)
    has_timed_out: bool = False
    has_broken_collective: bool = False
    calls_made: int = 0
    awaited: Call | None = None

    @property
    def is_blocked(self) -> bool:
        """Whether its main thread cannot continue before other ranks make its calls."""
        return self.is_in_collective or self.awaited is not None

    @property
    def waits(self) -> bool:
        """Whether it may be waiting for another rank."""
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

    def with_changes(self, changed: dict[str, Any]) -> Status:
        """Return this status with other fields, as ``dataclasses.asdict`` returns them."""
        fields = dict(changed)
        if "who" in fields:
            fields["who"] = RankInfo(**fields["who"])
        if "groups" in fields:
            fields["groups"] = [GroupProgress.from_dict(each) for each in fields["groups"]]
        if fields.get("awaited") is not None:
            fields["awaited"] = Call(**fields["awaited"])
        return replace(self, **fields)


def read_status(context: ProcessContext, **values: Any) -> Status:
    """Return this rank's status; not for the main thread, whose stack it reads.

    ``values`` are attributes that this function does not know.
    """
    frame = main_frame()
    groups = read_progress()
    return Status(
        context.peers.mine,
        place=call_site_of(frame),
        is_in_collective=is_in_collective(frame) or is_in_backward(frame),
        cpu_seconds=0.0 if torch.cuda.is_initialized() else _cpu_seconds(),
        groups=groups,
        has_timed_out=has_timed_out(groups, context.groups.timeout),
        calls_made=context.barriers.made,
        awaited=context.barriers.awaited,
        **values,
    )


def _cpu_seconds() -> float:
    """Return the processor time of the main thread."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    return time.clock_gettime(time.pthread_getcpuclockid(main_thread))
