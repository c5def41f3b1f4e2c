"""Force the exit of this process after a time limit, which a save may extend."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

_TO_PRINT = 5.0  # seconds; the machine may be busy
_changed = threading.Condition()  # its lock protects the state of this module


@dataclass(eq=False)
class _Delay:
    """A running `delaying_forced_end` block."""

    seconds: float
    purpose: str
    when: Callable[[], bool]


_blocks: list[_Delay] = []


def _due_delays() -> list[_Delay]:
    return [each for each in _blocks if each.when()]


@contextmanager
def delaying_forced_end(
    seconds: float,
    purpose: str = "finish writing its checkpoint",
    *,
    when: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """Delay a forced exit while the block runs.

    A forced exit follows, for example, the death of another rank.

    Args:
        seconds: the longest delay.
        purpose: what this rank will do before it exits, for a message.
        when: returns whether the exit has to wait; called when it is due.
    """
    delay = _Delay(seconds, purpose, when)
    with _changed:
        _blocks.append(delay)
    try:
        yield
    finally:
        with _changed:
            _blocks.remove(delay)
            _changed.notify_all()


def wait_for_delays() -> bool:
    """Wait for the :func:`delaying_forced_end` blocks; return whether any was running.

    The wait takes at most the longest of their delays.
    """
    with _changed:
        due = _due_delays()
        longest = max((each.seconds for each in due), default=0.0)
        _changed.wait_for(lambda: not _due_delays(), timeout=longest)
    return bool(due)


class ForcedExit:
    """A countdown after which this process exits, unless it is lifted.

    It runs in a thread called ``name``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._lifted = threading.Event()

    def start(
        self,
        seconds: float,
        status: int,
        sentence: Callable[[], str],
        *,
        is_void: Callable[[], bool] = lambda: False,
        after_saves: float | None = None,
    ) -> None:
        """Start the countdown unless it is running.

        Must not be called in a signal handler or at interpreter shutdown.

        Args:
            seconds: the time until the exit.
            status: the exit status of the process.
            sentence: returns the text to print before the exit.
            is_void: called when the time is up; if it returns True, the process
                continues.
            after_saves: seconds from the completion of an unfinished save to the exit;
                ``None`` to interrupt the save.
        """

        def end() -> None:
            if lifted.wait(seconds) or is_void():
                return
            with _changed:
                due = _due_delays()
            if due and after_saves is not None:
                print_in_time(f"{sentence()}. This rank will {due[-1].purpose} before it exits\n")
                wait_for_delays()
                if lifted.wait(after_saves):
                    return
            exit_now(status, f"{sentence()}\n")

        with _changed:
            if self._thread is None or not self._thread.is_alive():
                lifted = self._lifted = threading.Event()
                self._thread = threading.Thread(target=end, name=self._name, daemon=True)
                self._thread.start()

    def lift(self) -> None:
        """Cancel the countdown; it can be started again."""
        with _changed:
            self._lifted.set()
            thread = self._thread
            self._thread = None
        if thread is not None:
            thread.join(timeout=1.0)


def exit_now(status: int, sentence: str = "") -> NoReturn:
    """Kill daemonic children, such as loader workers, print the sentence, and exit.

    Any thread may call it.
    """
    with suppress(Exception):
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()
        print_in_time(sentence)
    os._exit(status)


def print_in_time(sentence: str) -> None:
    """Print to stderr, but give up after some seconds.

    The reader of a pipe may have stopped reading.
    """
    printer = threading.Thread(target=_print, args=[sentence], name="ddpx-print", daemon=True)
    printer.start()
    printer.join(_TO_PRINT)


def _print(sentence: str) -> None:
    for stream, text in ((sys.stderr, sentence), (sys.stdout, "")):
        with suppress(Exception):
            stream.write(text)
            stream.flush()
