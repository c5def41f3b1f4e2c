"""Describe this rank to a survey, from the channel's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_ddp_ext.rendezvous.peers import current_run, joint_runs
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.flight_recorder import (
    groups_in_collectives,
    has_timed_out,
    read_progress,
)
from lightning_ddp_ext.supervision.report import Glance, Report
from lightning_ddp_ext.supervision.stacks import (
    call_site_of,
    is_in_backward,
    is_in_collective,
    main_frame,
    may_be_waiting_for_ranks,
)


class Reporter:
    """Describes this rank by a ``glance``, its ``calls``, or a ``report`` of all.

    Attributes:
        describe: returns this rank's activity and progress, as a report.
        has_broken_collective: whether another rank probably broke a collective of this
            one, which therefore counts as waiting.
    """

    def __init__(self, context: ProcessContext) -> None:
        self.describe: Callable[[], Report] = lambda: report_of(
            context.peers.mine, doing="user code", is_outside=True
        )
        self.has_broken_collective = False
        self._who = context.peers.mine
        self._groups = context.groups
        self._barriers = context.barriers

    def glance(self) -> Glance:
        """Return whether and where this rank waits."""
        return Glance(self.open_calls(), self._is_blocked(), current_run() is not None)

    def calls(self) -> Report:
        """Return a report with the calls in which this rank waits."""
        return self._with_calls(report_of(self._who))

    def report(self) -> Report:
        """Return a report with the calls, this rank's activity and its progress."""
        return self._with_calls(self.describe())

    def open_calls(self) -> list[str]:
        """Return the calls in which this rank waits, or in which its device does."""
        call = self._barriers.awaited
        barriers = [] if call is None else [f"call {call.number}"]
        return groups_in_collectives() + barriers

    def _is_blocked(self) -> bool:
        frame = main_frame()
        is_in_barrier = self._barriers.awaited is not None
        return is_in_barrier or is_in_collective(frame) or is_in_backward(frame)

    def _with_calls(self, report: Report) -> Report:
        return replace(
            report,
            is_waiting=report.is_waiting or self.has_broken_collective,
            is_blocked=self._is_blocked(),
            # CUDA may poll while it waits.
            cpu_seconds=0.0 if self._groups.uses_nccl else _cpu_seconds(),
            has_timed_out=has_timed_out(report.groups, self._groups.timeout),
            calls=self._barriers.made,
            awaited=self._barriers.awaited,
            run=joint_runs(),
            is_in_run=current_run() is not None,
        )


def report_of(who: RankInfo, **activity: Any) -> Report:
    """Return the report of this rank; not for the main thread."""
    frame = main_frame()
    is_waiting = may_be_waiting_for_ranks(frame)
    place = call_site_of(frame)
    return Report(who, place=place, is_waiting=is_waiting, groups=read_progress(), **activity)


def _cpu_seconds() -> float:
    """Return the processor time of the main thread, or 0 where it is unknown."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    ident = threading.main_thread().ident
    return 0.0 if clock_of is None or ident is None else time.clock_gettime(clock_of(ident))
