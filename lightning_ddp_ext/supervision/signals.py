"""Signals that ask a process to stop: noted, passed on to the handlers that were there, and given back to them."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_ddp_ext.at_exit import end_at_once

# Seconds in which a process that ends because of another rank has said so.
_SAYS_WHY_WITHIN = 6.0
_deferred_at = 0.0


class StopSignals:
    """Handlers for signals, in front of those that are there.

    Python calls a handler in the main thread, when that is done with what it does in C: never, if it waits there for
    a rank that does not come. So a thread hears of each signal, too, from Python's own handler in C, which writes the
    signal's number to a descriptor at once.

    A handler of the user's is called after ours. Python's own for Ctrl-C is not: it would raise in the middle of a
    step. It is what a second Ctrl-C gets, though.

    Args:
        hear: called with the signal's number in the thread.
        note: called with it in the main thread, between any two instructions of its own: it must take no lock that
            the main thread may hold.
    """

    def __init__(self, hear: Callable[[int], None], note: Callable[[int], None]) -> None:
        self._hear = hear
        self._note = note
        self._before: dict[int, Any] = {}
        self._noted: set[int] = set()
        self.has_passed_on = False
        """Whether a handler that was there before has been called."""
        self._writer: socket.socket | None = None
        self._listener: threading.Thread | None = None
        self._former_descriptor = -1

    def install(self, *signals: signal.Signals) -> None:
        """Take these signals over, but for those that are ignored. Outside of the main thread this does nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        self.has_passed_on = False
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._former_descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for each in signals:
            if signal.getsignal(each) is not signal.SIG_IGN:
                before = signal.signal(each, self._handle)
                self._before[each] = signal.SIG_DFL if before is _end_soon else before
        taken = frozenset(self._before)
        self._listener = threading.Thread(target=self._listen, args=[reader, taken], name="ddpx-signals", daemon=True)
        self._listener.start()
        _installed.add(self)

    def restore(self) -> None:
        """Put back what was there, but for handlers that somebody has replaced since."""
        if self._writer is None or self._listener is None:
            return
        writer, listener = self._writer, self._listener
        self._put_back()
        writer.shutdown(socket.SHUT_RDWR)  # also where a child that was forked has a copy of it
        writer.close()
        listener.join()

    def _put_back(self) -> None:
        _installed.discard(self)
        self._noted.clear()
        while self._before:
            each, handler = self._before.popitem()
            if signal.getsignal(each) == self._handle and handler is not None:
                signal.signal(each, handler)
        assert self._writer is not None
        current = signal.set_wakeup_fd(self._former_descriptor)
        if current != self._writer.fileno():
            signal.set_wakeup_fd(current)
        self._writer = self._listener = None

    def _listen(self, reader: socket.socket, taken: frozenset[int]) -> None:
        with reader:
            while numbers := reader.recv(64):
                if self._former_descriptor >= 0:
                    with suppress(OSError):
                        os.write(self._former_descriptor, numbers)
                for signum in numbers:
                    if signum in taken:
                        self._hear(signum)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        before = self._before.get(signum)
        if signum == signal.SIGINT and signum in self._noted:
            signal.default_int_handler(signum, frame)
        self._noted.add(signum)
        self._note(signum)
        if callable(before) and before is not signal.default_int_handler:
            self.has_passed_on = True
            before(signum, frame)


_installed: weakref.WeakSet[StopSignals] = weakref.WeakSet()


def _give_back() -> None:
    """In a forked child, such as a loader's worker: its signals are not its parent's."""
    for signals in list(_installed):
        signals._put_back()
    if signal.getsignal(signal.SIGTERM) is _end_soon:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_give_back)


def has_handler(signum: signal.Signals) -> bool:
    """Whether a signal has been given to somebody: a function, or C code such as ``faulthandler``'s.

    Python does not know of the latter; the kernel does, on Linux.
    """
    if signal.getsignal(signum) is not signal.SIG_DFL:
        return True
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


def deliver(signum: int) -> None:
    """Send this process a signal, for whoever handles it now."""
    os.kill(os.getpid(), signum)


def defer_sigterm() -> None:
    """Have SIGTERM end this process a little later than at once, if nobody handles it. For the main thread.

    A launcher sends it to the other ranks as soon as one of them has died, and these have yet to say which.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        global _deferred_at
        _deferred_at = time.monotonic()
        signal.signal(signal.SIGTERM, _end_soon)


def _end_soon(signum: int, frame: FrameType | None) -> None:
    seconds = max(0.0, _deferred_at + _SAYS_WHY_WITHIN - time.monotonic())
    timer = threading.Timer(seconds, end_at_once, [status_of(signum)])
    timer.name = "ddpx-sigterm"
    timer.daemon = True
    timer.start()


def status_of(signum: int) -> int:
    """The exit status of a process that stopped because of a signal, as shells and schedulers write it.

    >>> status_of(signal.SIGTERM)
    143
    """
    return 128 + signum


# Of processes that were asked to stop and did so in good order.
STOP_STATUSES = {status_of(signum) for signum in signal.valid_signals()}
