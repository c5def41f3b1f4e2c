"""Handle signals that request a stop, call the earlier handlers, and restore them."""

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

from lightning_ddp_ext.forced_exit import ForcedExit

# Seconds within which a process that exits because of another rank prints the cause.
_PRINTS_CAUSE_WITHIN = 6.0


class StopSignals:
    """Handlers for signals, in front of the existing ones.

    Python calls a handler in the main thread after that thread returns from C code, but
    a thread that waits there for a missing rank never returns. So a second thread also
    receives each signal: Python's C handler immediately writes the signal's number to a
    descriptor, which that thread reads.

    A user's handler is called after ours. Python's own handler for Ctrl-C would raise
    in the middle of a step, so it is called only after a second Ctrl-C.

    Args:
        on_signal: called with the signal's number, in the second thread.
        is_over: returns whether the earlier handlers should take over; called in the
            main thread.

    Attributes:
        received: the last signal that the main thread received.
        has_passed_on: whether an earlier handler was called.
    """

    def __init__(
        self, on_signal: Callable[[int], None], is_over: Callable[[], bool] = lambda: False
    ) -> None:
        self.received: int | None = None
        self.has_passed_on = False
        self._on_signal = on_signal
        self._is_over = is_over
        self._before: dict[int, Any] = {}
        self._is_interrupted = False
        self._writer: socket.socket | None = None
        self._listener: threading.Thread | None = None
        self._former_descriptor = -1

    def install(self, *signals: signal.Signals) -> None:
        """Install handlers for these signals, except for ignored ones.

        Do nothing outside of the main thread.
        """
        self.received = None
        self.has_passed_on = False
        self._is_interrupted = False
        if threading.current_thread() is not threading.main_thread():
            return
        reader, self._writer = socket.socketpair()
        reader.setblocking(True)  # regardless of socket.setdefaulttimeout
        self._writer.setblocking(False)
        self._former_descriptor = signal.set_wakeup_fd(
            self._writer.fileno(), warn_on_full_buffer=False
        )
        for each in signals:
            if signal.getsignal(each) is not signal.SIG_IGN:
                before = signal.signal(each, self._handle)
                self._before[each] = signal.SIG_DFL if isinstance(before, _Deferral) else before
        taken = frozenset(self._before)
        self._listener = threading.Thread(
            target=self._listen, args=[reader, taken], name="ddpx-signals", daemon=True
        )
        self._listener.start()
        _installed.add(self)

    def restore(self, *, defers_sigterm: bool = False) -> None:
        """Restore the earlier handlers, except where ours has been replaced since.

        With ``defers_sigterm``, SIGTERM then ends this process some seconds later, if
        it had no handler: launchers send it to the other ranks as soon as one rank dies
        or fails, before they can print the cause.
        """
        writer = self._writer
        listener = self._listener
        if writer is None or listener is None:
            return
        self._restore(writer, defers_sigterm=defers_sigterm)
        writer.shutdown(socket.SHUT_RDWR)  # also works if a forked child has a copy
        writer.close()
        listener.join()

    def _restore(self, writer: socket.socket, *, defers_sigterm: bool = False) -> None:
        _installed.discard(self)
        while self._before:
            each, handler = self._before.popitem()
            if defers_sigterm and each == signal.SIGTERM and handler is signal.SIG_DFL:
                handler = _Deferral()  # without a moment in which SIGTERM kills
            # After a KeyboardInterrupt, Lightning ignores SIGINT; early in a run, it
            # may not undo this.
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
                    self._on_signal(signum)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        before = self._before.get(signum)
        if before is not None and self._is_over():
            # Teardown was skipped, as an ``on_exception`` raised.
            signal.signal(signum, before)
            signal.raise_signal(signum)
            return
        if signum == signal.SIGINT and self._is_interrupted:
            signal.default_int_handler(signum, frame)
        self._is_interrupted = self._is_interrupted or signum == signal.SIGINT
        self.received = signum
        if callable(before) and before is not signal.default_int_handler:
            self.has_passed_on = True
            before(signum, frame)


_installed: weakref.WeakSet[StopSignals] = weakref.WeakSet()


def _drop_in_child() -> None:
    """Drop the handlers in a forked child, such as a loader worker.

    Signals to it are not meant for its parent.
    """
    for signals in list(_installed):
        if signals._writer is not None:
            signals._restore(signals._writer)
    if isinstance(signal.getsignal(signal.SIGTERM), _Deferral):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_drop_in_child)


def has_handler(signum: signal.Signals) -> bool:
    """Whether a signal is ignored or has a handler, in Python or in C."""
    if signal.getsignal(signum) is not signal.SIG_DFL:
        return True
    # Python does not report handlers in C, but the kernel lists them.
    status = Path("/proc/self/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


def without_handler(*signals: signal.Signals) -> list[signal.Signals]:
    """Return the signals that would end this process: neither handled nor ignored."""
    return [each for each in signals if not has_handler(each)]


class _Deferral:
    """A handler that ends this process after some time to print the cause.

    The exit status is that of SIGTERM. The handler's thread starts in advance, since a
    handler that starts a thread may deadlock.
    """

    def __init__(self) -> None:
        self._is_requested = self._is_over = False
        status = status_of(signal.SIGTERM)
        ForcedExit("ddpx-sigterm").start(
            _PRINTS_CAUSE_WITHIN, status, lambda: "", is_void=self._is_void
        )

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._is_requested = True  # set before the check; the thread uses the opposite order
        if self._is_over:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

    def _is_void(self) -> bool:
        self._is_over = True
        return not self._is_requested


def status_of(signum: int) -> int:
    """Return the exit status after a signal, as shells and schedulers write it.

    >>> status_of(signal.SIGTERM)
    143
    """
    return 128 + signum


# The statuses of processes that stopped in order after a signal.
STOP_STATUSES = {status_of(signum) for signum in signal.valid_signals()}
