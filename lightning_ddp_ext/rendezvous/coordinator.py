"""Run rank 0's part of the handshake, which accepts or refuses all ranks together.

The start is decided once: when all ranks have connected, or by the first error. Messages
arrive on the channel's thread, which decides; the main thread waits, and checks the
conditions that no message reports. ``handshake`` lists the messages.
"""

from __future__ import annotations

import socket
from contextlib import closing, suppress
from dataclasses import astuple
from typing import TypeAlias

from torch.distributed import TCPStore

from lightning_ddp_ext.errors import RendezvousError
from lightning_ddp_ext.rank_lists import listed, ranks_in_words
from lightning_ddp_ext.rendezvous.channel import Channel, Connection, Message, encode
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.endpoint import STORE_OPERATION, Address, Endpoint, TcpEndpoint
from lightning_ddp_ext.rendezvous.handshake import Connections, Handshake, gave_up_error, refusal_of
from lightning_ddp_ext.rendezvous.opened_sockets import OpenedSockets
from lightning_ddp_ext.rendezvous.request import Hello, RankInfo, Request
from lightning_ddp_ext.rendezvous.sockets import host_of, listen

# All ranks, or the error that every rank raises.
Decision: TypeAlias = tuple[RankInfo, ...] | RendezvousError

_POLL = 0.25  # seconds between checks for conditions that end the wait without a message


class Coordinator:
    """Waits for all ranks to connect, and replies to late ones.

    It listens and publishes its address as soon as it is made.

    Args:
        request: the Trainer's request.
        endpoint: the way in which the other ranks find this process.
        hello: this rank's description.
        channel: an unused channel, which the caller closes after an error.
        deadline: the end of ``init_timeout``.

    Raises:
        RendezvousError: this process cannot listen, or another process is rank 0.
    """

    def __init__(
        self,
        request: Request,
        endpoint: Endpoint,
        hello: Hello,
        channel: Channel,
        deadline: Deadline,
    ) -> None:
        self._request = request
        self._endpoint = endpoint
        self._hello = hello
        self._channel = channel
        self._deadline = deadline
        self._where = request.init_method
        if self._where == "env://" and isinstance(endpoint, TcpEndpoint):
            self._where = f"{endpoint.where} ({self._where})"
        self._present = {0: hello.info}  # the accepted ranks
        self._decision: Decision | None = None
        self._refused: set[int] = set()  # the ranks that received the error
        self._route = ""  # this host's address for ranks on other networks
        listener, self._address = self._listen()
        with OpenedSockets() as self._store_sockets:
            self._store = _host_store(listener.getsockname()[0])
        channel.on_message("handshake", self._handle_message)
        channel.accept(listener, self._admit)
        self._endpoint.publish(self._address)

    def connect(self) -> Connections:
        """Wait until every rank has connected.

        Raises:
            RendezvousError: some ranks did not connect in time, two processes claim one
                rank, world sizes differ, or a rank exited.
        """
        try:
            table = self._wait_for_decision()
        except BaseException as error:
            self._refuse(gave_up_error(self._hello.info, error))
            if isinstance(error, RendezvousError):
                self._refuse_late_ranks()
            raise
        finally:
            self._endpoint.withdraw(self._address)
            self._channel.stop_accepting()
        return Connections(self._channel, table, self._store, self._store_sockets, self._route)

    def _wait_for_decision(self) -> tuple[RankInfo, ...]:
        """Return all ranks once they have connected, or raise the error."""
        while self._decision is None:
            self._check_conditions()
            seconds = min(_POLL, self._deadline.remaining)
            self._channel.wait_for(
                lambda: self._decision is not None or bool(self._channel.ended), seconds
            )
        if isinstance(self._decision, RendezvousError):
            raise self._decision
        return self._decision

    def _check_conditions(self) -> None:
        """Check the conditions that end the wait without a message."""
        sentence = self._exit_of_a_rank() or self._request.launch_failure()
        if sentence is not None:
            self._refuse(RendezvousError(sentence))
        if self._deadline.expired:
            self._refuse_missing(self._deadline.seconds)

    def _exit_of_a_rank(self) -> str | None:
        """Describe the exit of a rank that had connected, if any."""
        ended = dict(self._channel.ended)
        if not ended:
            return None
        rank = min(ended)
        return (
            f"{self._present[rank]} exited before all ranks had connected"
            f" ({ended[rank]}); look at its output"
        )

    # Detection of another rank 0.

    def _listen(self) -> tuple[socket.socket, Address]:
        earlier_address = self._endpoint.look_up()
        if earlier_address is not None and earlier_address.nonce:
            self._check_rank_zero_at(earlier_address)
        try:
            return self._endpoint.listen()
        except RendezvousError:
            if earlier_address is not None:
                self._check_rank_zero_at(earlier_address)
            raise

    def _check_rank_zero_at(self, address: Address) -> None:
        """Raise the refusal of another rank 0 if one is answering at this address."""
        for host in address.candidates(self._hello.info.network):
            deadline = Deadline(min(self._request.timeouts.connect, self._deadline.remaining))
            channel = Channel(self._request.timeouts.heartbeat)
            with suppress(OSError), closing(channel):
                handshake = Handshake(self._request, self._endpoint, self._hello, channel, deadline)
                handshake.send_hello(host, address)

    # On the channel's thread, even after the start.

    def _admit(self, connection: Connection, topic: str, body: Message) -> None:
        """Reply to a hello; another program's connection may stay open."""
        if topic != "hello":
            return
        if body.get("nonce") != self._address.nonce:
            _reply(connection, {"retry": "another run is answering there"})
            return
        hello = Hello.of(body.get("hello"))
        if hello is not None:
            with self._channel.arrived:
                self._handle_hello(connection, hello)

    def _handle_hello(self, connection: Connection, hello: Hello) -> None:
        """Accept a rank, or not.

        ============  ==================  ================================================
        reply         for                 because
        ============  ==================  ================================================
        ``refused``   this rank           it belongs to another run
        ``retry``     this rank           all ranks of this run have connected
        ``refused``   all ranks           the start has failed, or this rank does not fit
        ``accepted``  this rank           otherwise; after the last one, all are welcomed
        ============  ==================  ================================================
        """
        is_of_named_run = bool(self._hello.run and hello.run)
        if is_of_named_run and hello.run != self._hello.run:
            _reply(connection, refusal_of(_other_run(self._where, self._hello, hello)))
        elif isinstance(self._decision, tuple):
            _reply(connection, {"retry": "another run has started there"})
        elif (error := self._objection_to(hello)) is not None:
            self._refused.add(hello.info.rank)
            _reply(connection, refusal_of(error))
            self._refuse(error)
        else:
            self._accept(connection, hello.info)

    def _accept(self, connection: Connection, info: RankInfo) -> None:
        self._present[info.rank] = info
        if info.network != self._hello.info.network:
            self._route = host_of(connection.socket.getsockname())
        self._channel.adopt(info.rank, connection)
        _reply(connection, {"accepted": self._store.port})
        if len(self._present) == self._hello.world_size:
            self._welcome()

    def _welcome(self) -> None:
        table = tuple(self._present[rank] for rank in range(self._hello.world_size))
        self._decision = table
        welcome = {"welcome": [astuple(info) for info in table], "route": self._route}
        self._channel.send("handshake", welcome)

    def _objection_to(self, hello: Hello) -> RendezvousError | None:
        """Return the error that this hello causes, or that has already ended the start."""
        if isinstance(self._decision, RendezvousError):
            return self._decision
        if hello.world_size != self._hello.world_size:
            return _different_sizes(self._hello, hello)
        known = self._present.get(hello.info.rank)
        return None if known is None else _duplicate(known, hello.info)

    def _handle_message(self, body: Message) -> None:
        if "overdue" in body:
            self._refuse_missing(body["overdue"])
        elif "gave_up" in body:
            self._refuse(RendezvousError(str(body["gave_up"])))

    # End of the wait.

    def _refuse(self, error: RendezvousError) -> None:
        """Refuse the start for all ranks, unless it has already succeeded or failed."""
        with self._channel.arrived:
            if self._decision is None:
                self._decision = error
                self._channel.send("handshake", refusal_of(error))
                self._channel.arrived.notify_all()

    def _refuse_late_ranks(self) -> None:
        """Listen for some more seconds, so that late ranks also receive the refusal."""
        late = set(range(1, self._hello.world_size)) - self._present.keys()
        self._channel.wait_for(lambda: late <= self._refused, self._request.timeouts.after_refusal)

    def _refuse_missing(self, seconds: float) -> None:
        """Refuse the start because some ranks did not connect within a rank's limit."""
        connected = dict(self._present)
        missing = [rank for rank in range(self._hello.world_size) if rank not in connected]
        if missing:  # otherwise the last rank has just connected
            present = listed(connected[rank] for rank in sorted(connected))
            sentence = (
                f"{ranks_in_words(missing)} of {self._hello.world_size} did not connect to"
                f" {self._where} within {seconds:g} s (init_timeout); present:"
                f" {present}; check that every rank is running and can reach rank 0, or raise"
                " init_timeout"
            )
            self._refuse(RendezvousError(sentence, missing=tuple(missing)))


def _reply(connection: Connection, body: Message) -> None:
    connection.send(encode("handshake", body))


def _duplicate(one: RankInfo, other: RankInfo) -> RendezvousError:
    first, second = sorted([one, other], key=lambda info: (info.host, info.pid))
    return RendezvousError(
        f"two processes claim rank {one.rank}: pid {first.pid} on host {first.host} and pid"
        f" {second.pid} on host {second.host}; set a different RANK (or rank=) for each process"
    )


def _other_run(where: str, own: Hello, other: Hello) -> RendezvousError:
    return RendezvousError(
        f"rank 0 at {where} belongs to another run ({own.run}) than {other.info} ({other.run});"
        " give each run its own MASTER_PORT or init_method"
    )


def _different_sizes(own: Hello, other: Hello) -> RendezvousError:
    return RendezvousError(
        f"world_size must be the same on all ranks: {own.info} has {own.world_size}, {other.info}"
        f" has {other.world_size}; start every rank with the same settings"
    )


def _host_store(bound_to: str) -> TCPStore:
    """Open the server of a store.

    It starts a thread, so the process should not fork afterwards.

    Args:
        bound_to: the address of rank 0's control listener: a loopback address, or that
            of all interfaces.
    """
    listener = listen(bound_to, 0)
    port = int(listener.getsockname()[1])
    # A host may have IPv6 without ::1.
    host = "127.0.0.1" if bound_to in ("::", "0.0.0.0") else bound_to
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=STORE_OPERATION,
        master_listen_fd=listener.detach(),
    )
