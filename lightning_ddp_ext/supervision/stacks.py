"""Describe the stacks of this process's threads as text."""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType

from lightning_ddp_ext.ranks import shortened

# A report must fit into one message, and into the socket buffer of a rank that has
# stopped reading.
_LONGEST = 1 << 15
# A backward pass waits for the gradients of other ranks in C++.
_WAITING = {
    "torch.autograd",
    "torch.distributed.distributed_c10d",
    "lightning_ddp_ext.rendezvous.named_barrier",
}
# These wait too, but they also call user code, so they count only as the innermost
# frame.
_WAITING_IF_INNERMOST = {
    "lightning_ddp_ext.batchnorm.sync_context",
    "lightning_ddp_ext.data.shortest",
    "torch.distributed.utils",
    "torch.nn.parallel.distributed",
}


# The innermost frame of a call that waits in C++.
_BLOCKING = _WAITING_IF_INNERMOST | {"torch.autograd.graph", "torch.distributed.distributed_c10d"}


def is_in_collective(frame: FrameType | None) -> bool:
    """Whether a call that waits for other ranks in C++ is the innermost one, so that no
    Python code is running.
    """
    return frame is not None and frame.f_globals.get("__name__") in _BLOCKING


def may_be_waiting_for_ranks(frame: FrameType | None) -> bool:
    """Whether a frame is in a call that is or may be waiting for other ranks, as far as
    its Python stack shows.
    """
    if frame is not None and frame.f_globals.get("__name__") in _WAITING_IF_INNERMOST:
        return True
    while frame is not None and frame.f_globals.get("__name__") not in _WAITING:
        frame = frame.f_back
    return frame is not None


def all_stacks() -> str:
    """Return the stacks of all other threads, shortened if too long: the main thread
    first, the most recent call last.

    Source lines are left out, since the file system that contains them may be the cause
    of a hang.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    main = threading.main_thread().ident
    ordered = sorted(frames, key=lambda ident: (ident != main, names.get(ident, "")))
    text = "\n".join(
        _stack(names.get(ident, f"thread {ident}"), frames[ident]) for ident in ordered
    )
    return shortened(text, _LONGEST)


def _stack(name: str, frame: FrameType) -> str:
    calls = [(inner.f_code, line) for inner, line in traceback.walk_stack(frame)][::-1]
    lines = [f'  File "{code.co_filename}", line {line}, in {code.co_name}' for code, line in calls]
    return "\n".join([f"{name}:", *lines])
