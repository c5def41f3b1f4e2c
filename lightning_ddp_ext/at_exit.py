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


def is_end_delayed() -> bool:
    """Whether such a block is under way."""
    return bool(_delays)


def wait_for_delays() -> None:
    """Wait until all such blocks have ended, or have had their time."""
    with _changed:
        _changed.wait_for(lambda: not _delays, timeout=max(_delays, default=0.0))


def end_at_once(status: int, sentence: str = "") -> NoReturn:
    """End this process from any thread, with its daemonic children, such as workers of loaders that are stuck.

    It first prints the sentence, and what the process printed before.
    """
    with suppress(Exception):
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()
        print_within_a_second(sentence)
    os._exit(status)


def print_within_a_second(sentence: str) -> None:
    """Print to stderr, or give up: a stream may be closed, and the reader of a pipe may have stopped."""
    printer = threading.Thread(target=_print, args=[sentence], name="ddpx-print", daemon=True)
    printer.start()
    printer.join(1.0)


def _print(sentence: str) -> None:
    for stream, text in ((sys.stderr, sentence), (sys.stdout, "")):
        with suppress(Exception):
            stream.write(text)
            stream.flush()
