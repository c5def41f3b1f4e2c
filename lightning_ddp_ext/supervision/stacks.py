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

from lightning_ddp_ext.trees import ADAPTERS

_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")

# Packages whose lines do not help users; they call the user's code, or it calls them.
_LIBRARIES = {*_LIGHTNING, "lightning_ddp_ext", "lightning_utilities", "torch", "torchmetrics"}
# Modules whose functions wait for collectives in C++, or for a device that does. A call
# waits if its innermost frame is in one of them. A test checks that those of this package
# exist.
WAITS_IF_INNERMOST = (
    "torch.distributed.",
    "torch.nn.parallel.distributed.",
    "lightning_ddp_ext.ranks.",
    "lightning_ddp_ext.batchnorm.sync_context.",
    *(f"{integration}.logged_values." for integration in ADAPTERS.values()),
    *(f"{integration}.value_exchange." for integration in ADAPTERS.values()),
    *(f"{integration}.data.training_loaders." for integration in ADAPTERS.values()),
)
# A backward pass waits for the gradients of other ranks in C++.
_BACKWARD = "torch.autograd.graph."


# The user's code.


def call_site() -> str:
    """Return file and line of the user's innermost call; empty if not found."""
    return call_site_of(sys._getframe(1))


def caller_in_lightning() -> object:
    """Return the object of Lightning whose method called the function that calls this one.

    ``None`` if other code called that function.

    HACK: Lightning does not pass the object, so its frame is read. If its methods used
    another name than ``self``, this would return ``None``.
    """
    caller = sys._getframe(2)  # 0 is this function, and 1 the one that calls it
    is_lightnings = _module_of(caller).partition(".")[0] in _LIGHTNING
    return caller.f_locals.get("self") if is_lightnings else None


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
    return next((f"{file}:{line}" for file, line in stack if is_users(file)), "")


@cache  # the library of a file in a stack has been imported, so the answer does not change
def is_users(file: str) -> bool:
    """Whether a file is the user's: neither of one of the libraries, nor of Python's own."""
    libraries = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    folders = [folder for library in libraries for folder in getattr(library, "__path__", ())]
    is_of_library = any(file.startswith(folder + os.sep) for folder in folders)
    # The directory of Python's library may have another one, for installed packages.
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(file.split(os.sep))
    is_of_python = file.startswith(sysconfig.get_path("stdlib")) and not is_installed
    return not (is_of_library or is_of_python or file.startswith("<frozen"))


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
    return _module_of(frame).startswith(WAITS_IF_INNERMOST)


def is_in_backward(frame: FrameType | None) -> bool:
    """Whether the innermost frame of a call is in a backward pass."""
    return _module_of(frame).startswith(_BACKWARD)


def _module_of(frame: FrameType | None) -> str:
    """Return the name of a frame's module, with a dot at its end."""
    return "" if frame is None else f"{frame.f_globals.get('__name__')}."
