"""Print the exception that ends this process: its traceback, or one line.

One line is enough if another rank caused it, since that rank prints the traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType

from lightning_ddp_ext.errors import RankFailedError, RendezvousError
from lightning_ddp_ext.ranks import reason_of
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.supervision.failure import explain, limit_exit
from lightning_ddp_ext.supervision.session import current_session

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_is_installed = False  # whether our hook is in `sys`, where it stays until the exit


def install_excepthook(earlier: Hook) -> None:
    """Put our ``sys.excepthook`` in front of the others, or keep it there.

    Called after the ranks have connected. For each group, torch puts a hook in front
    that delays output. The first time, ours covers it; later, ``earlier`` replaces it.

    Args:
        earlier: the hook before the ranks connected; from the second call on ours, or
            one that the user has put in front of ours.
    """
    global _is_installed
    sys.excepthook = earlier if _is_installed else partial(_excepthook, sys.excepthook)
    _is_installed = True


def _excepthook(
    replaced: Hook, kind: type[BaseException], exception: BaseException, trace: TracebackType | None
) -> None:
    """Print an exception by the hook that this one replaced, or in one line."""
    session = current_session()
    if session is None or isinstance(exception, RendezvousError):
        replaced(kind, exception, trace)
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
        replaced(kind, exception, trace)
        sys.stderr.flush()
    if not hasattr(sys, "ps1") and not sys.flags.inspect:  # without a prompt, this process exits
        limit_exit(exception)


def print_line(exception: BaseException) -> None:
    """Print this rank's number, and the type and first line of an exception."""
    context = current()
    who = "" if context is None else f"[rank {context.peers.rank}] "
    sys.stderr.write(who + reason_of(exception).partition("\n")[0] + "\n")
    sys.stderr.flush()
