"""Print a rank's exception: the traceback, or one line if another rank caused it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from lightning_ddp_ext.errors import RankFailedError, RendezvousError
from lightning_ddp_ext.ranks import reason_of
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
    if not session.context.peers.has_raised:
        # Other ranks may be waiting for this one outside of Trainer calls as well.
        explanation = explain(exception)
        if explanation is not exception:
            explanation.__cause__ = exception
            exception = explanation
    if isinstance(exception, RankFailedError):
        print_line(exception)
    else:
        _hook_behind(kind, exception, trace)
        sys.stderr.flush()
    has_prompt = hasattr(sys, "ps1") or sys.flags.inspect
    if not has_prompt:  # this process exits
        session.stops.limit_exit()


def print_line(exception: BaseException) -> None:
    """Print this rank's number, and the type and first line of an exception."""
    context = current()
    who = "" if context is None else f"[rank {context.world.rank}] "
    line = reason_of(exception).partition("\n")[0]
    sys.stderr.write(f"{who}{line}\n")
    sys.stderr.flush()
