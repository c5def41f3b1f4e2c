"""The end of this process, whichever kind of process it is."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def at_exit(action: Callable[[], None]) -> None:
    """Run ``action`` when the process ends; children of multiprocessing skip ``atexit`` and run finalisers instead."""
    atexit.register(action)
    multiprocessing.util.Finalize(None, action, exitpriority=100)


def end_at_once(status: int) -> NoReturn:
    """End this process from any thread, whatever the main one is stuck in, and its daemonic children with it.

    The interpreter would end those, too: workers of loaders, say, of which one that is stuck never looks after its
    parent.
    """
    with suppress(Exception):
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()
    os._exit(status)
