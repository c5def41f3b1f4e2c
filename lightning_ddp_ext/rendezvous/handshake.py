"""Connect all ranks to rank 0, or raise the same error on all of them.

1. A rank sends ``hello``, with the nonce of rank 0's address and its ``RankInfo``, until
   rank 0 accepts it. Rank 0 closes a connection whose hello it does not answer.
2. Rank 0 replies ``accepted``, with the port of its store. The rank opens the store, and
   waits.
3. A rank whose ``init_timeout`` passes sends ``overdue``, with this timeout.
4. Rank 0 decides once. When all ranks have connected, it sends ``welcome``, with all
   ranks in order, and ``route``, with its address for ranks on other networks, empty
   without any. After the first error, it sends ``refused``, with the error that ranks
   raise.

All but ``hello`` are keys in messages on the topic ``handshake``.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import partial

from torch.distributed import HashStore, Store, TCPStore

from lightning_ddp_ext.errors import RendezvousError
from lightning_ddp_ext.rank_lists import listed, ranks_in_words
from lightning_ddp_ext.rendezvous.channel import CLOSED, Channel, Connection, Message, encode
from lightning_ddp_ext.rendezvous.contact import (
    Contact,
    StartUp,
    find_rank_zero,
    raise_if_refused,
    reach,
)
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.endpoint import (
    STORE_OPERATION,
    Address,
    TcpEndpoint,
    connect_store,
)
from lightning_ddp_ext.rendezvous.network import host_of, listen
from lightning_ddp_ext.rendezvous.opened_sockets import OpenedSockets
from lightning_ddp_ext.rendezvous.request import RankInfo, Request

_POLL = 0.25  # seconds between checks for conditions that end the wait without a message


@dataclass(frozen=True)
class Connections:
    """The results of the handshake; the connections stay open until the context closes.

    Attributes:
        channel: the channel to rank 0, or on rank 0 to all other ranks.
        table: all ranks, in order.
        store: rank 0's store.
        store_sockets: the sockets of the connection to the store.
        route: the address at which ranks in other networks can reach this one; empty if
            all ranks are in one network, such as that of a host.
    """

    channel: Channel
    table: tuple[RankInfo, ...]
    store: Store
    store_sockets: OpenedSockets | None = None
    route: str = ""


def connect(request: Request, deadline: Deadline) -> Connections:
    """Connect to the other ranks. Collective.

    Raises:
        RendezvousError: some ranks did not connect in time, two processes claim one
            rank, world sizes differ, or a rank exited.
        RankDiedError: rank 0 died after all ranks had connected.
    """
    world = request.world
    info = RankInfo(world.rank, world_size=world.world_size, run=request.run)
    if world.world_size == 1:
        return Connections(Channel(request.timeouts.heartbeat), (info,), HashStore())
    start_up = StartUp(request, request.make_endpoint(deadline), info, deadline)
    if world.is_rank_zero:
        return RankZero(start_up).connect()
    contact = find_rank_zero(start_up)
    try:
        return _join_run(contact, start_up)
    except BaseException:
        contact.channel.close(in_order=False)
        raise


# On ranks other than 0.


def _join_run(contact: Contact, start_up: StartUp) -> Connections:
    """Open rank 0's store, and wait until all ranks are connected."""
    with OpenedSockets() as store_sockets:  # records them, to abort them later
        # Now, since after the welcome hundreds of ranks would do so simultaneously.
        store = connect_store(
            contact.peer_host,
            contact.replies["accepted"],
            start_up.deadline,
            contact.raise_if_ended,
        )
    table = contact.await_welcome()
    is_in_same_network = start_up.info.network == table[0].network
    route = contact.replies["route"] if is_in_same_network else contact.own_host
    return Connections(contact.channel, table, store, store_sockets, route)


# On rank 0.


class RankZero:
    """The part of rank 0, which decides whether the ranks start.

    Its channel's thread accepts ranks, and decides after their messages. The main
    thread waits, and decides after conditions that no message reports. Each holds the
    lock of the channel's messages meanwhile. Only the first decision counts, and after
    it, only ``_greeted`` changes.

    Args:
        start_up: that of rank 0.
    """

    def __init__(self, start_up: StartUp) -> None:
        self._start_up = start_up
        self._endpoint = start_up.endpoint
        self._info = start_up.info
        self._channel = Channel(start_up.request.timeouts.heartbeat)
        # All of these with the lock, or after the decision.
        self._accepted = {0: self._info}  # by rank
        self._greeted: set[int] = set()  # the ranks that have sent a hello
        self._route = ""  # of the welcome
        # Empty while undecided, then a body with the key "welcome" or "refused".
        self._decision: Message = {}

    def connect(self) -> Connections:
        """Wait until every rank has connected, and reply to late ones after an error.

        Raises:
            RendezvousError: as for :func:`connect`.
        """
        try:
            return self._connect()
        except BaseException:
            self._channel.close(in_order=False)
            raise

    def _connect(self) -> Connections:
        listener, address = self._listen()
        with OpenedSockets() as store_sockets:  # records them, to abort them later
            store = _host_store(listener.getsockname()[0])
        self._channel.on_message("handshake", lambda body: self._refuse_missing(body["overdue"]))
        self._channel.accept(listener, partial(self._admit, address.nonce, store.port))
        self._endpoint.publish(address)  # last, since other ranks then connect
        try:
            self._await_decision()
            if "refused" in self._decision:
                self._await_late_ranks()
        finally:
            self._endpoint.withdraw()
            self._channel.stop_accepting()
        raise_if_refused(self._decision)
        self._channel.wait_until_sent()  # this rank may exit next, and the others name its death
        return Connections(self._channel, tuple(self._table), store, store_sockets, self._route)

    # On the main thread.

    def _listen(self) -> tuple[socket.socket, Address]:
        """Return a listening socket and its address, unless there is another rank 0."""
        earlier = self._endpoint.look_up()
        if earlier.nonce:
            self._raise_if_rank_zero_is_at(earlier)
        try:
            return self._endpoint.listen()
        except RendezvousError:  # another process has the port
            self._raise_if_rank_zero_is_at(earlier)
            raise

    def _raise_if_rank_zero_is_at(self, address: Address) -> None:
        """Raise the refusal of another rank 0 if one is answering at this address.

        It never accepts this rank, since two processes then claim rank 0.
        """
        for host in address.candidates():
            deadline = Deadline(self._start_up.attempt_seconds)
            with suppress(OSError):  # nothing, or another program, is answering there
                reach(host, address, replace(self._start_up, deadline=deadline))

    def _await_decision(self) -> None:
        """Wait for a decision, or refuse the start after an exit or the deadline."""
        with self._channel.arrived:  # released in each wait for a message
            while not self._decision:
                if sentence := self._exit_of_a_rank() or self._start_up.request.launch_failure():
                    self._decide({"refused": [sentence]})
                if self._start_up.deadline.expired:
                    self._refuse_missing(self._start_up.deadline.seconds)
                self._channel.wait_for(
                    lambda: bool(self._decision or self._channel.ended),
                    min(_POLL, self._start_up.deadline.remaining),
                )

    def _exit_of_a_rank(self) -> str:
        """Describe the exit of an accepted rank, if any."""
        ended = dict(self._channel.ended)
        if not ended:
            return ""
        rank = min(ended)
        return (
            f"{self._accepted[rank]} exited before all ranks had connected ({ended[rank]}); look at"
            " its output"
        )

    def _await_late_ranks(self) -> None:
        """Wait shortly for late ranks, to which the channel's thread sends the refusal.

        Without this wait, 415 of 512 ranks did not receive a refusal.
        """
        others = set(range(1, self._info.world_size))
        self._channel.wait_for(
            lambda: others <= self._greeted, self._start_up.request.timeouts.after_refusal
        )

    # On the channel's thread, with the lock.

    def _admit(
        self, nonce: str, store_port: int, connection: Connection, topic: str, body: Message
    ) -> None:
        """Reply to a hello; another program's connection may stay open.

        Args:
            nonce: that of this rank's address, which a hello must have.
            store_port: the port of the store, for a rank that is accepted.
            connection: the connection, which has no rank yet.
            topic: the topic of the message.
            body: its body.
        """
        if topic != "hello":
            return
        is_for_this_rank = body.pop("nonce", None) == nonce
        info = RankInfo.of(body)
        if info is None or not is_for_this_rank or "welcome" in self._decision:
            connection.close(CLOSED)
        elif self._info.run and info.run and self._info.run != info.run:
            sentence = (
                f"rank 0 at {self._where} belongs to another run ({self._info.run}) than {info}"
                f" ({info.run}); give each run its own MASTER_PORT or init_method"
            )
            connection.send(encode("handshake", {"refused": [sentence]}))
        else:
            self._accept(info, connection, store_port)

    def _accept(self, info: RankInfo, connection: Connection, store_port: int) -> None:
        """Accept a rank, or refuse the start if this rank does not fit."""
        self._greeted.add(info.rank)
        if conflict := self._conflict_with(info):
            self._decide({"refused": [conflict]})
        if self._decision:
            connection.send(encode("handshake", self._decision))
            return
        self._accepted[info.rank] = info
        if info.network != self._info.network:
            self._route = host_of(connection.socket.getsockname())
        self._channel.adopt(info.rank, connection)
        connection.send(encode("handshake", {"accepted": store_port}))
        if len(self._accepted) == self._info.world_size:
            self._decide({"welcome": [astuple(each) for each in self._table], "route": self._route})

    def _conflict_with(self, info: RankInfo) -> str:
        """Describe why a rank does not fit the accepted ones; empty if it does."""
        if info.world_size != self._info.world_size:
            return (
                f"world_size must be the same on all ranks: {self._info} has"
                f" {self._info.world_size}, {info} has {info.world_size}; start every rank with the"
                " same settings"
            )
        known = self._accepted.get(info.rank)
        if known is None:
            return ""
        return (
            f"two processes claim rank {info.rank}: pid {known.pid} on host {known.host} and pid"
            f" {info.pid} on host {info.host}; set a different RANK (or rank=) for each process"
        )

    # On both threads, with the lock.

    def _refuse_missing(self, seconds: float) -> None:
        """Refuse the start because some ranks did not connect within a rank's limit."""
        missing = sorted(set(range(self._info.world_size)) - self._accepted.keys())
        sentence = (
            f"{ranks_in_words(missing)} of {self._info.world_size} did not connect to"
            f" {self._where} within {seconds:g} s (init_timeout); present: {listed(self._table)};"
            " check that every rank is running and can reach rank 0, or raise init_timeout"
        )
        self._decide({"refused": [sentence, *missing]})

    def _decide(self, decision: Message) -> None:
        """Send the decision to all ranks that have connected, unless there is one."""
        if not self._decision:
            self._decision = decision
            self._channel.send("handshake", decision)

    @property
    def _table(self) -> list[RankInfo]:
        """The accepted ranks, in order."""
        return [self._accepted[rank] for rank in sorted(self._accepted)]

    @property
    def _where(self) -> str:
        """Where the ranks find rank 0, for messages."""
        if self._start_up.request.init_method == "env://" and isinstance(
            self._endpoint, TcpEndpoint
        ):
            return f"{self._endpoint.where} (env://)"
        return self._start_up.request.init_method


def _host_store(bound_to: str) -> TCPStore:
    """Open the server of a store.

    It starts a thread, so the process should not fork afterwards.

    Args:
        bound_to: the address of rank 0's control listener: a loopback address, or that
            of all interfaces.
    """
    listener = listen(bound_to, 0)
    # A host may have IPv6 without ::1.
    host = "127.0.0.1" if bound_to in ("::", "0.0.0.0") else bound_to
    return TCPStore(
        host,
        int(listener.getsockname()[1]),
        is_master=True,
        wait_for_workers=False,
        timeout=STORE_OPERATION,
        master_listen_fd=listener.detach(),
    )
