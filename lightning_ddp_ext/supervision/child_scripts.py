"""Join the ranks that a script started by running itself again.

The script is a rank itself: local rank 0. It waits for the others at its exit.
"""

from __future__ import annotations

import atexit
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

from lightning_ddp_ext.supervision.process_exits import (
    END_WITHIN,
    status_in_words,
    stop_processes,
)
from lightning_ddp_ext.supervision.signals import STOP_STATUSES

# Seconds for which a stuck child may delay the exit of this process. They also apply after
# sys.exit(1), which an exit handler cannot distinguish from success.
EXIT_WITHIN = 600.0


@dataclass(frozen=True)
class ChildScripts:
    """The ranks of this node that local rank 0 started by running its script again.

    Args:
        children: their processes, in the order of their local ranks, which start at 1.
        variables: the environment variables that this process shares with them in a run.
        exit_within: the seconds that this process waits for them at exit.
        save_within: the seconds until children that are still saving are then killed.
    """

    children: list[subprocess.Popen[bytes]]
    variables: dict[str, str]
    exit_within: float
    save_within: float

    def failure(self) -> str | None:
        """Describe a child that exited before all ranks had connected, if any."""
        for local_rank, child in enumerate(self.children, start=1):
            status = child.poll()
            if status is not None:
                return (
                    f"local rank {local_rank} (host {socket.gethostname()}, pid {child.pid})"
                    f" {status_in_words(status)} before all ranks had connected; look at its output"
                )
        return None

    def join_at_exit(self) -> None:
        """Wait for the children for a limited time, stop those that still run, and report.

        The time is shorter after an exception, which the other ranks may have caused or
        follow, so that only killed children are then reported.
        """
        # Python stores an exception other than SystemExit before it calls exit handlers.
        has_raised = getattr(sys, "last_value", None) is not None
        seconds = END_WITHIN if has_raised else self.exit_within
        stopped: list[int] = []
        with suppress(KeyboardInterrupt):  # stop_processes has then killed the children
            stopped = stop_processes(self.children, seconds, self.save_within)
        for index, child in enumerate(self.children):
            status = child.returncode
            verdict = status_in_words(status)
            if index in stopped:
                verdict = f"did not exit within {seconds:g} s and was stopped"
            is_expected = status == 0 or status in STOP_STATUSES or (has_raised and status > 0)
            if not is_expected:
                sys.stderr.write(f"local rank {index + 1} (pid {child.pid}) {verdict}\n")


_started: ChildScripts | None = None


def started_ranks() -> ChildScripts | None:
    """Return the ranks that this process started by running its script again, if any."""
    return _started


def record_started(started: ChildScripts) -> None:
    """Record the ranks that this process started, and join them at exit; called once."""
    global _started
    _started = started
    atexit.register(started.join_at_exit)
