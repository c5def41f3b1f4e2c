"""This process among the ranks: formed once by :func:`join`, used by every Trainer, closed once at the end.

The way from a request to a process group: :func:`join`, then on rank 0 ``Coordinator.wait`` and on every other rank
``Handshake.run``, which bring the table of all ranks, then ``ProcessGroups.form_default``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store

from lightning_ddp_ext.at_exit import at_exit
from lightning_ddp_ext.errors import DDPExtError, GroupInUseError, RendezvousError
from lightning_ddp_ext.rank_logger import rank_logger
from lightning_ddp_ext.rendezvous.channel import Channel, Listener
from lightning_ddp_ext.rendezvous.coordinator import Coordinator
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.handshake import Handshake
from lightning_ddp_ext.rendezvous.named_barrier import NamedBarriers
from lightning_ddp_ext.rendezvous.peer_event import PeerEvent, event_of, reason_of
from lightning_ddp_ext.rendezvous.peer_failure import PeerFailure, alone
from lightning_ddp_ext.rendezvous.process_group import ProcessGroups, abort_group
from lightning_ddp_ext.rendezvous.rank_table import Hello, RankInfo, RankTable
from lightning_ddp_ext.rendezvous.request import Request, Timeouts
from lightning_ddp_ext.rendezvous.sockets import Sockets
from lightning_ddp_ext.rendezvous.wire import Message

T = TypeVar("T")

_logger = rank_logger(__name__, ranks=0)  # for what is the same on all

_DEFAULT_TIMEOUT = timedelta(minutes=30)


class ProcessContext:
    """What this process shares with the other ranks: the channel, the store, and the process groups.

    Args:
        request: of the first Trainer.
        start: what the handshake has brought.
    """

    def __init__(self, request: Request, start: Start) -> None:
        self.world = request.world
        self.table = start.table
        self.store: Store = PrefixStore(start.table.start_id, start.store)
        self.failure: BaseException | None = None
        """What this rank has raised while others may have waited for it."""
        self._request = request
        self._start = start
        self._groups = ProcessGroups(request, self.store, "" if start.table.on_one_host else start.route)
        self._components: dict[object, Any] = {}
        self.peers = PeerFailure(request.world.rank, start.table, start.channel, request.timeouts, self._release)

    # Groups.

    def form_group(self, deadline: Deadline) -> None:
        """Form the default group. Collective."""
        with self._forming():
            self._groups.form_default(self._request, deadline)

    def side_group(self) -> dist.ProcessGroup:
        """A gloo group of all ranks beside the default one, for small collectives on CPU memory. Collective, once."""
        return self.new_group(range(self.world.world_size), backend="gloo", purpose="small collectives")

    def new_group(self, ranks: Sequence[int], *, backend: str | None = None, purpose: str = "") -> dist.ProcessGroup:
        """A group of some ranks; it ends with the default one. Collective over all ranks, the first time.

        Args:
            ranks: those in it; others get no group that they could use.
            backend: as in ``torch.distributed.new_group``.
            purpose: the same ranks and purpose get the same group.
        """
        ranks = list(ranks)
        group = self._groups.known(ranks, backend, purpose)
        if group is None:
            # In a store a rank would wait for one that has failed or is elsewhere.
            self.barriers.wait(self.barriers.begin(f"forming a group{' for ' if purpose else ''}{purpose}"))
            with self._forming():
                group = self._groups.form(ranks, backend, purpose)
        return group

    def reuse(self, request: Request) -> None:
        """Serve another Trainer with the same ranks.

        Raises:
            GroupInUseError: it wants other ranks, or another init method.
        """
        self.check(request)
        request = replace(request, init_method=self._request.init_method, endpoint=self._request.endpoint)
        if request.backend != self._request.backend:
            self._groups.close(is_broken=False)
            self._request = request
            self.form_group(Deadline(request.init_timeout.total_seconds()))
        elif request.timeout != self._request.timeout:
            self._groups.set_timeout(request.timeout)
        self._request = request

    def check(self, request: Request) -> None:
        """Refuse a Trainer that wants other ranks than these.

        Raises:
            GroupInUseError: world size, rank or init method differ.
        """
        if (request.world.rank, request.world.world_size) != (self.world.rank, self.world.world_size):
            raise GroupInUseError(
                f"this process is rank {self.world.rank} of {self.world.world_size} already, and this Trainer wants it "
                f"to be rank {request.world.rank} of {request.world.world_size}; give every Trainer of a script the "
                "same devices and num_nodes, or run the other one in a script of its own"
            )
        if len(self.table) > 1 and request.is_explicit and request.init_method != self._request.init_method:
            raise GroupInUseError(
                f"this process's group was formed with init_method {self._request.init_method!r}, and this Trainer "
                f"asks for {request.init_method!r}; use one init method in a script"
            )

    @property
    def is_usable(self) -> bool:
        """Whether the group stands and every rank is still in it, as far as this rank knows."""
        return self.peers.cause is None and self.failure is None and dist.is_initialized()

    def prepare_restart(self, request: Request) -> Request:
        """Let go of what a new start of the same ranks needs, after a failure that this process has lived through.

        Returns:
            The request of the new start, which knows from this context's channel which ranks have ended.

        Raises:
            RankDiedError: a rank has died.
            GroupInUseError: the request wants other ranks.
        """
        self.check(request)
        cause = self.peers.cause
        if cause is not None and cause.kind == "died":
            raise cause.to_error()
        self.close_group()
        self._start.stop_accepting()
        return replace(
            request,
            init_method=self._request.init_method,
            endpoint=self._request.endpoint,
            absence=lambda: request.absence() or self._absence(),
        )

    def _absence(self) -> str | None:
        ended = ", ".join(map(str, self.peers.ended))
        if not ended:
            return None
        return (
            f"{ended} ended after the ranks had worked together, and cannot come again; look at its output, or catch "
            "the failure on every rank if all are to go on"
        )

    @property
    def timeouts(self) -> Timeouts:
        """Those of the control channel."""
        return self._request.timeouts

    @property
    def collective_timeout(self) -> timedelta:
        """How long a rank waits for the others in a collective."""
        return self._request.timeout or _DEFAULT_TIMEOUT

    # Messages, and what is built on them.

    def send(self, topic: str, body: Message) -> None:
        """Send a message to rank 0, or from rank 0 to all others; never waits, never raises."""
        if self._start.channel is not None:
            self._start.channel.send(topic, body)

    def listen(self, topic: str, listener: Listener) -> None:
        """Have messages of a topic passed to ``listener`` on the channel's thread."""
        if self._start.channel is not None:
            self._start.channel.listen(topic, listener)

    def component(self, kind: Callable[[ProcessContext], T]) -> T:
        """The one object that ``kind`` makes for this context."""
        with self.peers.arrived:
            if kind not in self._components:
                self._components[kind] = kind(self)
            return cast(T, self._components[kind])

    @property
    def barriers(self) -> NamedBarriers:
        """Where ranks wait for each other."""
        return self.component(NamedBarriers)

    # Failures.

    def announce_failure(self, exception: BaseException, traceback_text: str) -> None:
        """Tell the other ranks why this one cannot go on, and release them. Never raises, never waits for long."""
        self.failure = exception
        mine = self.table[self.world.rank]
        self.peers.report_own_failure(event_of("failed", mine, reason_of(exception), traceback_text))
        self.close_group()

    def close_group(self) -> None:
        """End this rank's part in all groups: a rank that waits for it in a collective is released."""
        self.peers.note_raised()
        # Frames of the traceback may keep the group's C++ side alive, so that destroying alone closes nothing.
        self._groups.cut()
        self._groups.close(is_broken=True)

    @contextmanager
    def _forming(self) -> Iterator[None]:
        """While the block runs, the end of another rank also ends the wait for it in the store."""
        self.peers.is_forming = True
        try:
            if self.peers.cause is not None:
                raise self.peers.cause.to_error()
            yield
        finally:
            self.peers.is_forming = False

    def _release(self, event: PeerEvent) -> None:
        """Wake the main thread where it waits for other ranks."""
        self._groups.cut()
        if self.peers.is_forming and self._start.store_sockets is not None:
            self._start.store_sockets.sever()
        if "nccl" in self._request.backend and dist.is_initialized():
            abort_group()

    # The end.

    def close(self) -> None:
        """Close groups, channel and store."""
        try:
            self._groups.close(is_broken=self.failure is not None or self.peers.cause is not None)
        finally:
            self._groups.release()
            self._components.clear()
            self._start.close(in_order=True)
            self.peers.close()


class Start:
    """What the handshake has brought, open as long as the process is a rank."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.coordinator: Coordinator | None = None
        self.store_sockets: Sockets | None = None
        self.table: RankTable
        self.store: Store
        self.route = ""

    def run(self, request: Request, deadline: Deadline) -> None:
        """Find the other ranks. Collective."""
        rank, world_size = request.world.rank, request.world.world_size
        hello = Hello(RankInfo(rank), world_size, request.init_method, request.versions)
        if world_size == 1:
            self.table, self.store = alone(hello.info), HashStore()
            return
        self.channel = Channel(request.timeouts.heartbeat)
        if rank == 0:
            self.coordinator = Coordinator(hello, request.endpoint, self.channel, deadline, request.timeouts)
            self.table = self.coordinator.wait(request.absence)
            found: Coordinator | Handshake = self.coordinator
            self.store = self.coordinator.store
        else:
            found = handshake = Handshake(hello, request.endpoint, self.channel, deadline, request.timeouts)
            self.table, self.store = handshake.run(request.absence)
        self.route, self.store_sockets = found.route, found.store_sockets

    def stop_accepting(self) -> None:
        """On rank 0, take no more connections, and remove what was published."""
        if self.coordinator is not None:
            self.coordinator.close()

    def close(self, *, in_order: bool) -> None:
        """End the channel."""
        self.stop_accepting()
        if self.channel is not None:
            self.channel.close(in_order=in_order)


_context: ProcessContext | None = None
_of_parent: ProcessContext | None = None


def current() -> ProcessContext | None:
    """This process's context; ``None`` before :func:`join` and after :func:`leave`."""
    return _context


def join(request: Request) -> ProcessContext | None:
    """Find the other ranks and form the process group with them. Collective: every rank must call it.

    A process joins once. Later calls use the same ranks again: with another backend a new group is formed, another
    timeout is set, and everything else that differs is refused. A world of one rank is left for another one. After a
    failure that all ranks have lived through they start anew.

    Returns:
        The context; ``None`` where somebody else has opened the default process group already, which is then used.

    Raises:
        RendezvousError: the ranks could not find each other within ``init_timeout``.
        GroupInUseError: this process has a group already that does not fit.
    """
    global _context
    if _context is not None and len(_context.table) == 1 and request.world.world_size != 1:
        leave()
    if _context is None and dist.is_initialized():
        _adopt_foreign_group(request)
        return None
    if _context is None:
        _context = _joined(request)
        at_exit(leave)
    elif _context.is_usable:
        _context.reuse(request)
    else:
        _context = _joined_again(_context, request)
    return _context


def _joined_again(before: ProcessContext, request: Request) -> ProcessContext:
    """Start anew among processes that have lived through a failure."""
    unheard = before.peers.unheard_cause
    try:
        context = _joined(before.prepare_restart(request))
    except RendezvousError:
        if unheard is None or not before.peers.has_ended(unheard.rank):
            raise
        error = unheard.to_error()  # it is why that rank does not come, and this process has not been told so far
        raise error from error.__cause__
    before.close()
    return context


def _joined(request: Request) -> ProcessContext:
    deadline = Deadline(request.init_timeout.total_seconds())
    start = Start()
    try:
        start.run(request, deadline)
    except BaseException:
        start.close(in_order=False)
        raise
    context = ProcessContext(request, start)
    try:
        context.peers.start()
        context.form_group(deadline)
    except BaseException as error:
        cause = _cause_of_broken_start(context, error)
        raise cause from cause.__cause__
    return context


def _cause_of_broken_start(context: ProcessContext, error: BaseException) -> BaseException:
    """The error of the rank that broke the forming of the group, or this rank's own, of which the others are told."""
    is_own = isinstance(error, DDPExtError)
    event = context.peers.wait(0.0 if is_own else context.timeouts.first_cause)
    if event is None:
        context.announce_failure(error, "")
    else:
        context.close_group()
    context.close()
    return error if event is None else event.to_error()


def leave() -> None:
    """Close group, channel and store; every process of a run does it once, at its end.

    Not in a strategy's ``teardown``: hooks and a second ``fit`` still need the group.
    """
    global _context
    if _context is not None:
        _context.close()
        _context = None


def _forget() -> None:
    """In a forked child, such as a loader's worker: the context is its parent's."""
    global _context, _of_parent
    # Kept all the same: a store that ends joins threads, and those are the parent's.
    _of_parent, _context = _context, None


os.register_at_fork(after_in_child=_forget)


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
