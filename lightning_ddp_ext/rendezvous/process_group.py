"""The process's one store and group: joined once, used by every Trainer in the process, left once at its end."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import torch.distributed as dist
from torch.distributed import PrefixStore

from lightning_ddp_ext.at_exit import at_exit
from lightning_ddp_ext.errors import DDPExtError, GroupInUseError, RendezvousError
from lightning_ddp_ext.rank_logger import rank_logger
from lightning_ddp_ext.rendezvous.claims import Claim, Table
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.file_store import open_file
from lightning_ddp_ext.rendezvous.lifelines import answers, listen_for_lifelines
from lightning_ddp_ext.rendezvous.membership import Membership, OpenedStore
from lightning_ddp_ext.rendezvous.news import reason_of
from lightning_ddp_ext.rendezvous.request import Request
from lightning_ddp_ext.rendezvous.roll_call import ENDS_WITHIN, call_roll
from lightning_ddp_ext.rendezvous.sockets import sockets_opened
from lightning_ddp_ext.rendezvous.store import connect_tcp, host_tcp

_logger = rank_logger(__name__, ranks=0)  # for what is the same on all

# Seconds to wait for the news that explains why a start broke off: it comes by another way than the break itself.
_NEWS_WITHIN = 2.0


_membership: Membership | None = None
_of_parent: Membership | None = None


def current() -> Membership | None:
    """This process's membership in a world; ``None`` before :func:`join` and after :func:`leave`."""
    return _membership


def join(request: Request) -> Membership | None:
    """Find the other ranks and form the process group with them. Collective: every rank must call it.

    A process joins once. Later calls use the same ranks again: with another backend a new group is formed among
    them, another timeout is set, and everything else that differs is refused.

    Returns:
        The membership; ``None`` where somebody else has opened the default process group already, which is then
        used as it is.

    Raises:
        RendezvousError: the ranks could not find each other within ``init_timeout``.
        GroupInUseError: this process has a group already that does not fit.
    """
    global _membership
    if _membership is None and dist.is_initialized():
        _adopt_foreign_group(request)
        return None
    deadline = Deadline(request.init_timeout.total_seconds())
    if _membership is None:
        _membership = _found(request, _open_store(request, deadline), deadline)
        at_exit(leave)
    elif _membership.is_usable:
        _membership.accommodate(request)
    else:
        _membership.check(request)
        _membership = _meet_again(_membership, request, deadline)
    return _membership


def _meet_again(before: Membership, request: Request, deadline: Deadline) -> Membership:
    """Form a group anew among processes that have lived through a failure."""
    unheard = before.unheard_news
    before.close_group()
    try:
        membership = _found(before.as_met(request), before.opened_store, deadline, before)
    except RendezvousError:
        if unheard is not None and before.has_ended(unheard.rank):
            cause = unheard.to_error()  # it is why the rank does not come, and nobody has been told so far
            raise cause from cause.__cause__
        raise
    before.retire()
    return membership


def _forget() -> None:
    """In a forked child, a loader's worker, say: the membership is its parent's."""
    global _membership, _of_parent
    # Kept all the same: a store that ends joins threads, or writes to its file, and both are the parent's.
    _of_parent, _membership = _membership, None


os.register_at_fork(after_in_child=_forget)


def leave() -> None:
    """Close group, lifelines and store; every process of a run does it once, at its end.

    Not in a strategy's ``teardown``: hooks and a second ``fit`` still need the group.
    """
    global _membership
    if _membership is not None:
        _membership.close()
        _membership = None


def _found(request: Request, opened: OpenedStore, deadline: Deadline, before: Membership | None = None) -> Membership:
    """Roll call, lifelines, group: on an error the other ranks are told, and nothing but the store stays open.

    The lifelines of ``before``, where the ranks have met before, tell who cannot come any more.
    """
    listener, lifeline = listen_for_lifelines() if request.world.rank == 0 else (None, ((), 0))

    def bad_news() -> str | None:
        return request.bad_news() or (None if before is None else before.absence())

    try:
        table = _call_roll(replace(request, bad_news=bad_news), opened, deadline, lifeline)
    except BaseException:
        if listener is not None:
            listener.close()
        raise
    membership = Membership(request, opened, table)
    try:
        opened.settle(table)
        membership.connect(deadline, listener)
    except BaseException as cause:
        error = _abandoned(membership, cause)
        raise error from error.__cause__
    return membership


def _call_roll(
    request: Request, opened: OpenedStore, deadline: Deadline, lifeline: tuple[tuple[str, ...], int]
) -> Table:
    """The roll call, ended from outside where the store neither answers nor fails.

    An exception in the main thread, such as Ctrl-C, does not end the thread that calls: it is told, and tells the rest.
    """
    claim = _claim(request)
    interrupted: list[str] = []
    has_ended = threading.Event()

    def call() -> Table:
        try:
            return call_roll(
                opened.for_roll_call,
                claim,
                deadline,
                lifeline=lifeline,
                is_alive=answers,
                bad_news=lambda: interrupted[0] if interrupted else request.bad_news(),
            )
        finally:
            has_ended.set()

    try:
        return deadline.bound(call, extra=ENDS_WITHIN)
    except DDPExtError:
        raise
    except TimeoutError:
        opened.sockets.sever()
        finding = f"it has not answered within init_timeout {deadline.seconds:g} s"
    except RuntimeError as cause:  # torch's errors of a store whose other end is gone
        finding = _first_line(cause)
    except BaseException as cause:
        interrupted.append(f"{claim} has given up the roll call: {reason_of(cause)}")
        has_ended.wait(ENDS_WITHIN)
        raise
    raise RendezvousError(f"{request.init_method}: lost the store during the roll call ({finding}); {opened.suspicion}")


def _abandoned(membership: Membership, cause: BaseException) -> BaseException:
    news = membership.await_news(0.0 if isinstance(cause, DDPExtError) else _NEWS_WITHIN)
    if news is None:
        membership.announce_failure(cause, "")
        error: BaseException = cause
    else:
        error = news.to_error()
    membership.close_group()
    membership.retire()
    return error


def _claim(request: Request) -> Claim:
    return Claim(
        rank=request.world.rank,
        world_size=request.world.world_size,
        device=str(request.device),
        init_method=request.init_method,
        versions=request.versions,
    )


def _open_store(request: Request, deadline: Deadline) -> OpenedStore:
    with sockets_opened() as sockets:
        if isinstance(request.where, str):
            return OpenedStore(open_file(request.where, deadline), sockets, request.where)
        if request.hosted_by == "rank 0" and request.world.rank == 0:
            store = host_tcp(request.where, deadline, listener=request.listener)
        else:
            store = connect_tcp(
                request.where,
                deadline,
                foreign=request.hosted_by == "agent",
                host_is_busy=request.hosted_by == "launcher",
            )
        return OpenedStore(PrefixStore("lightning_ddp_ext", store), sockets, None)


def _adopt_foreign_group(request: Request) -> None:
    mine = (dist.get_rank(), dist.get_world_size())
    if request.is_explicit or mine != (request.world.rank, request.world.world_size):
        raise GroupInUseError(
            f"a process group that lightning_ddp_ext did not open is in use (rank {mine[0]} of {mine[1]}), and this "
            f"Trainer asks for rank {request.world.rank} of {request.world.world_size} by {request.init_method}; "
            "call torch.distributed.destroy_process_group() before fit, or give the Trainer no init_method"
        )
    _logger.warning(
        "using the process group that is open already: init_timeout and timeout have no effect, "
        "and a rank that dies is not noticed by lightning_ddp_ext"
    )


def _first_line(cause: BaseException) -> str:
    return str(cause).partition("\n")[0][:200]
