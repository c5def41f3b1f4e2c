"""Find the user's code that made a call."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Iterable
from functools import cache
from types import FrameType

_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")

# Packages between the call and the user's code, whose lines do not help users find a
# mistake.
_LIBRARIES = {
    "lightning",
    "lightning_ddp_ext",
    "lightning_fabric",
    "lightning_utilities",
    "pytorch_lightning",
    "torch",
    "torchmetrics",
}
_BETWEEN = sys.stdlib_module_names | _LIBRARIES


def call_site() -> str:
    """Return file and line of the innermost call in the user's code; empty if not
    found.
    """
    return call_site_of(sys._getframe(1))


def called_by_lightning() -> bool:
    """Whether the calling function was called by Lightning's own code."""
    return str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0] in _LIGHTNING


def call_site_of(frame: FrameType | None) -> str:
    """Return file and line of the innermost call in the user's code, starting at
    ``frame``; empty if not found.
    """
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_users(frame: FrameType) -> bool:
    """Whether a frame belongs to the user's code."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in _BETWEEN


def call_site_in(lines: Iterable[tuple[str, int]]) -> str:
    """Return the first file and line in the user's code of a recorded stack; empty if
    not found.
    """
    found = (f"{file}:{line}" for file, line in lines if not _is_between(file))
    return next(found, "")


@cache
def _is_between(file: str) -> bool:
    libraries = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    folders = [os.path.dirname(module.__file__ or "") for module in libraries]
    is_of_library = any(file.startswith(folder + os.sep) for folder in folders)
    is_of_python = file.startswith(sysconfig.get_path("stdlib")) and "-packages" not in file
    return is_of_library or is_of_python or file.startswith("<frozen")


def is_main_thread_in(call: FrameType) -> bool:
    """Whether a call on the main thread is still running; must be called on another
    thread.
    """
    frame = main_frame()
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is call


def main_frame() -> FrameType | None:
    """Return the innermost frame of the main thread; must be called on another thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)
