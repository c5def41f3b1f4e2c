"""Handle signals that request a stop, call the earlier handlers, and reinstate them.

Python calls a handler in the main thread after that thread returns from C code, but a
thread that waits there for a missing rank never returns. So a second thread also
receives each signal: Python's C handler immediately writes the signal's number to a
descriptor, which that thread reads.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_ddp_ext.forced_exit import ForcedExit

# Seconds within which a process that exits because of another rank prints the cause.
_SECONDS_TO_PRINT = 6.0

# The objects whose handlers are installed; a forked child drops them.
_installed: weakref.WeakSet[StopSignals] = weakref.WeakSet()


class StopSignals:
    """Handlers for signals, in front of the existing ones.

    A user's handler is called after ours. Python's own handler for Ctrl-C would raise
    in the middle of a step, so it is called only after a second Ctrl-C.

    Args:
        on_signal: called with the signal's number, in the second thread.
        run_has_ended: returns whether the earlier handlers should take over; called in
            the main thread.

    Attributes:
        received: the last signal that the main thread received.
        has_passed_on: whether an earlier handler was called.
    """

    def __init__(
        self, on_signal: Callable[[int], None], run_has_ended: Callable[[], bool] = lambda: False
    ) -> None:
        self.received: int | None = None
        self.has_passed_on = False
        self._on_signal = on_signal
        self._run_has_ended = run_has_ended
        self._earlier_handlers: dict[int, Any] = {}
        self._is_interrupted = False
        self._listener: _Listener | None = None  # while the handlers are installed

    def install(self, *signals: signal.Signals) -> None:
        """Install handlers for these signals, except for ignored ones.

        Do nothing outside of the main thread.
        """
        self.received = None
        self.has_passed_on = False
        self._is_interrupted = False
        if threading.current_thread() is not threading.main_thread():
            return
        handled = {each for each in signals if signal.getsignal(each) is not signal.SIG_IGN}
        self._listener = _Listener(handled, self._on_signal)
        for signum in handled:
            earlier = signal.signal(signum, self._handle)
            is_deferral = isinstance(earlier, DeferredSigterm)
            self._earlier_handlers[signum] = signal.SIG_DFL if is_deferral else earlier
        _installed.add(self)

    def restore(self, *, defers_sigterm: bool = False) -> None:
        """Reinstate the earlier handlers, except where ours has been replaced since.

        With ``defers_sigterm``, SIGTERM then ends this process some seconds later, if
        it had no handler: launchers send it to the other ranks as soon as one rank dies
        or fails, before they can print the cause.
        """
        listener = self._listener
        if listener is None:
            return
        # Before our handler is removed, so that SIGTERM never ends this process early.
        if defers_sigterm and self._earlier_handlers.get(signal.SIGTERM) is signal.SIG_DFL:
            self._earlier_handlers[signal.SIGTERM] = DeferredSigterm()
        self._reinstate()
        listener.stop()

    def _reinstate(self) -> None:
        _installed.discard(self)
        while self._earlier_handlers:
            signum, earlier = self._earlier_handlers.popitem()
            # After a KeyboardInterrupt, Lightning ignores SIGINT; early in a run, it
            # may not undo this.
            is_unchanged = signal.getsignal(signum) in (self._handle, signal.SIG_IGN)
            if is_unchanged and earlier is not None:
                signal.signal(signum, earlier)
        assert self._listener is not None
        self._listener.reinstate_earlier_descriptor()
        self._listener = None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        earlier = self._earlier_handlers.get(signum)
        if earlier is not None and self._run_has_ended():
            # The teardown, which reinstates the handlers, was skipped, because an
            # ``on_exception`` hook raised.
            signal.signal(signum, earlier)
            signal.raise_signal(signum)
            return
        is_interrupt = signum == signal.SIGINT
        if is_interrupt and self._is_interrupted:
            signal.default_int_handler(signum, frame)
        self._is_interrupted |= is_interrupt
        self.received = signum
        if callable(earlier) and earlier is not signal.default_int_handler:
            self.has_passed_on = True
            earlier(signum, frame)


class _Listener:
    """A thread that calls ``on_signal`` with the number of each signal that arrives.

    Must be made in the main thread.

    Args:
        signals: the signals that count.
        on_signal: called in the thread.
    """

    def __init__(self, signals: Collection[int], on_signal: Callable[[int], None]) -> None:
        self._signals = frozenset(signals)
        self._on_signal = on_signal
        reader, self._writer = socket.socketpair()
        reader.setblocking(True)  # regardless of socket.setdefaulttimeout
        self._writer.setblocking(False)
        # Python's C handler writes to this descriptor from now on.
        self._earlier_descriptor = signal.set_wakeup_fd(
            self._writer.fileno(), warn_on_full_buffer=False
        )
        self._thread = threading.Thread(
            target=self._listen, args=[reader], name="ddpx-signals", daemon=True
        )
        self._thread.start()

    def _listen(self, reader: socket.socket) -> None:
        with reader:
            while numbers := reader.recv(64):
                if self._earlier_descriptor >= 0:
                    with suppress(OSError):
                        os.write(self._earlier_descriptor, numbers)
                for signum in self._signals.intersection(numbers):
                    self._on_signal(signum)

    def reinstate_earlier_descriptor(self) -> None:
        """Have Python write to the earlier descriptor, unless ours was replaced."""
        current = signal.set_wakeup_fd(self._earlier_descriptor)
        if current != self._writer.fileno():
            signal.set_wakeup_fd(current)

    def stop(self) -> None:
        """End the thread, after it has handled what has arrived."""
        self._writer.shutdown(socket.SHUT_RDWR)  # also works if a forked child has a copy
        self._writer.close()
        self._thread.join()


class DeferredSigterm:
    """A handler that ends this process some seconds after it was made.

    The exit status is that of SIGTERM. The handler's thread starts in advance, since a
    handler that starts a thread may deadlock.
    """

    def __init__(self) -> None:
        self._has_arrived = False
        self._time_is_up = False
        ForcedExit("ddpx-sigterm").start(
            _SECONDS_TO_PRINT, status_of(signal.SIGTERM), lambda: "", is_needed=self._expire
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


def _drop_in_child() -> None:
    """Drop the handlers in a forked child, such as a loader worker.

    Signals to it are not meant for its parent.
    """
    for signals in list(_installed):
        signals._reinstate()
    if isinstance(signal.getsignal(signal.SIGTERM), DeferredSigterm):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_drop_in_child)


def has_handler(signum: signal.Signals) -> bool:
    """Whether a signal is ignored or has a handler, in Python or in C."""
    if signal.getsignal(signum) is not signal.SIG_DFL:
        return True
    # Python does not report handlers in C, but the kernel lists them.
    status = Path("/proc/self/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    mask = int(caught.split()[1], 16)
    return bool(mask >> (signum - 1) & 1)


def without_handler(*signals: signal.Signals) -> list[signal.Signals]:
    """Return the signals that would end this process: neither handled nor ignored."""
    return [signum for signum in signals if not has_handler(signum)]


def status_of(signum: int) -> int:
    """Return the exit status after a signal, as shells and schedulers write it.

    >>> status_of(signal.SIGTERM)
    143
    """
    return 128 + signum


# The statuses of processes that stopped in order after a signal.
STOP_STATUSES = {status_of(signum) for signum in signal.valid_signals()}
