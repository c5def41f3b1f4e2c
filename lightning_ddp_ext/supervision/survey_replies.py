"""Describe this rank to a survey, from the channel's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_ddp_ext.rendezvous.peers import current_run, joint_runs
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.remote_calls import RemoteCalls
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.flight import Flight, flights, unfinished
from lightning_ddp_ext.supervision.report import Report
from lightning_ddp_ext.supervision.stacks import (
    call_site_of,
    is_in_backward,
    is_in_collective,
    main_frame,
    may_be_waiting_for_ranks,
)

# The share of its timeout after which a collective counts as timed out. A rank may have
# entered its last collective a little after the one that timed out.
_SHARE_OF_TIMEOUT = 0.9


@dataclass(frozen=True)
class Glance:
    """The short reply of a rank, which does not disturb its work.

    Attributes:
        waits: the calls in which the rank waits, or in which its device does.
        is_blocked: as in a ``Report``.
        is_in_run: as in a ``Report``.
    """

    waits: list[str]
    is_blocked: bool
    is_in_run: bool


class SurveyReplies:
    """This rank's replies to surveys.

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
        self._context = context
        self._peers = context.peers
        self._remote = RemoteCalls(
            context.peers,
            "survey reply",
            glance=lambda: asdict(self._glance()),
            report=lambda: asdict(self.report()),
            calls=lambda: asdict(self._with_calls(report_of(self._peers.mine))),
        )

    def collect(self, function: str, ranks: Collection[int], seconds: float) -> dict[int, Any]:
        """On rank 0, return the replies of the ranks that answer within ``seconds``.

        Args:
            function: ``"glance"``, ``"report"``, or ``"calls"`` for a report with the
                calls only.
            ranks: the ranks that reply.
            seconds: the longest wait.
        """
        replies = self._remote.call(ranks, function)
        self._peers.wait_for(lambda: len(replies) == len(ranks), seconds)
        with self._peers.arrived:
            return replies.copy()

    def report(self) -> Report:
        """Return this rank's report."""
        return self._with_calls(self.describe())

    def waits(self) -> list[str]:
        """Return the calls in which this rank waits, or in which its device does."""
        call = self._context.barriers.awaited
        return unfinished() + ([] if call is None else [f"call {call.number}"])

    def has_timed_out(self, collectives: Collection[Flight]) -> bool:
        """Whether a collective of this rank took as long as its timeout.

        Also true if torch has not recorded any.
        """
        timeout = self._context.groups.timeout.total_seconds()
        return not collectives or any(
            flight.seconds >= _SHARE_OF_TIMEOUT * min(timeout, flight.limit)
            for flight in collectives
        )

    def _glance(self) -> Glance:
        return Glance(self.waits(), self._is_blocked(), current_run() is not None)

    def _is_blocked(self) -> bool:
        frame = main_frame()
        is_in_barrier = self._context.barriers.awaited is not None
        return is_in_barrier or is_in_collective(frame) or is_in_backward(frame)

    def _with_calls(self, report: Report) -> Report:
        """Return a report with the calls in which this rank waits."""
        barriers = self._context.barriers
        return replace(
            report,
            is_waiting=report.is_waiting or self.has_broken_collective,
            is_blocked=self._is_blocked(),
            # CUDA may poll while it waits.
            cpu_seconds=0.0 if self._context.groups.uses_nccl else _cpu_seconds(),
            has_timed_out=self.has_timed_out(report.flights),
            calls=barriers.made,
            awaited=barriers.awaited,
            run=joint_runs(),
            is_in_run=current_run() is not None,
        )


def report_of(who: RankInfo, **facts: Any) -> Report:
    """Return the report of this rank; not for the main thread."""
    frame = main_frame()
    is_waiting = may_be_waiting_for_ranks(frame)
    return Report(who, place=call_site_of(frame), is_waiting=is_waiting, flights=flights(), **facts)


def _cpu_seconds() -> float:
    """Return the processor time of the main thread, or 0 where it is unknown."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    ident = threading.main_thread().ident
    return 0.0 if clock_of is None or ident is None else time.clock_gettime(clock_of(ident))
