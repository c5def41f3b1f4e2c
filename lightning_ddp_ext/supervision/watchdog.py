"""Notices that nothing moves any more on this rank, and has one verdict given for all of them."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Literal

from lightning_ddp_ext.supervision.courts import Court
from lightning_ddp_ext.supervision.flight import flights, why_unknown
from lightning_ddp_ext.supervision.places import place_of
from lightning_ddp_ext.supervision.stacks import all_stacks, is_waiting_for_ranks, main_frame
from lightning_ddp_ext.supervision.verdict import Case, Report, Verdict, Who

OnHang = Literal["abort", "continue"]

# Seconds that no thread waits for the processor; longer, and the whole process has stood still.
_OVERSLEPT = 1.0
_ELSEWHERE = "code after the Trainer's"

# What the main thread does, and how far it has come, given its innermost frame.
Whereabouts = Callable[["FrameType | None"], "tuple[str, str]"]


class Watchdog:
    """A daemon thread that sleeps until nothing has moved for ``timeout`` seconds.

    Args:
        who: this process.
        court: where the ranks tell each other what they do.
        timeout: seconds.
        on_hang: whether all ranks end after a verdict.
        directory: where verdicts are written to.
        whereabouts: says what the main thread does.

    Attributes:
        moved_at: when something has last moved, as ``time.monotonic()`` has it; set by whoever moves.
    """

    def __init__(
        self,
        who: Who,
        court: Court,
        *,
        timeout: float,
        on_hang: OnHang,
        directory: Path,
        whereabouts: Whereabouts,
    ) -> None:
        self.moved_at = time.monotonic()
        self._who = who
        self._court = court
        self._timeout = timeout
        self._on_hang = on_hang
        self._directory = directory
        self._whereabouts = whereabouts
        self._reported_at = self.moved_at
        self._judges_again_at = math.inf
        self._is_ending = False
        self._thread = threading.Thread(target=self._watch, name="ddpx-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._court.open(self._report)
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer; whoever asks for this rank is told that it is somewhere else."""
        self._is_ending = True
        self._court.close(_elsewhere(self._who))
        self._court.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        while not self._is_ending:
            finding = self._sleep_or_call(self._seconds_left())
            if isinstance(finding, Case):
                self._judge(finding)
            elif isinstance(finding, Verdict) and not self._is_ending:
                self._court.obey(finding)

    def _sleep_or_call(self, seconds: float) -> Case | Verdict | None:
        if seconds <= 0:
            self._judges_again_at = math.inf
            return self._court.call()
        due = time.monotonic() + seconds
        finding = self._court.sit(seconds)
        if time.monotonic() > due + _OVERSLEPT:  # it was stopped, and goes on: it is to have another timeout
            self._reported_at = time.monotonic()
        return finding

    def _seconds_left(self) -> float:
        """Until this rank is stuck, or another one that others wait for."""
        due = max(self.moved_at, self._reported_at) + self._timeout
        return min(due, self._judges_again_at) - time.monotonic()

    def _judge(self, case: Case) -> None:
        verdict = case.verdict
        longest = max((report.idle for report in case.reports if not report.is_still), default=0.0)
        self._judges_again_at = math.inf if verdict else time.monotonic() + self._timeout - longest
        if verdict is not None and not self._is_ending:
            self._publish(verdict, case)
        self._court.conclude(verdict if self._on_hang == "abort" and not self._is_ending else None)

    def _publish(self, verdict: Verdict, case: Case) -> None:
        now = datetime.now()
        path = self._directory / f"hang-{now:%Y%m%d-%H%M%S}-rank{self._who.rank}.txt"
        text = f"{now:%Y-%m-%d %H:%M:%S} {verdict.sentence}\n\n{case}\n"
        outcome = "every rank stops" if self._on_hang == "abort" else "going on, as was asked for"
        # The file system may be what hangs, and the verdict is not to wait for it.
        written = threading.Thread(target=_write, args=[path, text], name="ddpx-watchdog-file", daemon=True)
        written.start()
        sys.stderr.write(
            f"[rank {self._who.rank}] nothing has moved for {self._timeout:g} s: {verdict.sentence}; {outcome}. "
            f"Stacks of all ranks: {path}\n"
        )
        sys.stderr.flush()
        written.join(2.0)

    def _report(self) -> Report:
        self._reported_at = time.monotonic()  # a case is heard: the next one is due after another timeout
        frame = main_frame()
        doing, progress = self._whereabouts(frame)
        idle = time.monotonic() - self.moved_at
        recorded = flights()
        return Report(
            who=self._who,
            idle=idle,
            is_still=idle >= self._timeout,
            doing=doing,
            place=place_of(frame),
            is_waiting=is_waiting_for_ranks(frame),
            progress=progress if recorded is not None else f"{progress} ({why_unknown()})",
            flights=recorded,
            stacks=all_stacks(),
        )


def _elsewhere(who: Who) -> Callable[[], Report]:
    """What is reported of a rank that is not watched: it has left, and nothing is known of when it moves."""
    left_at = time.monotonic()

    def report() -> Report:
        frame = main_frame()
        return Report(
            who=who,
            idle=time.monotonic() - left_at,
            is_still=True,
            doing=_ELSEWHERE,
            place=place_of(frame),
            is_waiting=is_waiting_for_ranks(frame),
            is_outside=True,
            flights=flights(),
            stacks=all_stacks(),
        )

    return report


def _write(path: Path, text: str) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
