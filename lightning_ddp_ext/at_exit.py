"""The end of this process, whichever kind of process it is."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

_TO_PRINT = 5.0  # seconds; a machine may be busy
# Seconds that each piece of work that is under way may delay a forced end.
_delays: list[float] = []
_changed = threading.Condition()


def at_exit(action: Callable[[], None]) -> None:
    """Run ``action`` when the process ends; children of multiprocessing skip ``atexit`` and run finalisers instead."""
    atexit.register(action)
    multiprocessing.util.Finalize(None, action, exitpriority=100)


@contextmanager
def delaying_forced_end(seconds: float) -> Iterator[None]:
    """Have a forced end of this process, such as after another rank's death, wait ``seconds`` for the block to end."""
    with _changed:
        _delays.append(seconds)
    try:
        yield
    finally:
        with _changed:
            _delays.remove(seconds)
            _changed.notify_all()


def wait_for_delays() -> bool:
    """Wait until all such blocks have ended, or have had their time; return whether there were any."""
    with _changed:
        longest = max(_delays, default=0.0)
        _changed.wait_for(lambda: not _delays, timeout=longest)
    return longest > 0


class Limit:
    """Ends this process after some time, unless it is lifted before. Its thread is named ``name``."""

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
        """Start counting, unless it counts already. Not for a signal handler, nor while the interpreter ends.

        Args:
            seconds: until the end.
            status: of the process.
            sentence: returns what it prints then.
            is_void: asked at the end of the time; if it is True, the process lives on.
            after_saves: seconds from the end of a save that is under way then; ``None`` to end in the middle of it.
        """

        def end() -> None:
            if lifted.wait(seconds) or is_void():
                return
            if _delays and after_saves is not None:
                print_in_time(f"{sentence()}; before that, this rank finishes the checkpoint that it is writing\n")
                wait_for_delays()
                if lifted.wait(after_saves):
                    return
            end_at_once(status, f"{sentence()}\n")

        with _changed:
            if self._thread is None:
                lifted = self._lifted = threading.Event()
                self._thread = threading.Thread(target=end, name=self._name, daemon=True)
                self._thread.start()

    def lift(self) -> None:
        """Let the process live on, until another start."""
        self._lifted.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout=1.0)


def end_at_once(status: int, sentence: str = "") -> NoReturn:
    """End this process from any thread, with its daemonic children, such as workers of loaders that are stuck.

    It first prints the sentence, and what the process printed before.
    """
    with suppress(Exception):
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()
        print_in_time(sentence)
    os._exit(status)


def print_in_time(sentence: str) -> None:
    """Print to stderr, or give up: a stream may be closed, and the reader of a pipe may have stopped."""
    printer = threading.Thread(target=_print, args=[sentence], name="ddpx-print", daemon=True)
    printer.start()
    printer.join(_TO_PRINT)


def _print(sentence: str) -> None:
    for stream, text in ((sys.stderr, sentence), (sys.stdout, "")):
        with suppress(Exception):
            stream.write(text)
            stream.flush()
