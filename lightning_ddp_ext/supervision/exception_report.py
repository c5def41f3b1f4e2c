"""What each rank prints when it ends with an exception: its own traceback, or one line if another rank is the cause."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import torch.distributed as dist

from lightning_ddp_ext.errors import RankFailedError, RendezvousError
from lightning_ddp_ext.ranks import reason_of
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.supervision.failure import chain_of, explain
from lightning_ddp_ext.supervision.graceful_stop import GracefulStop

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
# The hooks that ours has been put in front of, the latest last, and how many of them are printing right now.
_behind: list[Hook] = []
_depth = 0


def install_excepthook() -> None:
    """Put our ``sys.excepthook`` in front of the one that is there; to be called after each forming of a group.

    torch puts a hook of its own in front at that time, which holds back what is printed until everything is.
    """
    hook = sys.excepthook
    if hook is _excepthook:
        return
    calls_ours = any(cell.cell_contents is _excepthook for cell in getattr(hook, "__closure__", None) or ())
    if not (hook.__module__ == dist.distributed_c10d.__name__ and calls_ours):
        _behind.append(hook)
    sys.excepthook = _excepthook


def _excepthook(kind: type[BaseException], exception: BaseException, trace: TracebackType | None) -> None:
    context = current()
    if context is None or _depth > 0 or isinstance(exception, RendezvousError):
        _print_as_before(kind, exception, trace)
        return
    # What a callback raises because of a failure that has been announced is known to others, too.
    if not any(link is context.failure or isinstance(link, RankFailedError) for link in chain_of(exception)):
        # Raised outside of any Trainer call; it ends this rank all the same, and others may be waiting for it.
        explanation: BaseException = explain(exception)
        if explanation is not exception:
            explanation.__cause__ = exception
            exception = explanation
    cause = context.peers.cause
    if isinstance(exception, RankFailedError):
        print_line(exception)
    elif cause is not None and cause.rank != context.world.rank and cause.reason == reason_of(exception):
        print_line(exception, " (another rank prints the traceback)")
    else:
        _tell_torchrun(exception)
        _print_as_before(kind, exception, trace)
    if not (hasattr(sys, "ps1") or sys.flags.inspect):  # else a prompt follows, and the process lives on
        context.component(GracefulStop).limit_exit()


def _tell_torchrun(exception: BaseException) -> None:
    """Write the file from which torchrun has the cause in its table, unless ``@record`` has written it."""
    message = {
        "message": reason_of(exception),
        # HACK: a second early, as torchrun compares whole seconds and takes the lowest of equal ranks for the cause.
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(exception)),
            "timestamp": str(int(time.time()) - 1),
        },
    }
    with suppress(KeyError, OSError), open(os.environ["TORCHELASTIC_ERROR_FILE"], "x") as file:
        json.dump({"message": message}, file)


def print_line(exception: BaseException, remark: str = "") -> None:
    """Print type and the first line of the text of an exception as one line that says which rank this is."""
    context = current()
    who = "" if context is None else f"[rank {context.world.rank}] "
    line = reason_of(exception).partition("\n")[0]
    sys.stderr.write(f"{who}{line}{remark}\n")
    sys.stderr.flush()


def _print_as_before(kind: type[BaseException], exception: BaseException, trace: TracebackType | None) -> None:
    """Call the hook that ours has been put in front of; if that one calls ours again, the one before it."""
    global _depth
    _depth += 1
    try:
        hook = _behind[-_depth] if _depth <= len(_behind) else sys.__excepthook__
        hook(kind, exception, trace)
    finally:
        _depth -= 1
    sys.stderr.flush()
