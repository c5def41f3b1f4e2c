"""Detect that this rank is making no progress, and request a survey.

Every rank watches its calls that wait for other ranks; rank 0 then looks for a deadlock
that is certain. A :class:`Watchdog` also detects a rank that is stuck in its own code.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Literal

from lightning_ddp_ext.forced_exit import exit_now, print_in_time
from lightning_ddp_ext.rendezvous.peers import Peers, event_of
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.diagnosis import Findings
from lightning_ddp_ext.supervision.flight import flights, unfinished
from lightning_ddp_ext.supervision.report import Report
from lightning_ddp_ext.supervision.stacks import all_stacks, main_frame
from lightning_ddp_ext.supervision.survey import Survey
from lightning_ddp_ext.supervision.survey_replies import report_of
from lightning_ddp_ext.threads import start_thread

OnHang = Literal["abort", "continue"]

# Seconds; if the thread has overslept by more, its process was stopped.
_OVERSLEPT = 1.0
_LOOKS = 8  # checks for calls that wait, within the time after which rank 0 compares the ranks


def watch_long_waits(context: ProcessContext, survey: Survey) -> None:
    """Start a thread that looks at this rank's calls until the ranks disconnect.

    A single rank needs no such thread.
    """
    if len(context.table) > 1:
        start_thread("ddpx-waits", _watch, context, survey)


def _watch(context: ProcessContext, survey: Survey) -> None:
    since: dict[str, float] = {}
    surveyed_at = 0.0
    limit = context.peers.timeouts.deadlock
    while context.peers.cause is None:
        now = time.monotonic()
        since = {each: since.get(each, now) for each in survey.replies.waits()}
        start = min(since.values(), default=now)
        if _is_overdue(context, now - start):
            _end_overdue_collective(context.peers, survey)
            since.clear()
        elif now - max(start, surveyed_at) >= limit:
            survey.request("deadlock", "")
            surveyed_at = time.monotonic()
        pause = min(limit, context.groups.timeout.total_seconds()) / _LOOKS
        if context.has_closed.wait(pause):
            return


def _is_overdue(context: ProcessContext, seconds: float) -> bool:
    """Whether NCCL has waited for its timeout, or too long for a rank that left.

    Unlike gloo, it does not raise then.
    """
    limit = context.groups.timeout.total_seconds()
    if context.peers.cause_or_departure is not None:
        limit = context.peers.timeouts.answer
    if not context.groups.uses_nccl or seconds < limit or not unfinished():
        return False
    return any(flight.pending is not None for flight in flights())


def _end_overdue_collective(peers: Peers, survey: Survey) -> None:
    left = peers.cause_or_departure
    event = survey.request("collective", survey.waited)
    if left is not None and event is left:  # NCCL keeps no connection that closes with the rank
        peers.report(event_of("absent", peers.table[left.rank], str(left.to_error())))


class Watchdog:
    """A thread that sleeps until this rank makes no progress for ``timeout`` seconds.

    Args:
        who: this process.
        survey: requests reports from the other ranks; if ``None``, this rank only
            reports on itself.
        timeout: the timeout in seconds.
        on_hang: whether all ranks stop after a diagnosis.
        directory: the directory in which diagnoses are written.
        describe: returns the main thread's activity and progress, given its innermost
            frame.

    Attributes:
        moved_at: the ``time.monotonic()`` of the last progress; set by the code that is
            watched.
    """

    def __init__(
        self,
        who: RankInfo,
        survey: Survey | None,
        *,
        timeout: float,
        on_hang: OnHang,
        directory: Path,
        describe: Callable[[FrameType | None], tuple[str, str]],
    ) -> None:
        self.moved_at = time.monotonic()
        self._who = who
        self._survey = survey
        self._timeout = timeout
        self._on_hang = on_hang
        self._directory = directory
        self._describe = describe
        self._reported_at = self.moved_at
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ddpx-watchdog", daemon=True)

    def start(self) -> None:
        """Start watching."""
        if self._survey is not None:
            self._survey.replies.describe = self._report
            self._survey.publish = self._publish
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; surveys then report that this rank has left the watched code."""
        self._is_stopping.set()
        self.moved_at = time.monotonic()
        self._describe = lambda frame: ("code after the Trainer's run", "")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        while not self._is_stopping.wait(self._seconds_left()):
            late = -self._seconds_left()
            if late > _OVERSLEPT:
                # The process was stopped and continued, so it gets another timeout.
                self._reported_at = time.monotonic()
            elif late >= 0:
                self._diagnose()

    def _seconds_left(self) -> float:
        return max(self.moved_at, self._reported_at) + self._timeout - time.monotonic()

    def _diagnose(self) -> None:
        self._reported_at = time.monotonic()
        if self._survey is not None:
            self._survey.request("hang", "")
        elif self._publish(Findings([self._report()])):
            exit_now(1)  # nothing else would unblock the main thread

    def _publish(self, findings: Findings) -> bool:
        diagnosis = findings.diagnosis
        if diagnosis is None:
            return False
        now = datetime.now()
        path = self._directory / f"hang-{now:%Y%m%d-%H%M%S}-rank{self._who.rank}.txt"
        text = f"{now:%Y-%m-%d %H:%M:%S} {diagnosis.reason}\n\n{findings}\n"
        outcome = (
            "every rank stops"
            if self._on_hang == "abort"
            else "the ranks continue (on_hang='continue')"
        )
        # The file system may have caused the hang, and must not block the diagnosis.
        written = start_thread("ddpx-watchdog-file", _write, path, text)
        print_in_time(
            f"[rank {self._who.rank}] no progress for {self._timeout:g} s: {diagnosis.reason};"
            f" {outcome}. Stacks: {path}\n"
        )
        written.join(2.0)
        return self._on_hang == "abort"

    def _report(self) -> Report:
        # A survey is running; the next one may follow after another timeout.
        self._reported_at = time.monotonic()
        doing, progress = self._describe(main_frame())
        idle = time.monotonic() - self.moved_at
        is_outside = self._is_stopping.is_set()
        return report_of(
            self._who,
            idle=idle,
            makes_no_progress=is_outside or idle >= self._timeout,
            doing=doing,
            is_outside=is_outside,
            progress=progress,
            stacks=all_stacks(),
        )


def _write(path: Path, text: str) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
