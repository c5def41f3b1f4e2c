"""Detect that this rank makes no progress, and write reports of all ranks to a file.

The main thread records progress, and a second thread requests a survey once none was
recorded for the timeout. It thus notices any wait, for other ranks or in this rank's own
code.
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
from lightning_ddp_ext.rendezvous.peers import PeerEvent
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.diagnosis import Findings
from lightning_ddp_ext.supervision.report import Report, report_of
from lightning_ddp_ext.supervision.stacks import all_stacks, main_frame
from lightning_ddp_ext.supervision.survey import Survey
from lightning_ddp_ext.threads import start_thread

OnHang = Literal["abort", "continue"]

_OVERSLEPT = 1.0  # seconds; a thread that wakes up later was stopped with its process
_TO_WRITE = 2.0  # seconds


class Watchdog:
    """A thread that makes a diagnosis after ``timeout`` seconds without progress.

    Args:
        who: this process.
        survey: requests reports from the other ranks; if ``None``, this rank only
            reports on itself.
        timeout: the timeout in seconds; it starts again after each diagnosis.
        on_hang: whether all ranks stop after a diagnosis.
        directory: the directory in which diagnoses are written.
        describe: returns the main thread's activity and progress, given its innermost
            frame.
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
        self._who = who
        self._survey = survey
        self._timeout = timeout
        self._on_hang = on_hang
        self._directory = directory
        self._describe = describe
        # Each is the time.monotonic() of an event that restarts the timeout.
        self._moved_at = time.monotonic()
        self._expired_at = self._moved_at
        self._has_stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ddpx-watchdog", daemon=True)

    def start(self) -> None:
        """Start watching."""
        if self._survey is not None:
            self._survey.attach_watchdog(report=self._report, publish=self._publish)
        self._thread.start()

    def record_progress(self) -> None:
        """Restart the timeout; the code that is watched calls this."""
        self._moved_at = time.monotonic()

    def stop(self) -> None:
        """Stop watching; surveys then report that this rank has left the watched code."""
        self.record_progress()  # leaving the code is the last progress
        self._has_stopped.set()
        # The survey keeps this object, which must not keep the caller and its Trainer.
        self._describe = lambda frame: ("code after the Trainer's run", "")
        self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        while not self._has_stopped.wait(self._expires_at() - time.monotonic()):
            expires_at = self._expires_at()
            now = time.monotonic()
            if now < expires_at:  # progress was recorded while this thread waited
                continue
            self._expired_at = now
            # If the process was stopped and continued, it gets another timeout.
            if now <= expires_at + _OVERSLEPT:
                self._diagnose()

    def _expires_at(self) -> float:
        """Return the ``time.monotonic()`` at which the timeout expires."""
        # The first rank whose timeout expires makes the diagnosis for all.
        diagnosed_at = 0.0 if self._survey is None else self._survey.hang_reported_at
        return max(self._moved_at, self._expired_at, diagnosed_at) + self._timeout

    def _diagnose(self) -> None:
        """Publish the stuck rank, if any.

        With a survey, ``_publish`` is called on rank 0, or on this rank if rank 0 does
        not reply.
        """
        if self._survey is not None:
            self._survey.request("hang")
            return
        findings = Findings([self._report()])
        event = findings.stuck_rank
        if event is not None and self._publish(event, findings):
            exit_now(1)  # nothing else would unblock the main thread

    def _publish(self, event: PeerEvent, findings: Findings) -> bool:
        """Print and write a diagnosis; return whether all ranks stop."""
        is_abort = self._on_hang == "abort"
        now = datetime.now()
        path = self._directory / f"hang-{now:%Y%m%d-%H%M%S}-rank{self._who.rank}.txt"
        text = f"{now:%Y-%m-%d %H:%M:%S} {event.reason}\n\n{findings}\n"
        outcome = "every rank stops" if is_abort else "the ranks continue (on_hang='continue')"
        # The file system may have caused the hang, and must not block the diagnosis.
        writer = start_thread("ddpx-watchdog-file", _write, path, text)
        print_in_time(
            f"[rank {self._who.rank}] no progress for {self._timeout:g} s: {event.reason};"
            f" {outcome}. Stacks: {path}\n"
        )
        writer.join(_TO_WRITE)
        return is_abort

    def _report(self) -> Report:
        doing, progress = self._describe(main_frame())
        idle = time.monotonic() - self._moved_at
        has_stopped = self._has_stopped.is_set()
        return report_of(
            self._who,
            idle=idle,
            makes_no_progress=has_stopped or idle >= self._timeout,
            is_watched=not has_stopped,
            doing=doing,
            progress=progress,
            stacks=all_stacks(),
        )


def _write(path: Path, text: str) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
