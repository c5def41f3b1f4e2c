"""Read this process's stacks: the user's calls, and calls that wait for other ranks."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable
from functools import cache
from types import FrameType

_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")

# Packages whose lines do not help users; they call the user's code, or it calls them.
_LIBRARIES = {
    "lightning",
    "lightning_ddp_ext",
    "lightning_fabric",
    "lightning_utilities",
    "pytorch_lightning",
    "torch",
    "torchmetrics",
}
# Modules whose functions wait for collectives in C++, or for a device that does. A call
# waits if its innermost frame is in one of them.
_WAITS_IF_INNERMOST = (
    "torch.distributed.",
    "torch.nn.parallel.distributed.",
    "lightning_ddp_ext.batchnorm.sync_context.",
    "lightning_ddp_ext.integration.data.training_loaders.",
    "lightning_ddp_ext.integration.logged_values.",
    "lightning_ddp_ext.integration.value_exchange.",
    "lightning_ddp_ext.pytorch_lightning.data.training_loaders.",
    "lightning_ddp_ext.pytorch_lightning.logged_values.",
    "lightning_ddp_ext.pytorch_lightning.value_exchange.",
    "lightning_ddp_ext.ranks.",
)
# A backward pass waits for the gradients of other ranks in C++.
_BACKWARD = "torch.autograd.graph."


# The user's code.


def call_site() -> str:
    """Return file and line of the user's innermost call; empty if not found."""
    return call_site_of(sys._getframe(1))


def caller_in_lightning() -> object:
    """Return the object whose method called the calling function.

    ``None`` unless this method is Lightning's own code.
    """
    caller = sys._getframe(2)  # 0 is this function, and 1 the one that calls it
    is_lightnings = str(caller.f_globals.get("__name__")).partition(".")[0] in _LIGHTNING
    return caller.f_locals.get("self") if is_lightnings else None  # the name in all its methods


def call_site_of(frame: FrameType | None) -> str:
    """Return file and line of the user's innermost call, starting at ``frame``.

    Empty if not found.
    """
    if frame is None:
        return ""
    stack = traceback.walk_stack(frame)
    return call_site_in((caller.f_code.co_filename, line) for caller, line in stack)


def call_site_in(stack: Iterable[tuple[str, int]]) -> str:
    """Return the user's first line in a stack of files and lines; empty if not found."""
    return next((f"{file}:{line}" for file, line in stack if not _is_library(file)), "")


def is_users(frame: FrameType) -> bool:
    """Whether a frame belongs to the user's code."""
    return not _is_library(frame.f_code.co_filename)


@cache  # the library of a file in a stack has been imported, so the answer does not change
def _is_library(file: str) -> bool:
    """Whether a file belongs to one of the libraries, or to Python's own."""
    libraries = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    folders = [folder for library in libraries for folder in getattr(library, "__path__", ())]
    is_of_library = any(file.startswith(folder + os.sep) for folder in folders)
    # Installed packages, such as those in site-packages, are in the same directory.
    is_of_python = file.startswith(sysconfig.get_path("stdlib")) and "-packages" not in file
    return is_of_library or is_of_python or file.startswith("<frozen")


# The main thread, as seen from another one.


def is_main_thread_in(call: FrameType | None) -> bool:
    """Whether the main thread is still in a call, whose frame is ``call``.

    True for ``None``.
    """
    frame = main_frame()
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is call


def main_frame() -> FrameType | None:
    """Return the innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


# Calls that wait for other ranks.


def is_in_collective(frame: FrameType | None) -> bool:
    """Whether the innermost frame of a call is in code that waits for ranks in C++.

    A backward pass does not count.
    """
    return _module_of(frame).startswith(_WAITS_IF_INNERMOST)


def is_in_backward(frame: FrameType | None) -> bool:
    """Whether the innermost frame of a call is in a backward pass."""
    return _module_of(frame).startswith(_BACKWARD)


def _module_of(frame: FrameType | None) -> str:
    """Return the name of a frame's module, with a dot at its end."""
    return "" if frame is None else f"{frame.f_globals.get('__name__')}."
