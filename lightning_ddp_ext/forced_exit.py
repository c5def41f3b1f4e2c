"""Force the exit of this process after a time limit, which a save may extend.

A :class:`ForcedExit` starts a countdown, for example after another rank's death:

1. It waits for the time limit, unless it is cancelled before.
2. It ends if the exit is not needed, and the process continues.
3. While :func:`delaying_forced_exit` blocks run, it waits for their ends, if the
   countdown allows this.
4. It prints a message and exits.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

_SECONDS_TO_PRINT = 5.0  # the machine may be busy
_changed = threading.Condition()  # its lock protects the state of this module


@dataclass(eq=False)
class _Delay:
    """A running :func:`delaying_forced_exit` block, with its arguments."""

    seconds: float
    purpose: str
    is_needed: Callable[[], bool]


_delays: list[_Delay] = []  # in the order in which the blocks started


def _needed_delays() -> list[_Delay]:
    """Return the delays that a due exit has to wait for."""
    with _changed:
        return [delay for delay in _delays if delay.is_needed()]


@contextmanager
def delaying_forced_exit(
    seconds: float,
    purpose: str = "finish writing its checkpoint",
    *,
    is_needed: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """Delay a forced exit while the block runs.

    A forced exit follows, for example, the death of another rank.

    Args:
        seconds: the longest delay.
        purpose: what this rank will do before it exits, for a message.
        is_needed: returns whether the exit has to wait; called when it is due.
    """
    delay = _Delay(seconds, purpose, is_needed)
    with _changed:
        _delays.append(delay)
    try:
        yield
    finally:
        with _changed:
            _delays.remove(delay)
            _changed.notify_all()


class ForcedExit:
    """A countdown after which this process exits, unless it is cancelled.

    It runs in a thread called ``name``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # Of the latest countdown.
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()

    def start(
        self,
        seconds: float,
        status: int,
        message: Callable[[], str],
        *,
        is_needed: Callable[[], bool] = lambda: True,
        seconds_after_saves: float | None = None,
    ) -> None:
        """Start the countdown unless it is running.

        Must not be called in a signal handler or at interpreter shutdown.

        Args:
            seconds: the time until the exit.
            status: the exit status of the process.
            message: returns the line to print before the exit.
            is_needed: called when the time is up; if it returns False, the process
                continues.
            seconds_after_saves: seconds from the completion of an unfinished save to
                the exit; ``None`` to interrupt the save.
        """
        with _changed:
            is_running = self._thread is not None and self._thread.is_alive()
            if is_running and not self._cancelled.is_set():
                return
            self._cancelled = threading.Event()
            self._thread = threading.Thread(
                target=_count_down,
                args=[seconds, status, message, self._cancelled, is_needed, seconds_after_saves],
                name=self._name,
                daemon=True,
            )
            self._thread.start()

    def cancel(self) -> None:
        """Cancel the countdown; it can be started again."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)


def _count_down(
    seconds: float,
    status: int,
    message: Callable[[], str],
    cancelled: threading.Event,
    is_needed: Callable[[], bool],
    seconds_after_saves: float | None,
) -> None:
    """Exit after some time, unless it is cancelled; see :meth:`ForcedExit.start`."""
    if cancelled.wait(seconds) or not is_needed():
        return
    delays = _needed_delays()
    if delays and seconds_after_saves is not None:
        print_in_time(f"{message()}. This rank will {delays[-1].purpose} before it exits\n")
        with _changed:
            _changed.wait_for(
                lambda: not _needed_delays(), timeout=max(delay.seconds for delay in delays)
            )
        if cancelled.wait(seconds_after_saves):
            return
    exit_now(status, message())


def exit_now(status: int, message: str = "") -> NoReturn:
    """Kill daemonic children, such as loader workers, print the message, and exit.

    Any thread may call it.
    """
    with suppress(Exception):
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()
        print_in_time(f"{message}\n" if message else "")
    os._exit(status)


def print_in_time(text: str) -> None:
    """Print to stderr and flush the output, but give up after some seconds.

    The reader of a pipe may have stopped reading.
    """
    printer = threading.Thread(target=_print, args=[text], name="ddpx-print", daemon=True)
    printer.start()
    printer.join(_SECONDS_TO_PRINT)


def _print(text: str) -> None:
    with suppress(Exception):
        sys.stderr.write(text)
        sys.stderr.flush()
    with suppress(Exception):
        sys.stdout.flush()
