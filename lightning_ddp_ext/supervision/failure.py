"""Determine whether an exception is this rank's own failure, or a consequence of another rank's failure."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_ddp_ext.errors import DDPExtError, RankFailedError, RendezvousError
from lightning_ddp_ext.ranks import reason_of
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.rendezvous.run import start_run
from lightning_ddp_ext.supervision.call_site import is_main_thread_in
from lightning_ddp_ext.supervision.common_end import CommonEnd
from lightning_ddp_ext.supervision.graceful_stop import GracefulStop
from lightning_ddp_ext.supervision.survey import Survey

T = TypeVar("T")
Rescue = Callable[[BaseException], object]

# gloo and NCCL raise plain RuntimeErrors; stores raise DistErrors.
_BROKEN_CONNECTION = re.compile(
    r"\bgloo\b|nccl|by peer|broken pipe|process group|pair closure|\bsockets?\b", re.IGNORECASE
)
_CLOSED_GROUP = re.compile("process group", re.IGNORECASE)  # the ValueError of a collective in a closed group


def supervised(
    function: Callable[..., T],
    *args: Any,
    harmless: tuple[type[BaseException], ...] = (),
    handler: FrameType | None = None,
    rescue: Rescue = lambda exception: None,
    **kwargs: Any,
) -> T:
    """Call ``function``; if it raises, report this to the other ranks, or find the rank that caused it.

    Every rank runs its part of a job through this function. A rank's own exception is raised unchanged; it is also
    announced, unless every rank raises one. An exception that only follows from another rank's exit is replaced by an
    error that names that rank. ``harmless`` exceptions, which all ranks raise as a signal to their caller, pass
    unchanged. ``rescue`` is called with an exception that another rank caused, before this rank's groups are closed.

    After an exception the process must exit in time, unless the call with the frame ``handler`` returns first.

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
            explanation = explain(exception, rescue, is_caught=True)
            context = current()
            if context is not None and run.is_outermost and context.component(GracefulStop).is_active:
                context.component(GracefulStop).limit_exit(
                    is_void=lambda: handler is not None and not is_main_thread_in(handler)
                )
            if explanation is exception:
                raise
            raise explanation from explanation.__cause__


def explain(exception: BaseException, rescue: Rescue = lambda exception: None, *, is_caught: bool = False) -> Any:
    """Announce the exception to the other ranks and return it, or return the error of the rank that caused it.

    If the caller may catch it and every rank raises, it is not announced, so the groups stay intact.
    """
    context = current()
    if context is None or isinstance(exception, RendezvousError):
        return exception
    if isinstance(exception, RankFailedError):
        rescue(exception)
        context.peers.record_raised()
        return exception
    if echoes_another_rank(exception):
        event = context.component(Survey).cause_of(" ".join(map(reason_of, chain_of(exception))))
        if event is not None:
            rescue(exception)  # the groups are already aborted; closing them takes longer
            context.close_group()
            error = event.to_error()
            if event.kind == "left":
                error.__cause__ = exception  # a guess: this rank's own error may mention a store
            return error
    if is_caught and context.component(CommonEnd).is_reached():
        return exception
    context.announce_failure(exception, "".join(traceback.format_exception(exception)))
    return exception


def echoes_another_rank(exception: BaseException) -> bool:
    """Whether ``exception`` or one of its causes comes from a broken collective or store.

    Ctrl-C reaches all ranks, perhaps while this one handles another rank's exit, so it counts as this rank's own.
    """
    return not isinstance(exception, KeyboardInterrupt) and any(
        _is_broken_connection(link) for link in chain_of(exception)
    )


def _is_broken_connection(exception: BaseException) -> bool:
    if isinstance(exception, DDPExtError):
        return False
    if isinstance(exception, dist.DistError):
        return True
    pattern = _BROKEN_CONNECTION if isinstance(exception, RuntimeError) else _CLOSED_GROUP
    return isinstance(exception, (RuntimeError, ValueError)) and bool(pattern.search(reason_of(exception)))


def chain_of(exception: BaseException) -> Iterator[BaseException]:
    """Yield the exception, its cause or context, and so on."""
    seen: set[int] = set()
    link: BaseException | None = exception
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
