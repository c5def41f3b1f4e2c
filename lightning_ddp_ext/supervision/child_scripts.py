"""Join the ranks that a script started by running itself again.

The script is a rank itself: local rank 0. It waits for the others at its exit.
"""

from __future__ import annotations

import atexit
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

from lightning_ddp_ext.at_exit import set_exit_status
from lightning_ddp_ext.supervision.process_exits import (
    END_WITHIN,
    status_in_words,
    stop_processes,
    wait_for_exits,
)
from lightning_ddp_ext.supervision.signals import STOP_STATUSES, status_of

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
        save_within: the seconds after an exception until children that are still saving
            are killed.
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
        """Wait for the children, and exit with the status of one that failed."""
        status = self.join_or_kill()
        if status is not None:
            set_exit_status(status)

    def join_or_kill(self) -> int | None:
        """Wait for the children for a limited time, then kill those that are running.

        The time is shorter after an exception.

        Returns:
            The exit status that this process takes over from the failed child with the
            lowest local rank, as shells write it. ``None`` if it keeps its own: no
            child failed, or this process raised.
        """
        if _has_raised():
            with suppress(KeyboardInterrupt):  # stop_processes has then killed the children
                stop_processes(self.children, END_WITHIN, self.save_within)
            return None
        reason = f"did not exit within {self.exit_within:g} s and was killed"
        try:
            wait_for_exits(self.children, self.exit_within)
        except KeyboardInterrupt:
            reason = "was killed after Ctrl-C"
        why_killed = {child: reason for child in self.children if child.poll() is None}
        for child in why_killed:
            child.kill()
        wait_for_exits(list(why_killed), END_WITHIN)
        return self._report_failure(why_killed)

    def _report_failure(self, why_killed: dict[subprocess.Popen[bytes], str]) -> int | None:
        """Print how the failed child with the lowest local rank ended; return its status.

        Print nothing for a child that stopped in order after a signal.
        """
        for local_rank, child in enumerate(self.children, start=1):
            status = -signal.SIGKILL if child in why_killed else child.returncode
            if status == 0:
                continue
            if status not in STOP_STATUSES:
                verdict = why_killed.get(child, status_in_words(status))
                sys.stderr.write(f"local rank {local_rank} (pid {child.pid}) {verdict}\n")
            return status if status > 0 else status_of(-status)
        return None


def _has_raised() -> bool:
    """Whether an exception other than ``SystemExit`` ends this process.

    Python stores it in ``sys.last_value`` before it calls exit handlers.
    """
    return getattr(sys, "last_value", None) is not None


_started: ChildScripts | None = None


def started_ranks() -> ChildScripts | None:
    """Return the ranks that this process started by running its script again, if any."""
    return _started


def record_started(started: ChildScripts) -> None:
    """Record the ranks that this process started, and join them at exit; called once."""
    global _started
    _started = started
    atexit.register(started.join_at_exit)
