"""Print a rank's exception: the traceback, or one line if another rank caused it."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from lightning_ddp_ext.errors import RankFailedError, RendezvousError
from lightning_ddp_ext.ranks import reason_of
from lightning_ddp_ext.rendezvous.peers import Peers
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.supervision.failure import explain
from lightning_ddp_ext.supervision.session import current_session

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_hook_behind: Hook | None = None  # the hook that ours replaced and calls, once installed


def install_excepthook(earlier: Hook) -> None:
    """Put our ``sys.excepthook`` in front of the others, or keep it there.

    Called after the ranks have connected: for each group, torch puts a hook that delays
    output in front.

    Args:
        earlier: the hook before that. From the second call on, it is ours, or one that
            the user has put in front of ours, and is reinstated.
    """
    global _hook_behind
    if _hook_behind is None:
        _hook_behind = sys.excepthook
        sys.excepthook = _excepthook
    else:
        sys.excepthook = earlier


def _excepthook(
    kind: type[BaseException], exception: BaseException, trace: TracebackType | None
) -> None:
    assert _hook_behind is not None
    session = current_session()
    if session is None or isinstance(exception, RendezvousError):
        _hook_behind(kind, exception, trace)
        return
    peers = session.context.peers
    if not peers.has_raised:
        # Other ranks may be waiting for this one outside of Trainer calls as well.
        explanation = explain(exception)
        if explanation is not exception:
            explanation.__cause__ = exception
            exception = explanation
    if isinstance(exception, RankFailedError):
        print_line(exception)
    elif _is_printed_by_another_rank(exception, peers):
        print_line(exception, " (another rank prints the traceback)")
    else:
        _write_for_torchrun(exception)
        _hook_behind(kind, exception, trace)
        sys.stderr.flush()
    has_prompt = hasattr(sys, "ps1") or sys.flags.inspect
    if not has_prompt:  # this process exits
        session.stops.limit_exit()


def _is_printed_by_another_rank(exception: BaseException, peers: Peers) -> bool:
    """Whether the first rank that failed raised the same exception."""
    cause = peers.cause
    if cause is None or cause.rank == peers.rank:
        return False
    return cause.reason == reason_of(exception)


def _write_for_torchrun(exception: BaseException) -> None:
    """Write the cause to torchrun's file, unless ``@record`` has written one."""
    message = {
        "message": reason_of(exception),
        # HACK: a second early, since torchrun compares whole seconds and blames the
        # lowest of ranks with equal times.
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(exception)),
            "timestamp": str(int(time.time()) - 1),
        },
    }
    with suppress(KeyError, OSError), open(os.environ["TORCHELASTIC_ERROR_FILE"], "x") as file:
        json.dump({"message": message}, file)


def print_line(exception: BaseException, remark: str = "") -> None:
    """Print this rank's number, and the type and first line of an exception."""
    context = current()
    who = "" if context is None else f"[rank {context.world.rank}] "
    line = reason_of(exception).partition("\n")[0]
    sys.stderr.write(f"{who}{line}{remark}\n")
    sys.stderr.flush()
