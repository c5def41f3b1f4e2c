"""Determine whether this rank or another one caused an exception, and announce it.

If another rank fails or exits, a collective or the store of this rank breaks, and its
main thread raises an exception that does not name the other rank. The ``Origin`` of an
exception shows whether it may follow from another rank's failure. If so, the event of
that rank arrives over the control channel, or the statuses of ranks show it. All other
exceptions are this rank's own, and this rank announces them.
"""

from __future__ import annotations

import dis
import traceback
from collections.abc import Callable
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from lightning_ddp_ext.errors import DDPExtError, RankFailedError, RendezvousError
from lightning_ddp_ext.forced_exit import print_in_time
from lightning_ddp_ext.ranks import chain_of, reason_of
from lightning_ddp_ext.rendezvous.peers import PeerEvent
from lightning_ddp_ext.rendezvous.process_context import ProcessContext, current
from lightning_ddp_ext.rendezvous.runs import current_run, start_run
from lightning_ddp_ext.supervision.session import Session, current_session
from lightning_ddp_ext.supervision.stacks import (
    call_site_in,
    is_in_backward,
    is_in_collective,
    is_main_thread_in,
    is_users,
)

T = TypeVar("T")
# Saves the last step after an exception of this rank; a second call has no effect.
Save = Callable[[BaseException], object]

# The place where an exception was raised, or one that caused it:
#
# - "collective": code that waits for other ranks in a collective or store, by its backend;
# - "aborted": such code, after this rank has aborted its collectives;
# - "user": user code, perhaps by a backend, as in ``work.wait()``;
# - "own": any other place. Ctrl-C, which reaches all ranks, also counts as this rank's own.
Origin = Literal["collective", "aborted", "user", "own"]


def supervised(
    function: Callable[..., T],
    *args: Any,
    harmless: tuple[type[BaseException], ...] = (),
    handler: FrameType | None = None,
    save: Save = lambda exception: None,
    **kwargs: Any,
) -> T:
    """Call ``function``, and report its exception or find the rank that caused it.

    Every rank runs its part of a job through this function. A rank's own exception is
    announced and raised unchanged. An exception that only follows from another rank's
    exit is replaced by an error that names that rank.

    Args:
        function: called with the further arguments.
        harmless: exceptions that all ranks raise as a signal to their caller; they pass
            unchanged.
        handler: the frame of a call that handles the exception; unless it returns in
            time, the process exits.
        save: called with the exception; if another rank caused it, before this rank's
            groups are closed.

    Raises:
        RankFailedError: another rank failed, died or left.
    """
    with start_run() as run:
        try:
            return function(*args, **kwargs)
        except harmless:
            raise
        except BaseException as exception:
            run.has_failed = True
            explanation = explain(exception, save)
            if run.is_outermost:
                limit_exit(explanation, partial(is_main_thread_in, handler))
            if explanation is exception:
                raise
            raise explanation from explanation.__cause__


def limit_exit(exception: BaseException, is_needed: Callable[[], bool] = lambda: True) -> None:
    """Limit the time until this process exits or ``is_needed`` returns False."""
    session = current_session()
    if session is not None and session.deadline is not None:
        session.deadline.limit_exit(reason_of(exception).partition("\n")[0], is_needed)


def explain(exception: BaseException, save: Save = lambda exception: None) -> BaseException:
    """Announce an exception to the other ranks, or find the rank that caused it.

    This takes some seconds if other ranks are involved.

    Args:
        exception: the exception.
        save: called with the exception; if another rank caused it, before this rank's
            groups are closed.

    Returns:
        The exception, or the error of the rank that caused it.
    """
    session = current_session()
    if session is None or isinstance(exception, RendezvousError):
        return exception
    context = session.context
    if isinstance(exception, RankFailedError):  # it already names the rank
        save(exception)
        context.peers.record_raised()
        return exception
    # First, since `_event_behind` waits, and this rank may abort its collectives meanwhile.
    origin = origin_of(exception)
    event = _event_behind(exception, origin, session)
    if event is None:
        _announce(exception, context, save)
        return exception
    if origin != "aborted":  # the exception of an aborted collective says nothing new
        _print_replaced(exception, context)
    return _replacement(exception, event, context, save)


def _event_behind(exception: BaseException, origin: Origin, session: Session) -> PeerEvent | None:
    """Return the event of another rank that caused an exception of this rank, if any.

    If the exception may follow from one, wait for it.
    """
    peers = session.context.peers
    if len(peers.everyone) == 1:
        return None
    # Any exception may follow from arbitrary values.
    if session.context.has_arbitrary_values and not isinstance(exception, KeyboardInterrupt):
        return peers.cause
    if isinstance(exception, torch.AcceleratorError):  # of this rank's own device
        return None
    if origin in ("collective", "aborted"):
        return session.statuses.cause_of_broken_collective()
    if origin == "user":  # it may well be the user's own, so only wait for a report
        peers.wait(peers.timeouts.first_cause)
        return peers.cause
    return None


def _announce(exception: BaseException, context: ProcessContext, save: Save) -> None:
    """Announce this rank's own exception to the other ranks, and call ``save``."""
    text = "".join(traceback.format_exception(exception))
    if context.groups.uses_nccl:
        save(exception)  # first: the announcement aborts collectives, which might change weights
        context.announce_failure(exception, text)
    else:
        context.announce_failure(exception, text)  # first: the other ranks wait for it
        save(exception)


def _replacement(
    exception: BaseException, event: PeerEvent, context: ProcessContext, save: Save
) -> BaseException:
    """Call ``save``, close this rank's groups, and return the error of the event."""
    save(exception)  # the groups are already aborted; closing them takes longer
    context.close_group()
    error = event.to_error()
    if event.kind == "left":
        error.__cause__ = exception
    return error


def _print_replaced(exception: BaseException, context: ProcessContext) -> None:
    innermost_first = reversed([*traceback.walk_tb(exception.__traceback__)])
    place = call_site_in((frame.f_code.co_filename, line) for frame, line in innermost_first)
    line = reason_of(exception).partition("\n")[0]
    print_in_time(
        f"[rank {context.peers.rank}] this exception probably follows from another rank's"
        f" failure: {line} ({place or 'in library code'})\n"
    )


# The place where an exception was raised.


def may_be_echo(exception: BaseException) -> bool:
    """Whether ``exception`` or a cause of it was raised in a collective or store."""
    return origin_of(exception) in ("collective", "aborted")


def origin_of(exception: BaseException) -> Origin:
    """Return the origin of an exception."""
    if isinstance(exception, KeyboardInterrupt):
        return "own"
    context = current()
    waiting = [each for each in chain_of(exception) if _is_in_collective(each)]
    if waiting and context is not None and context.peers.cause is not None:
        return "aborted"
    if any(map(_may_be_of_backend, waiting)):
        return "collective"
    trace = _innermost(exception)
    is_in_users_code = trace is not None and is_users(trace.tb_frame.f_code.co_filename)
    return "user" if is_in_users_code and _may_be_of_backend(exception) else "own"


def _is_in_collective(exception: BaseException) -> bool:
    """Whether the exception was raised in code that waits for other ranks.

    The innermost frame decides. Within a run, a backward pass also counts.
    """
    trace = _innermost(exception)
    if trace is None or isinstance(exception, DDPExtError):
        return False
    is_in_joint_backward = is_in_backward(trace.tb_frame) and current_run() is not None
    return is_in_collective(trace.tb_frame) or is_in_joint_backward


def _may_be_of_backend(exception: BaseException) -> bool:
    """Whether a backend may have raised the exception.

    Backends raise from C++, not by a ``raise`` statement, and only these types.
    """
    trace = _innermost(exception)
    is_of_backend = type(exception) is RuntimeError or isinstance(exception, dist.DistError)
    return is_of_backend and trace is not None and not _is_at_raise(trace)


def _is_at_raise(trace: TracebackType) -> bool:
    """Whether the instruction at which an exception left a frame is a ``raise`` statement."""
    instruction = trace.tb_frame.f_code.co_code[trace.tb_lasti]
    return dis.opname[instruction] in ("RAISE_VARARGS", "RERAISE")


def _innermost(exception: BaseException) -> TracebackType | None:
    trace = exception.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace
