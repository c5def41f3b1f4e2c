"""Handle signals that request a stop, call the earlier handlers, and reinstate them.

Python calls a handler in the main thread after that thread returns from C code, but a
thread that waits there for a missing rank never returns. So a second thread also
receives each signal, and calls ``on_signal``. In the main thread:

==================================================  ====================================
A signal arrives                                    The handler
==================================================  ====================================
after the run, because its teardown was skipped     reinstates the earlier handler, and
                                                    raises the signal again
during a run: Ctrl-C again                          raises ``KeyboardInterrupt``
during a run                                        records it, and calls the user's own
==================================================  ====================================

A teardown is skipped if an ``on_exception`` hook raises.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning_ddp_ext.threads import start_thread


class StopSignals:
    """Handlers for signals during one run, in front of the existing ones.

    Python's own handler for Ctrl-C would raise in the middle of a step, so it is called
    only after a second Ctrl-C.

    Args:
        on_signal: called with the signal's number, in the second thread.
        run_has_ended: returns whether the earlier handlers should take over; called in
            the main thread.

    Attributes:
        received: the signals that the main thread has received, in order.
    """

    def __init__(
        self, on_signal: Callable[[int], None], run_has_ended: Callable[[], bool] = lambda: False
    ) -> None:
        self.received: list[int] = []
        self._has_passed_on = False  # one of them, to an earlier handler
        self._on_signal = on_signal
        self._run_has_ended = run_has_ended
        # While the handlers are installed: the second thread, and the earlier handlers that
        # are not reinstated yet.
        self._thread: _SignalThread | None = None
        self._earlier_handlers: dict[int, Any] = {}

    def install(self, *signals: signal.Signals) -> None:
        """Install handlers for these signals, except for ignored ones; called once.

        They replace those of a run whose teardown was skipped. Do nothing outside of
        the main thread.
        """
        global _installed
        if threading.current_thread() is not threading.main_thread():
            return
        if _installed is not None:
            _installed.restore()
        handled = {each for each in signals if signal.getsignal(each) is not signal.SIG_IGN}
        self._thread = _SignalThread(handled, self._on_signal)
        for signum in handled:
            self._earlier_handlers[signum] = signal.signal(signum, self._handle)
        _installed = self

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal as in the table of the module, row by row."""
        earlier = self._earlier_handlers.get(signum)
        if earlier is not None and self._run_has_ended():
            signal.signal(signum, earlier)
            signal.raise_signal(signum)
            return
        if signum == signal.SIGINT and signum in self.received:
            signal.default_int_handler(signum, frame)
        self.received.append(signum)
        if callable(earlier) and earlier is not signal.default_int_handler:
            self._has_passed_on = True
            earlier(signum, frame)

    def restore(self) -> None:
        """Reinstate the earlier handlers, except where ours has been replaced since.

        End the second thread, after it has handled what has arrived.
        """
        thread = self._reinstate()
        if thread is not None:
            thread.end()

    def _reinstate(self) -> _SignalThread | None:
        """Undo :meth:`install`, except that the thread, which is returned, still runs.

        A forked child lacks the thread. Return ``None`` if no handlers are installed.
        """
        global _installed
        thread = self._thread
        if thread is None:
            return None
        self._thread = None
        _installed = None
        while self._earlier_handlers:
            signum, earlier = self._earlier_handlers.popitem()
            # After a KeyboardInterrupt, Lightning ignores SIGINT; early in a run, it
            # may not undo this.
            is_unchanged = signal.getsignal(signum) in (self._handle, signal.SIG_IGN)
            if is_unchanged and earlier is not None:
                signal.signal(signum, earlier)
        signal.set_wakeup_fd(thread.earlier_descriptor)
        return thread

    def raise_late(self) -> None:
        """Raise the last signal again, for the handlers that :meth:`restore` reinstated.

        Do nothing if an earlier handler was called when a signal arrived.
        """
        if self.received and not self._has_passed_on:
            os.kill(os.getpid(), self.received[-1])


# The object whose handlers are installed in this process.
_installed: StopSignals | None = None


def _drop_in_child() -> None:
    """Drop the handlers in a forked child, such as a loader worker.

    Signals to it are not meant for its parent.
    """
    if _installed is not None:
        _installed._reinstate()


os.register_at_fork(after_in_child=_drop_in_child)


class _SignalThread:
    """A thread that receives signals, whatever the main thread does.

    Python's C handler immediately writes each signal's number to a socket, from which
    the thread reads.

    Args:
        handled: the signals for which the thread calls ``on_signal``.
        on_signal: called with the signal's number.

    Attributes:
        earlier_descriptor: the descriptor to which Python's C handler wrote before.
    """

    def __init__(self, handled: set[signal.Signals], on_signal: Callable[[int], None]) -> None:
        reader, self._writer = socket.socketpair()
        reader.setblocking(True)  # regardless of socket.setdefaulttimeout
        self._writer.setblocking(False)
        self._thread = start_thread("ddpx-signals", _listen, reader, handled, on_signal)
        self.earlier_descriptor = signal.set_wakeup_fd(
            self._writer.fileno(), warn_on_full_buffer=False
        )

    def end(self) -> None:
        """End the thread, after it has handled the numbers that have been written."""
        with self._writer as writer:
            writer.shutdown(socket.SHUT_RDWR)  # also works if a forked child has a copy
        self._thread.join()


def _listen(
    reader: socket.socket, handled: set[signal.Signals], on_signal: Callable[[int], None]
) -> None:
    """Call ``on_signal`` with each number that is read, until the other end is shut down."""
    with reader:
        while numbers := reader.recv(64):
            for signum in handled.intersection(numbers):
                on_signal(signum)


def status_of(signum: int) -> int:
    """Return the exit status after a signal, as shells and schedulers write it.

    >>> status_of(signal.SIGTERM)
    143
    """
    return 128 + signum


# The statuses of processes that stopped cleanly after a signal.
STOP_STATUSES = {status_of(signum) for signum in signal.valid_signals()}
