"""Run the other ranks' part of the handshake: find rank 0 and wait for its replies.

===========  ==================================  =======================================
topic        from a rank to rank 0               from rank 0 to ranks
===========  ==================================  =======================================
"hello"      nonce of the address; :class:`Hello`
"handshake"                                      ``accepted``: the port of rank 0's store
..                                               ``retry``: why to try again later
..                                               ``refused``: the error of all ranks
..                                               ``welcome``, ``route``: all ranks, and
..                                               the address of rank 0 for other networks
..           ``overdue``: its ``init_timeout``
..           ``gave_up``: this rank's error
===========  ==================================  =======================================

A rank sends its hello until rank 0 has accepted it, opens the store, and waits for the
welcome. A refusal ends the start at any point before the welcome.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from torch.distributed import Store, TCPStore

from lightning_ddp_ext.errors import MissingRanksError, RendezvousError
from lightning_ddp_ext.ranks import reason_of
from lightning_ddp_ext.rendezvous.channel import Channel
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.endpoint import Address, Endpoint, TcpEndpoint, connect_store
from lightning_ddp_ext.rendezvous.opened_sockets import OpenedSockets
from lightning_ddp_ext.rendezvous.peers import event_of
from lightning_ddp_ext.rendezvous.request import Hello, RankInfo, Request
from lightning_ddp_ext.rendezvous.sockets import host_of
from lightning_ddp_ext.rendezvous.wire import MALFORMED, Message


@dataclass(frozen=True)
class Connections:
    """The results of the handshake; the connections stay open until the context closes.

    Attributes:
        channel: the channel to rank 0, or on rank 0 to all other ranks.
        table: all ranks, in order.
        store: rank 0's store.
        store_sockets: the sockets of the connection to the store.
        route: the address at which ranks on other hosts can reach this host; empty if
            all ranks are on this host.
        withdraw: removes the published address; for rank 0, or after its death.
    """

    channel: Channel
    table: tuple[RankInfo, ...]
    store: Store
    store_sockets: OpenedSockets | None = None
    route: str = ""
    withdraw: Callable[[], None] = lambda: None


class Link(NamedTuple):
    """The numeric hosts of rank 0 and of this rank, in their connection."""

    rank_zero: str
    here: str


@dataclass(frozen=True)
class Replies:
    """Rank 0's replies to the latest hello, as in the table of the module.

    A field is empty, or 0, until its reply arrives.
    """

    accepted: int = 0
    retry: str = ""
    refused: Sequence[Any] = ()
    welcome: Sequence[Sequence[Any]] = ()
    route: str = ""

    def is_hello_answered(self) -> bool:
        """Whether rank 0 has accepted or rejected this rank."""
        return bool(self.accepted or self.retry or self.refused)

    def is_start_decided(self) -> bool:
        """Whether all ranks are connected, or the start has failed."""
        return bool(self.welcome or self.refused)

    @property
    def table(self) -> tuple[RankInfo, ...]:
        """All ranks, in order, once this rank is welcome."""
        return tuple(RankInfo(*values) for values in self.welcome)

    def raise_if_refused(self) -> None:
        """Raise the error of the refusal, if any."""
        if self.refused:
            raise error_in(self.refused)


class Handshake:
    """Connects this rank to rank 0."""

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
        self._replies = Replies()
        self._last_error = OSError("not tried")
        self._published: Address | None = None
        self._where = ""  # the latest address that accepted a connection, for messages
        channel.listen("handshake", self._handle_message)

    def connect(self) -> Connections:
        """Connect to rank 0, and wait until all ranks are connected.

        Raises:
            RendezvousError: rank 0 was not found, refused the start, or can no longer
                be reached.
            RankDiedError: rank 0 died after all ranks had connected.
        """
        try:
            link = self._find_rank_zero()
            with OpenedSockets() as store_sockets:
                store = self._open_store(link.rank_zero)
            table = self._await_welcome()
        except BaseException as error:
            self._report_end(error)
            raise
        is_on_network_of_rank_zero = self._hello.info.network == table[0].network
        route = self._replies.route if is_on_network_of_rank_zero else link.here
        return Connections(self._channel, table, store, store_sockets, route, self._withdraw)

    def _report_end(self, error: BaseException) -> None:
        """Report to rank 0 the error that ends this rank's start.

        After the welcome it is the failure of a rank; before, rank 0 refuses all ranks.
        """
        info = self._hello.info
        if self._replies.welcome:
            if 0 in self._channel.ended:
                self._withdraw()
            self._channel.send("event", asdict(event_of("failed", info, reason_of(error))))
        elif not self._replies.refused:
            self._channel.send("handshake", {"gave_up": str(gave_up_error(info, error))})

    def _withdraw(self) -> None:
        """Remove the address of a rank 0 that died."""
        if self._published is not None:
            self._endpoint.withdraw(self._published)

    # Finding rank 0.

    def _find_rank_zero(self) -> Link:
        """Try to connect until rank 0 accepts this rank."""
        for _ in self._deadline.ticks():
            sentence = self._request.launch_failure()
            if sentence is not None:
                raise RendezvousError(sentence)
            self._published = self._endpoint.look_up(self._deadline)
            if self._published is None:
                self._last_error = OSError("rank 0 has not published its address there")
                continue
            link = self._try(self._published)
            if link is not None:
                return link
            self._raise_if_port_is_taken()
        raise self._not_found()

    def _try(self, address: Address) -> Link | None:
        """Try the hosts of an address until rank 0 accepts this rank at one of them."""
        for host in address.candidates(self._hello.info.network):
            try:
                return self.send_hello(host, address)
            except OSError as error:
                # A name may become resolvable only when its host is up.
                self._last_error = error
        return None

    def send_hello(self, host: str, address: Address) -> Link:
        """Wait until the process at an address has accepted this rank.

        Public because rank 0 uses it to detect another rank 0.

        Raises:
            OSError: it does not reply, or replies that this rank should try again.
            RendezvousError: it is a rank 0, and has refused this rank.
        """
        connected = self._connect(host, address.port)
        self._where = f"{host}:{address.port}"
        link = Link(host_of(connected.getpeername()), host_of(connected.getsockname()))
        self._channel.connect(0, connected)
        self._replies = Replies()
        self._channel.send("hello", {"nonce": address.nonce, "hello": asdict(self._hello)})
        # Rank 0 may be busy, so only a closed connection, the deadline or a changed
        # address ends this wait.
        while not self._wait_until(
            Replies.is_hello_answered,
            min(self._request.timeouts.connect, self._deadline.remaining),
        ):
            if self._deadline.expired or self._endpoint.look_up(self._deadline) != address:
                break
        self._replies.raise_if_refused()
        if not self._replies.accepted:
            raise OSError(self._reason_without_reply())
        return link

    def _connect(self, host: str, port: int) -> socket.socket:
        seconds = max(0.1, min(self._request.timeouts.connect, self._deadline.remaining))
        connected = socket.create_connection((host, port), timeout=seconds)
        if connected.getsockname() == connected.getpeername():
            # No process listens, and the kernel chose the same port for this side. A
            # reset frees it for rank 0.
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connected.close()
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        return connected

    def _reason_without_reply(self) -> str:
        closed = self._channel.ended.get(0)
        if closed == MALFORMED:
            return "another program is answering there"
        if self._replies.retry:
            return self._replies.retry
        if closed is None:
            return "it accepted the connection, but did not reply"
        return "it closed the connection without replying"

    def _raise_if_port_is_taken(self) -> None:
        is_other_program = self._channel.ended.get(0) == MALFORMED
        if is_other_program and isinstance(self._endpoint, TcpEndpoint):
            raise RendezvousError(
                f"a program other than rank 0 is listening at {self._where}; choose a port that no"
                " other program uses, or correct the address of rank 0's host"
            )

    def _not_found(self) -> RendezvousError:
        if isinstance(self._endpoint, TcpEndpoint):
            where = f"{self._endpoint.where.host}:{self._endpoint.where.port}"
            remedy = "that its host has this address"
        else:
            where = self._hello.init_method
            remedy = (
                "that it uses the same init_method (a file must be on a disk that all hosts share)"
            )
        return RendezvousError(
            f"{self._hello.info} did not find rank 0 at {where} within {self._deadline.seconds:g} s"
            f" ({self._last_reason()}); check that rank 0 is running, {remedy}, and that no"
            " firewall blocks the connection"
        )

    def _last_reason(self) -> str:
        """Return why the last attempt failed, and who published the address."""
        reason = str(self._last_error.strerror or self._last_error)
        if isinstance(self._last_error, TimeoutError):
            reason = "timed out"
        published = self._published
        if published is not None and published.pid:
            reason += f"; pid {published.pid} on host {published.host} published its address there"
        return reason

    # Waiting for the other ranks.

    def _open_store(self, host: str) -> TCPStore:
        """Open the store before the welcome arrives.

        After the welcome, hundreds of ranks would connect to the store simultaneously.
        """
        port = self._replies.accepted
        try:
            return connect_store(host, port, self._deadline, self._raise_if_ended)
        except RendezvousError:
            self._await_welcome()  # raises a better error if rank 0 has refused, or is not replying
            raise

    def _await_welcome(self) -> tuple[RankInfo, ...]:
        if not self._wait_until(Replies.is_start_decided, self._deadline.remaining):
            self._channel.send("handshake", {"overdue": self._deadline.seconds})
            self._wait_until(Replies.is_start_decided, self._request.timeouts.answer)
        if not self._replies.welcome:
            self._raise_if_ended()
            raise self._lost("did not reply")
        return self._replies.table

    def _raise_if_ended(self) -> None:
        self._replies.raise_if_refused()
        if 0 not in self._channel.ended:
            return
        if self._replies.welcome:
            reason = self._channel.ended[0] or "it closed the connection"
            raise event_of("died", self._replies.table[0], reason).to_error()
        raise self._lost("closed the connection")

    def _lost(self, finding: str) -> RendezvousError:
        return RendezvousError(
            f"rank 0 at {self._where} {finding} after accepting {self._hello.info}; look at rank"
            " 0's output"
        )

    def _handle_message(self, body: Message) -> None:
        """Add a reply; on the channel's thread."""
        del body["from"]
        self._replies = replace(self._replies, **body)

    def _wait_until(self, condition: Callable[[Replies], bool], seconds: float) -> bool:
        """Wait until ``condition`` holds or the connection is closed.

        Return whether one of them happened within ``seconds``.
        """
        return self._channel.wait_for(
            lambda: condition(self._replies) or 0 in self._channel.ended, seconds
        )


# Errors sent as messages between rank 0 and the other ranks.


def gave_up_error(info: RankInfo, error: BaseException) -> RendezvousError:
    """Return the error for the other ranks when ``error`` ends one rank's handshake."""
    if isinstance(error, RendezvousError):
        return error
    return RendezvousError(f"{info} gave up before all ranks had connected: {reason_of(error)}")


def refusal_of(error: RendezvousError) -> Message:
    """Return the message that informs a rank of a failed start."""
    return {"refused": [type(error).__name__, str(error), *getattr(error, "missing", ())]}


def error_in(refused: Sequence[Any]) -> RendezvousError:
    """Return the error from the content of a refusal."""
    kind, sentence, *missing = refused
    if kind == MissingRanksError.__name__:
        return MissingRanksError(sentence, missing=tuple(missing))
    return RendezvousError(sentence)
