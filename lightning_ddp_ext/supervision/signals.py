"""Take over signals that ask a process to stop, call the handlers that were there, and give the signals back."""

from __future__ import annotations

import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_ddp_ext.at_exit import Limit

# Seconds in which a process that ends because of another rank prints the cause.
_SAYS_WHY_WITHIN = 6.0


class StopSignals:
    """Handlers for signals, in front of those that are there.

    Python calls a handler in the main thread, when that is done with what it does in C: never, if it waits there for
    a rank that does not come. So a thread hears of each signal, too, from Python's own handler in C, which writes the
    signal's number to a descriptor at once.

    A handler of the user's is called after ours. Python's own for Ctrl-C is not: it would raise in the middle of a
    step. It is what a second Ctrl-C gets, though.

    Args:
        hear: called with the signal's number in the thread.
        is_over: whether signals are left to the handlers that were there; asked in the main thread.

    Attributes:
        noted: the last signal that has come to the main thread.
        has_passed_on: whether a handler that was there before has been called.
    """

    def __init__(self, hear: Callable[[int], None], is_over: Callable[[], bool] = lambda: False) -> None:
        self.noted: int | None = None
        self.has_passed_on = False
        self._hear, self._is_over = hear, is_over
        self._before: dict[int, Any] = {}
        self._is_interrupted = False
        self._writer: socket.socket | None = None
        self._listener: threading.Thread | None = None
        self._former_descriptor = -1

    def install(self, *signals: signal.Signals) -> None:
        """Take these signals over, but for those that are ignored. Outside of the main thread this does nothing."""
        self.noted, self.has_passed_on, self._is_interrupted = None, False, False
        if threading.current_thread() is not threading.main_thread():
            return
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._former_descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for each in signals:
            if signal.getsignal(each) is not signal.SIG_IGN:
                before = signal.signal(each, self._handle)
                self._before[each] = signal.SIG_DFL if isinstance(before, _Deferral) else before
        taken = frozenset(self._before)
        self._listener = threading.Thread(target=self._listen, args=[reader, taken], name="ddpx-signals", daemon=True)
        self._listener.start()
        _installed.add(self)

    def restore(self) -> None:
        """Put back what was there, but for handlers that somebody has replaced since."""
        writer, listener = self._writer, self._listener
        if writer is None or listener is None:
            return
        self._put_back(writer)
        writer.shutdown(socket.SHUT_RDWR)  # also where a child that was forked has a copy of it
        writer.close()
        listener.join()

    def _put_back(self, writer: socket.socket) -> None:
        _installed.discard(self)
        while self._before:
            each, handler = self._before.popitem()
            # Lightning ignores SIGINT after a KeyboardInterrupt, and forgets it if the run had hardly begun.
            if signal.getsignal(each) in (self._handle, signal.SIG_IGN) and handler is not None:
                signal.signal(each, handler)
        current = signal.set_wakeup_fd(self._former_descriptor)
        if current != writer.fileno():
            signal.set_wakeup_fd(current)
        self._writer = self._listener = None

    def _listen(self, reader: socket.socket, taken: frozenset[int]) -> None:
        with reader:
            while numbers := reader.recv(64):
                if self._former_descriptor >= 0:
                    with suppress(OSError):
                        os.write(self._former_descriptor, numbers)
                for signum in taken.intersection(numbers):
                    self._hear(signum)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        before = self._before.get(signum)
        if before is not None and self._is_over():  # not torn down, as after an error in a callback's ``on_exception``
            signal.signal(signum, before)
            signal.raise_signal(signum)
            return
        if signum == signal.SIGINT and self._is_interrupted:
            signal.default_int_handler(signum, frame)
        self._is_interrupted = self._is_interrupted or signum == signal.SIGINT
        self.noted = signum
        if callable(before) and before is not signal.default_int_handler:
            self.has_passed_on = True
            before(signum, frame)


_installed: weakref.WeakSet[StopSignals] = weakref.WeakSet()


def _give_back() -> None:
    """In a forked child, such as a loader's worker: its signals are not its parent's."""
    for signals in list(_installed):
        if signals._writer is not None:
            signals._put_back(signals._writer)
    if isinstance(signal.getsignal(signal.SIGTERM), _Deferral):
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


def defer_sigterm() -> None:
    """Have SIGTERM end this process some seconds from now, unless another handler is set. For the main thread.

    A launcher sends it to the other ranks as soon as one of them has died or failed, and these have yet to say which.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _Deferral())


class _Deferral:
    """A handler that waits until the cause is printed, and then does what SIGTERM does by default.

    Its thread starts before the signal: a handler that starts one may deadlock.
    """

    def __init__(self) -> None:
        self._is_requested = self._is_over = False
        Limit("ddpx-sigterm").start(_SAYS_WHY_WITHIN, status_of(signal.SIGTERM), lambda: "", is_void=self._is_void)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._is_requested = True  # before the look: the thread sets and looks the other way round
        if self._is_over:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

    def _is_void(self) -> bool:
        self._is_over = True
        return not self._is_requested


def status_of(signum: int) -> int:
    """The exit status of a process that stopped because of a signal, as shells and schedulers write it.

    >>> status_of(signal.SIGTERM)
    143
    """
    return 128 + signum


# Of processes that were asked to stop and did so in good order.
STOP_STATUSES = {status_of(signum) for signum in signal.valid_signals()}
