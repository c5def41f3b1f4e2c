"""Do something once when this process ends, whichever kind of process it is."""

from __future__ import annotations

import atexit
import multiprocessing.util
from collections.abc import Callable


def at_exit(action: Callable[[], None]) -> None:
    """Run ``action`` when the process ends; children of multiprocessing skip ``atexit`` and run finalisers instead."""
    atexit.register(action)
    multiprocessing.util.Finalize(None, action, exitpriority=100)
