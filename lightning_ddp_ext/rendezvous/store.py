"""Open the TCP store that an init method stands for, within a deadline, or say in one sentence why not."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from datetime import timedelta

from torch.distributed import Store, TCPStore

from lightning_ddp_ext.errors import StoreError
from lightning_ddp_ext.rank_logger import own_logger
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.init_method import Tcp
from lightning_ddp_ext.rendezvous.sockets import is_loopback, listen

_logger = own_logger(__name__)

# Rank 0 leaves this key in a store of ours, so that nobody mistakes another job's store for it.
_OURS = "lightning_ddp_ext"
# A server that is ours answers in milliseconds; the client itself would wait for a silent one for ever.
_ANSWER_WITHIN = 10.0
# To a server that answers in another language, it keeps its own timeout, more or less.
_EXCEEDS_BY = 1.5
_WORKERS_END_WITHIN = 6.0
_LOOKS_FOR = 1.0


def serve(listener: socket.socket) -> TCPStore:
    """Open a store's server on a socket that listens already; the socket becomes the server's.

    Nothing may be forked once this has returned: the server has a thread.
    """
    bound_to, port = listener.getsockname()[:2]
    host = bound_to if is_loopback(bound_to) else _loopback_of(listener.family)
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=_patience(), master_listen_fd=listener.detach()
    )
    store.set(_OURS, "1")
    return store


def host_tcp(where: Tcp, deadline: Deadline, *, listener: socket.socket | None = None) -> Store:
    """Open the store of ``where`` as the rank that hosts it.

    Args:
        where: the address that the other ranks know.
        deadline: when to give up.
        listener: the socket, where the launching process has bound it already.

    Raises:
        StoreError: the port cannot be bound, and nobody of this run holds it.
    """
    if listener is not None:
        return serve(listener)
    try:
        return serve(listen(where.host, where.port))
    except socket.gaierror as cause:
        raise _unresolvable(where, cause) from None
    except OSError as cause:
        if cause.errno != errno.EADDRINUSE:
            raise _cannot_bind(where, cause) from None
        return _join_or_outlive_the_holder(where, deadline, cause)


def connect_tcp(where: Tcp, deadline: Deadline, *, foreign: bool = False, host_is_busy: bool = False) -> Store:
    """Open the store of ``where`` as a rank that does not host it; waits for the host to come.

    Args:
        where: the host's address.
        deadline: when to give up.
        foreign: the store belongs to a launcher (torchrun's agent), so that our mark is not expected in it.
        host_is_busy: the host listens, and may be silent for long: it serves the store once it has started all ranks.

    Raises:
        StoreError: nobody listens there, the name does not resolve, or what listens is no store of ours.
    """
    _wait_until_reachable(where, deadline)
    store = _client(where, deadline if host_is_busy else deadline.sooner(_ANSWER_WITHIN))
    if foreign:
        return store
    try:
        _wait_for_our_mark(store, where, deadline.sooner(_ANSWER_WITHIN))
    except StoreError:
        raise
    except RuntimeError:
        raise _gone(where) from None
    return store


def _patience() -> timedelta:
    # Of one operation on a store whose keys we know to be there; waiting for keys is done by polling.
    return timedelta(seconds=10)


def _loopback_of(family: int) -> str:
    return "::1" if family == socket.AF_INET6 else "127.0.0.1"


def _join_or_outlive_the_holder(where: Tcp, deadline: Deadline, cause: OSError) -> Store:
    """Someone holds the port: another process that is rank 0 too, which the roll call finds out; or a loader's worker.

    After a restart, workers of the rank 0 that was killed keep its port until they notice, a few seconds later.
    """
    with suppress(StoreError):
        return connect_tcp(where, deadline.sooner(2.0))
    for _ in deadline.sooner(_WORKERS_END_WITHIN).ticks(longest=0.25):
        with suppress(OSError):
            return serve(listen(where.host, where.port))
    raise _cannot_bind(where, cause)


def _cannot_bind(where: Tcp, cause: OSError) -> StoreError:
    return StoreError(
        f"init_method '{where}': rank 0 on {socket.gethostname()} (pid {os.getpid()}) cannot bind port {where.port}: "
        f"{cause.strerror or cause}; stop the program that holds it or choose another port"
    )


def _wait_until_reachable(where: Tcp, deadline: Deadline) -> None:
    reason: OSError | None = None
    warned = False
    for _ in deadline.ticks(longest=0.25):
        try:
            socket.create_connection((where.host, where.port), timeout=max(0.1, min(3.0, deadline.remaining))).close()
            return
        except OSError as cause:
            reason = cause
        if isinstance(reason, socket.gaierror) and not warned:
            # A cluster's name service may learn the name of rank 0's host only when that host is up.
            _logger.warning("init_method '%s': host %r does not resolve yet; trying again", where, where.host)
            warned = True
    if isinstance(reason, socket.gaierror):
        raise _unresolvable(where, reason)
    raise StoreError(
        f"no answer from rank 0 at {where.host}:{where.port} within {deadline.seconds:g} s "
        f"({_in_words(reason)}); check that rank 0 is started, that this address is its host's, and that no firewall "
        "is between"
    )


def _unresolvable(where: Tcp, cause: socket.gaierror) -> StoreError:
    return StoreError(
        f"init_method '{where}': host {where.host!r} does not resolve on {socket.gethostname()} ({cause.strerror}); "
        "give the address of rank 0's host, or a name that every host knows"
    )


def _in_words(reason: OSError | None) -> str:
    if reason is None:
        return "not tried"
    return "timed out" if isinstance(reason, TimeoutError) else str(reason.strerror or reason)


def _client(where: Tcp, deadline: Deadline) -> Store:
    """A client's constructor ignores its timeout when the server stays silent, so it runs in a thread of its own."""

    def construct() -> Store:
        return TCPStore(where.host, where.port, wait_for_workers=False, timeout=deadline.as_timedelta())

    try:
        store = deadline.bound(construct, extra=_EXCEEDS_BY)
    except Exception:
        raise (_no_answer(where) if _is_reachable(where) else _gone(where)) from None
    store.set_timeout(_patience())
    return store


def _is_reachable(where: Tcp) -> bool:
    with suppress(OSError):
        socket.create_connection((where.host, where.port), timeout=_LOOKS_FOR).close()
        return True
    return False


def _wait_for_our_mark(store: Store, where: Tcp, deadline: Deadline) -> None:
    for _ in deadline.ticks():
        if store.check([_OURS]):
            return
    raise StoreError(
        f"what listens at {where.host}:{where.port} is not rank 0's store: it is a torch.distributed store, but not of "
        "a run with lightning_ddp_ext; choose a port that no other program uses, or give the address of rank 0's host"
    )


def _gone(where: Tcp) -> StoreError:
    return StoreError(f"rank 0 at {where.host}:{where.port} has gone away after it had answered; look at its output")


def _no_answer(where: Tcp) -> StoreError:
    return StoreError(
        f"what listens at {where.host}:{where.port} does not answer as a torch.distributed store does: it is another "
        "program, or rank 0's process is stopped; choose a port that no other program uses, or look after rank 0"
    )


def wait_for(store: Store, key: str, deadline: Deadline) -> bytes | None:
    """The value of ``key`` once somebody sets it; ``None`` if nobody does before the deadline."""
    for _ in deadline.ticks():
        if store.check([key]):
            return bytes(store.get(key))
    return None
