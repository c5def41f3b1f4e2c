"""Delay the end of this process by SIGTERM, so that it can print a cause first."""

from __future__ import annotations

import signal
from types import FrameType

from lightning_ddp_ext.forced_exit import ForcedExit

STATUS = 128 + signal.SIGTERM  # as shells and schedulers write it

# Seconds within which a process that exits because of another rank prints the cause.
_SECONDS_TO_PRINT = 6.0


class DeferredSigterm:
    """A handler that ends this process some seconds after it was made.

    The exit status is that of SIGTERM. The handler's thread starts in advance, since a
    handler that starts a thread may deadlock.
    """

    def __init__(self) -> None:
        self._has_arrived = False
        self._time_is_up = False
        ForcedExit("ddpx-sigterm").start(
            _SECONDS_TO_PRINT, STATUS, lambda: "", is_needed=self._expire
        )

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Record the signal, or end the process if the time is up."""
        # Set before the check; the thread uses the opposite order.
        self._has_arrived = True
        if self._time_is_up:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

    def _expire(self) -> bool:
        """Return whether a signal has arrived, so that the process must exit."""
        self._time_is_up = True
        return self._has_arrived
