"""Connect all ranks to rank 0, or raise the same error on all of them.

===========  ==================================  =======================================
topic        from a rank to rank 0               from rank 0 to ranks
===========  ==================================  =======================================
"hello"      nonce of the address, RankInfo
"handshake"                                      ``accepted``: the port of rank 0's store
..                                               ``refused``: the error that ranks raise
..                                               ``welcome``: all ranks, in order; and
..                                               ``route``: rank 0's address for ranks on
..                                               other networks, empty without any
..           ``overdue``: its ``init_timeout``
===========  ==================================  =======================================

A rank sends its hello until rank 0 has accepted it, opens the store, and waits for the
welcome. Rank 0 decides once: when all ranks have connected, it sends the welcome, and
after the first error the refusal. It closes a connection whose hello it does not answer.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field

from torch.distributed import HashStore, Store, TCPStore

from lightning_ddp_ext.errors import RendezvousError
from lightning_ddp_ext.rank_lists import listed, ranks_in_words
from lightning_ddp_ext.rendezvous.channel import (
    CLOSED,
    MALFORMED,
    Channel,
    Connection,
    Message,
    encode,
)
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.endpoint import (
    STORE_OPERATION,
    Address,
    Endpoint,
    TcpEndpoint,
    connect_store,
    host_of,
    listen,
)
from lightning_ddp_ext.rendezvous.opened_sockets import OpenedSockets
from lightning_ddp_ext.rendezvous.peers import event_of
from lightning_ddp_ext.rendezvous.request import RankInfo, Request

_POLL = 0.25  # seconds between checks for conditions that end the wait without a message
# Why a connection to an address failed, by the reason for which it was closed.
_NO_REPLY = {
    None: "it accepted the connection, but did not reply",
    CLOSED: "it closed the connection without replying",
    MALFORMED: "a program other than rank 0 is answering there",
}


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
    kind = RankZero if world.is_rank_zero else OtherRank
    part = kind(request, request.make_endpoint(deadline), info, deadline)
    try:
        return part.connect()
    except BaseException:
        part.channel.close(in_order=False)
        raise


@dataclass
class Handshake:
    """What the parts of rank 0 and of the other ranks have in common.

    Attributes:
        request: the Trainer's request.
        endpoint: the way to find rank 0.
        info: this rank.
        deadline: the end of ``init_timeout``.
        channel: the channel of the last attempt.
        replies: what rank 0 has replied, as in the table of the module.
        route: as in :class:`Connections`.
    """

    request: Request
    endpoint: Endpoint
    info: RankInfo
    deadline: Deadline
    channel: Channel = field(init=False)
    replies: Message = field(default_factory=dict)
    route: str = ""

    def __post_init__(self) -> None:
        self.channel = Channel(self.request.timeouts.heartbeat)

    def table(self) -> tuple[RankInfo, ...]:
        """Return all ranks, in order, from the welcome."""
        return tuple(RankInfo(*values) for values in self.replies["welcome"])

    def raise_if_refused(self) -> None:
        """Raise the refusal, if rank 0 has refused the start."""
        if "refused" in self.replies:
            sentence, *missing = self.replies["refused"]
            raise RendezvousError(sentence, missing=tuple(missing))


@dataclass
class OtherRank(Handshake):
    """The part of any rank other than rank 0."""

    # Text, since an exception keeps the frames of the Trainer's run.
    _reason: str = "not tried"
    _where: str = ""  # the latest address that accepted a connection, for messages
    _store_host: str = ""

    def connect(self) -> Connections:
        """Connect to rank 0, and wait until all ranks are connected."""
        self._find_rank_zero()
        with OpenedSockets() as store_sockets:
            # Now, since after the welcome hundreds of ranks would do so simultaneously.
            port = self.replies["accepted"]
            store = connect_store(self._store_host, port, self.deadline, self._raise_if_ended)
        table = self._await_welcome()
        if self.info.network == table[0].network:
            self.route = self.replies["route"]
        return Connections(self.channel, table, store, store_sockets, self.route)

    # Finding rank 0.

    def _find_rank_zero(self) -> None:
        """Try to connect until rank 0 accepts this rank."""
        for _ in self.deadline.ticks():
            if sentence := self.request.launch_failure():
                raise RendezvousError(sentence)
            self._reason = "rank 0 has not published its address there"
            address = self.endpoint.look_up()
            for host in address.candidates():
                try:
                    self.send_hello(host, address)
                except OSError as error:
                    # A name may become resolvable only when its host is up.
                    self._reason = str(error.strerror or error)
                else:
                    return
        raise self._not_found()

    def send_hello(self, host: str, address: Address) -> None:
        """Wait until the process at an address has accepted this rank.

        Public because rank 0 uses it to detect another rank 0.

        Raises:
            OSError: it does not reply, or does not wait for this rank.
            RendezvousError: it is a rank 0, and has refused this rank.
        """
        connected = self._connect_to(host, address.port)
        self._where = f"{host}:{address.port}"
        self._store_host = host_of(connected.getpeername())
        self.route = host_of(connected.getsockname())
        self.channel.close()  # that of an earlier attempt
        self.channel = Channel(self.request.timeouts.heartbeat)
        self.replies = {}
        self.channel.on_message("handshake", self._handle_message)
        self.channel.connect(0, connected)
        self.channel.send("hello", {"nonce": address.nonce, **asdict(self.info)})
        # Rank 0 may be busy, so only a closed connection, the deadline or a changed
        # address ends this wait.
        limit = self.request.timeouts.connect
        while not self._wait_for(min(limit, self.deadline.remaining), "accepted", "refused"):
            if self.deadline.expired or self.endpoint.look_up() != address:
                break
        self.raise_if_refused()
        if "accepted" not in self.replies:
            raise OSError(_NO_REPLY.get(self.channel.ended.get(0), _NO_REPLY[CLOSED]))

    def _connect_to(self, host: str, port: int) -> socket.socket:
        seconds = max(0.1, min(self.request.timeouts.connect, self.deadline.remaining))
        connected = socket.create_connection((host, port), timeout=seconds)
        if connected.getsockname() == connected.getpeername():
            # No process listens, and the kernel chose the same port for this side. A
            # reset frees it for rank 0.
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connected.close()
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        return connected

    def _not_found(self) -> RendezvousError:
        where = self.request.init_method
        remedy = "that it uses the same init_method (a file must be on a disk that all hosts share)"
        if isinstance(self.endpoint, TcpEndpoint):
            where = f"{self.endpoint.where.host}:{self.endpoint.where.port}"
            remedy = "that its host has this address"
        return RendezvousError(
            f"{self.info} did not find rank 0 at {where} within {self.deadline.seconds:g} s"
            f" ({self._reason}); check that rank 0 is running, {remedy}, and that no firewall"
            " blocks the connection"
        )

    # Waiting for the other ranks.

    def _await_welcome(self) -> tuple[RankInfo, ...]:
        if not self._wait_for(self.deadline.remaining, "welcome", "refused"):
            self.channel.send("handshake", {"overdue": self.deadline.seconds})
            self._wait_for(self.request.timeouts.answer, "welcome", "refused")
        if "welcome" not in self.replies:
            self._raise_if_ended()
            raise self._lost("did not reply")
        return self.table()

    def _raise_if_ended(self) -> None:
        has_ended = 0 in self.channel.ended  # read first: rank 0 closes after a refusal
        self.raise_if_refused()
        if not has_ended:
            return
        if "welcome" in self.replies:
            reason = self.channel.ended[0] or "it closed the connection"
            raise event_of("died", self.table()[0], reason).to_error()
        raise self._lost("closed the connection")

    def _lost(self, finding: str) -> RendezvousError:
        return RendezvousError(
            f"rank 0 at {self._where} {finding} after accepting {self.info}; look at rank 0's"
            " output"
        )

    def _handle_message(self, body: Message) -> None:
        """Add replies, all together; on the channel's thread."""
        self.replies = {**self.replies, **body}

    def _wait_for(self, seconds: float, *replies: str) -> bool:
        """Wait until one of ``replies`` arrives or the connection is closed.

        Return whether one of them happened within ``seconds``.
        """
        return self.channel.wait_for(
            lambda: any(reply in self.replies for reply in replies) or 0 in self.channel.ended,
            seconds,
        )


@dataclass
class RankZero(Handshake):
    """The part of rank 0, which decides on its channel's thread.

    The main thread waits, and checks the conditions that no message reports.
    """

    _accepted: dict[int, RankInfo] = field(default_factory=dict)
    _heard: set[int] = field(default_factory=set)  # the ranks that have sent a hello

    def connect(self) -> Connections:
        """Wait until every rank has connected, and reply to late ones after an error."""
        self._accepted[0] = self.info
        listener, self._address = self._listen()
        with OpenedSockets() as store_sockets:
            self._store = _host_store(listener.getsockname()[0])
        self.channel.on_message("handshake", self._handle_message)
        self.channel.accept(listener, self._admit)
        self.endpoint.publish(self._address)
        try:
            self._await_decision()
            self.raise_if_refused()
        except RendezvousError:
            # Without these seconds, 415 of 512 ranks did not receive a refusal.
            others = set(range(1, self.info.world_size))
            self.channel.wait_for(
                lambda: others <= self._heard, self.request.timeouts.after_refusal
            )
            raise
        finally:
            self.endpoint.withdraw()
            self.channel.stop_accepting()
        self.channel.wait_until_sent()  # this rank may exit next, and the others name its death
        return Connections(self.channel, self.table(), self._store, store_sockets, self.route)

    def _await_decision(self) -> None:
        while not self.replies:
            if sentence := self._exit_of_a_rank() or self.request.launch_failure():
                self._refuse(sentence)
            if self.deadline.expired:
                self._refuse_missing(self.deadline.seconds)
            self.channel.wait_for(
                lambda: bool(self.replies or self.channel.ended),
                min(_POLL, self.deadline.remaining),
            )

    def _exit_of_a_rank(self) -> str:
        """Describe the exit of a rank that had connected, if any."""
        for rank, reason in sorted(dict(self.channel.ended).items()):
            return (
                f"{self._accepted[rank]} exited before all ranks had connected ({reason}); look at"
                " its output"
            )
        return ""

    # Detection of another rank 0.

    def _listen(self) -> tuple[socket.socket, Address]:
        earlier = self.endpoint.look_up()
        if earlier.nonce:
            self._check_rank_zero_at(earlier)
        try:
            return self.endpoint.listen()
        except RendezvousError:
            self._check_rank_zero_at(earlier)
            raise

    def _check_rank_zero_at(self, address: Address) -> None:
        """Raise the refusal of another rank 0 if one is answering at this address."""
        for host in address.candidates():
            deadline = Deadline(min(self.request.timeouts.connect, self.deadline.remaining))
            as_other_rank = OtherRank(self.request, self.endpoint, self.info, deadline)
            try:
                with suppress(OSError):
                    as_other_rank.send_hello(host, address)
            finally:
                as_other_rank.channel.close()

    # On the channel's thread.

    def _admit(self, connection: Connection, topic: str, body: Message) -> None:
        """Reply to a hello; another program's connection may stay open."""
        if topic != "hello":
            return
        nonce = body.pop("nonce", None)
        info = RankInfo.of(body)
        if info is None or nonce != self._address.nonce or "welcome" in self.replies:
            connection.close(CLOSED)
        elif self.info.run and info.run and self.info.run != info.run:
            sentence = (
                f"rank 0 at {self._where} belongs to another run ({self.info.run}) than {info}"
                f" ({info.run}); give each run its own MASTER_PORT or init_method"
            )
            connection.send(encode("handshake", {"refused": [sentence]}))
        else:
            self._handle_hello(connection, info)

    def _handle_hello(self, connection: Connection, info: RankInfo) -> None:
        """Accept a rank, or refuse the start if this rank does not fit."""
        self._heard.add(info.rank)
        if conflict := self._conflict_of(info):
            self._refuse(conflict)
        if self.replies:
            connection.send(encode("handshake", self.replies))
            return
        self._accepted[info.rank] = info
        if info.network != self.info.network:
            self.route = host_of(connection.socket.getsockname())
        self.channel.adopt(info.rank, connection)
        connection.send(encode("handshake", {"accepted": self._store.port}))
        if len(self._accepted) == self.info.world_size:
            table = [astuple(self._accepted[rank]) for rank in range(self.info.world_size)]
            self._decide({"welcome": table, "route": self.route})

    def _conflict_of(self, info: RankInfo) -> str:
        """Return in which way this rank does not fit those that are accepted, if any."""
        if info.world_size != self.info.world_size:
            return (
                f"world_size must be the same on all ranks: {self.info} has"
                f" {self.info.world_size}, {info} has {info.world_size}; start every rank with the"
                " same settings"
            )
        known = self._accepted.get(info.rank)
        if known is None:
            return ""
        return (
            f"two processes claim rank {info.rank}: pid {known.pid} on host {known.host} and pid"
            f" {info.pid} on host {info.host}; set a different RANK (or rank=) for each process"
        )

    def _handle_message(self, body: Message) -> None:
        self._refuse_missing(body["overdue"])

    # The decision; on any thread.

    def _refuse_missing(self, seconds: float) -> None:
        """Refuse the start because some ranks did not connect within a rank's limit."""
        with self.channel.arrived:
            missing = sorted(set(range(self.info.world_size)) - self._accepted.keys())
            present = listed(self._accepted[rank] for rank in sorted(self._accepted))
        sentence = (
            f"{ranks_in_words(missing)} of {self.info.world_size} did not connect to"
            f" {self._where} within {seconds:g} s (init_timeout); present: {present}; check that"
            " every rank is running and can reach rank 0, or raise init_timeout"
        )
        self._refuse(sentence, *missing)

    @property
    def _where(self) -> str:
        is_of_launcher = self.request.init_method == "env://"
        if is_of_launcher and isinstance(self.endpoint, TcpEndpoint):
            return f"{self.endpoint.where} (env://)"
        return self.request.init_method

    def _refuse(self, sentence: str, *missing: int) -> None:
        self._decide({"refused": [sentence, *missing]})

    def _decide(self, decision: Message) -> None:
        """Send the decision to all ranks that have connected, unless there is one."""
        with self.channel.arrived:
            if not self.replies:
                self.replies = decision
                self.channel.send("handshake", decision)
                self.channel.arrived.notify_all()


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
