"""Handle signals that request a stop, call the earlier handlers, and reinstate them.

Python calls a handler in the main thread after that thread returns from C code, but a
thread that waits there for a missing rank never returns. So a second thread also
receives each signal: Python's C handler immediately writes the signal's number to a
descriptor, which that thread reads, to call ``on_signal``. In the main thread:

==================================================  ====================================
A signal arrives                                    The handler
==================================================  ====================================
during a run                                        records it, and calls the user's own
during a run: Ctrl-C again                          raises ``KeyboardInterrupt``
later, because the teardown of a run was skipped    reinstates the earlier handler, and
                                                    raises the signal again
==================================================  ====================================

A teardown is skipped if an ``on_exception`` hook raises.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

from lightning_ddp_ext.threads import start_thread

# The objects whose handlers are installed; a forked child drops them.
_installed: weakref.WeakSet[StopSignals] = weakref.WeakSet()


class StopSignals:
    """Handlers for signals during one run, in front of the existing ones.

    Python's own handler for Ctrl-C would raise in the middle of a step, so it is called
    only after a second Ctrl-C.

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
        self._is_interrupted = False  # by a first Ctrl-C
        # The main thread sets these in `install`, which also sets `_thread`, the second
        # thread, and uses them until `restore`. Python's C handler writes to the socket.
        # Only this one shows whether the handlers are installed.
        self._writer: socket.socket | None = None
        self._earlier_descriptor = -1  # to which Python's C handler wrote before
        self._earlier_handlers: dict[int, Any] = {}  # of those that are not reinstated yet

    def install(self, *signals: signal.Signals) -> None:
        """Install handlers for these signals, except for ignored ones; called once.

        They replace those of a run whose teardown was skipped. Do nothing outside of
        the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for earlier in list(_installed):
            earlier.restore()
        handled = {each for each in signals if signal.getsignal(each) is not signal.SIG_IGN}
        reader, self._writer = socket.socketpair()
        reader.setblocking(True)  # regardless of socket.setdefaulttimeout
        self._writer.setblocking(False)
        self._thread = start_thread("ddpx-signals", self._listen, reader, handled)
        self._earlier_descriptor = signal.set_wakeup_fd(
            self._writer.fileno(), warn_on_full_buffer=False
        )
        for signum in handled:
            self._earlier_handlers[signum] = signal.signal(signum, self._handle)
        _installed.add(self)

    def _listen(self, reader: socket.socket, handled: Collection[int]) -> None:
        with reader:
            while numbers := reader.recv(64):
                for signum in set(handled).intersection(numbers):
                    self._on_signal(signum)

    def restore(self) -> None:
        """Reinstate the earlier handlers, except where ours has been replaced since.

        End the second thread, after it has handled what has arrived.
        """
        writer = self._writer
        if writer is not None:
            self._reinstate()
            with writer:
                writer.shutdown(socket.SHUT_RDWR)  # also works if a forked child has a copy
            self._thread.join()

    def _reinstate(self) -> None:
        """Undo :meth:`install`, except for the thread, which a forked child lacks."""
        self._writer = None
        _installed.discard(self)
        while self._earlier_handlers:
            signum, earlier = self._earlier_handlers.popitem()
            # After a KeyboardInterrupt, Lightning ignores SIGINT; early in a run, it
            # may not undo this.
            is_unchanged = signal.getsignal(signum) in (self._handle, signal.SIG_IGN)
            if is_unchanged and earlier is not None:
                signal.signal(signum, earlier)
        signal.set_wakeup_fd(self._earlier_descriptor)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal as in the table of the module, from the last row to the first."""
        earlier = self._earlier_handlers.get(signum)
        if earlier is not None and self._run_has_ended():  # the teardown was skipped
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


def _drop_in_child() -> None:
    """Drop the handlers in a forked child, such as a loader worker.

    Signals to it are not meant for its parent.
    """
    for signals in list(_installed):
        signals._reinstate()


os.register_at_fork(after_in_child=_drop_in_child)


def status_of(signum: int) -> int:
    """Return the exit status after a signal, as shells and schedulers write it.

    >>> status_of(signal.SIGTERM)
    143
    """
    return 128 + signum


# The statuses of processes that stopped cleanly after a signal.
STOP_STATUSES = {status_of(signum) for signum in signal.valid_signals()}
