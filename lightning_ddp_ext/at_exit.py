"""Run actions at the exit of this process."""

from __future__ import annotations

import atexit
import multiprocessing.util
from collections.abc import Callable


def at_exit(action: Callable[[], None]) -> None:
    """Run ``action`` at the exit of this process.

    It also runs in children of multiprocessing, which skip ``atexit`` handlers.
    """
    # A Finalize runs only once, and only in the process that has made it.
    atexit.register(multiprocessing.util.Finalize(None, action, exitpriority=100))
