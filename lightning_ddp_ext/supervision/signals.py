"""Signals that ask a process to stop: noted, passed on to the handlers that were there, and given back to them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


class StopSignals:
    """Handlers for signals, in front of those that are there; they do nothing but call ``note``.

    A handler of the user's is called after ours. Python's own for Ctrl-C is not: it would raise in the middle of a
    step. It is what a second Ctrl-C gets, though.

    Args:
        note: called with the signal's number in the main thread, between any two instructions of its own: it must take
            no lock that the main thread may hold.
    """

    def __init__(self, note: Callable[[int], None]) -> None:
        self._note = note
        self._before: dict[int, Any] = {}
        self._noted: set[int] = set()

    def install(self, *signals: signal.Signals) -> None:
        """Take these signals over, but for those that are ignored. Outside of the main thread this does nothing."""
        if threading.current_thread() is threading.main_thread():
            for each in signals:
                if signal.getsignal(each) is not signal.SIG_IGN:
                    self._before[each] = signal.signal(each, self._handle)

    def restore(self) -> None:
        """Put back the handlers that were there, but for those that somebody has replaced since."""
        self._noted.clear()
        while self._before:
            each, handler = self._before.popitem()
            if signal.getsignal(each) == self._handle and handler is not None:
                signal.signal(each, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        before = self._before.get(signum)
        if signum == signal.SIGINT and signum in self._noted:
            signal.default_int_handler(signum, frame)
        self._noted.add(signum)
        self._note(signum)
        if callable(before) and before is not signal.default_int_handler:
            before(signum, frame)


def deliver(signum: int) -> None:
    """Send this process a signal, for whoever handles it now."""
    os.kill(os.getpid(), signum)


def status_of(signum: int) -> int:
    """The exit status of a process that stopped because of a signal, as shells and schedulers write it.

    >>> status_of(signal.SIGTERM)
    143
    """
    return 128 + signum
