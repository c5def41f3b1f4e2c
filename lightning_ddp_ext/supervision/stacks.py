"""Where every thread of this process is, as text."""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType

# What travels to another rank must fit into a line, and into the socket of one that does not read.
_LONGEST = 1 << 15
_WAITING = {"torch.distributed.distributed_c10d", "lightning_ddp_ext.rendezvous.named_barrier"}
# Those that wait in C++, and that call code of the user's as well.
_WAITING_ITSELF = {
    "lightning_ddp_ext.batchnorm.sync_context",
    "lightning_ddp_ext.data.shortest",
    "torch.distributed.utils",
    "torch.nn.parallel.distributed",
}


def main_frame() -> FrameType | None:
    """The innermost frame of the main thread; called by another one."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def is_waiting_for_ranks(frame: FrameType | None) -> bool:
    """Whether a frame is in a call that waits for other ranks, as far as Python knows."""
    return _is_in(frame, _WAITING)


def may_be_waiting_for_ranks(frame: FrameType | None) -> bool:
    """Whether it is in one that may do so: a backward pass, too, waits for the gradients of other ranks in C++."""
    is_innermost = frame is not None and frame.f_globals.get("__name__") in _WAITING_ITSELF
    return is_innermost or _is_in(frame, {*_WAITING, "torch.autograd"})


def _is_in(frame: FrameType | None, modules: set[str]) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") in modules:
            return True
        frame = frame.f_back
    return False


def all_stacks() -> str:
    """The stacks of all threads but the calling one, the main thread first, most recent call last.

    Without the source lines: the file system that they are on may be what hangs.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    main = threading.main_thread().ident
    ordered = sorted(frames, key=lambda ident: (ident != main, names.get(ident, "")))
    return _shortened("\n".join(_stack(names.get(ident, f"thread {ident}"), frames[ident]) for ident in ordered))


def _stack(name: str, frame: FrameType) -> str:
    calls = [(inner.f_code, line) for inner, line in traceback.walk_stack(frame)][::-1]
    lines = [f'  File "{code.co_filename}", line {line}, in {code.co_name}' for code, line in calls]
    return "\n".join([f"{name}:", *lines])


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}\n... ({len(text) - _LONGEST} characters left out)"
