"""Run actions at the exit of this process, and set its exit status."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing.util
from collections.abc import Callable


def at_exit(action: Callable[[], None]) -> None:
    """Run ``action`` at the exit of this process.

    It also runs in children of multiprocessing, which skip ``atexit`` handlers.
    """
    # A Finalize runs only once, and only in the process that has made it.
    atexit.register(multiprocessing.util.Finalize(None, action, exitpriority=100))


def set_exit_status(status: int) -> None:
    """Set the status of an exiting process; for use in an exit handler.

    The process exits with ``status`` after the remaining exit handlers.
    """
    # HACK: Python ignores what its exit handlers raise, and ``os._exit`` would skip
    # those that are left. This handler of the C library calls ``exit`` again, with
    # which glibc runs the remaining handlers and uses the new status.
    libc = ctypes.CDLL(None)
    libc["__cxa_atexit"](libc.exit, ctypes.c_void_p(status), None)
