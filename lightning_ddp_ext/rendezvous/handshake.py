"""Run the other ranks' part of the handshake: find rank 0 and wait for its replies.

===========  ==================================  =======================================
topic        from a rank to rank 0               from rank 0 to ranks
===========  ==================================  =======================================
"hello"      nonce of the address; :class:`Hello`
"handshake"                                      ``accepted``: the port of rank 0's store
..                                               ``retry``: why to try again later
..                                               ``refused``: the error that ranks raise
..                                               ``welcome``: all ranks, in order; and
..                                               ``route``: rank 0's address for ranks on
..                                               other networks, empty without any
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch.distributed import Store, TCPStore

from lightning_ddp_ext.errors import RendezvousError
from lightning_ddp_ext.ranks import reason_of
from lightning_ddp_ext.rendezvous.channel import MALFORMED, Channel, Message
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.endpoint import Address, Endpoint, TcpEndpoint, connect_store
from lightning_ddp_ext.rendezvous.opened_sockets import OpenedSockets
from lightning_ddp_ext.rendezvous.peers import event_of
from lightning_ddp_ext.rendezvous.request import Hello, RankInfo, Request
from lightning_ddp_ext.rendezvous.sockets import host_of

# Rank 0's replies to a hello.
_ANSWERS = ("accepted", "retry", "refused")
# The replies that end the handshake: all ranks are connected, or the start failed.
_DECISIONS = ("welcome", "refused")


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
    """

    channel: Channel
    table: tuple[RankInfo, ...]
    store: Store
    store_sockets: OpenedSockets | None = None
    route: str = ""


class Link(NamedTuple):
    """The numeric hosts of rank 0 and of this rank, in their connection."""

    rank_zero: str
    here: str


class Handshake:
    """Connects this rank to rank 0.

    Args:
        request: the Trainer's request.
        endpoint: the way to find rank 0.
        hello: this rank's description.
        channel: an unused channel, which the caller closes after an error.
        deadline: the end of ``init_timeout``.
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
        self._replies: Message = {}  # to the latest hello, as in the table of the module
        # Text, since an exception keeps the frames of the Trainer's run.
        self._last_reason = "not tried"
        self._published: Address | None = None
        self._where = ""  # the latest address that accepted a connection, for messages
        channel.on_message("handshake", self._handle_message)

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
        route = self._replies["route"] if is_on_network_of_rank_zero else link.here
        return Connections(self._channel, table, store, store_sockets, route)

    def _report_end(self, error: BaseException) -> None:
        """Report to rank 0 the error that ends this rank's start.

        After the welcome it is the failure of a rank; before, rank 0 refuses all ranks.
        """
        info = self._hello.info
        if "welcome" in self._replies:
            self._channel.send("event", asdict(event_of("failed", info, reason_of(error))))
        elif "refused" not in self._replies:
            self._channel.send("handshake", {"gave_up": str(gave_up_error(info, error))})

    # Finding rank 0.

    def _find_rank_zero(self) -> Link:
        """Try to connect until rank 0 accepts this rank."""
        for _ in self._deadline.ticks():
            sentence = self._request.launch_failure()
            if sentence is not None:
                raise RendezvousError(sentence)
            self._published = self._endpoint.look_up()
            if self._published is None:
                self._last_reason = "rank 0 has not published its address there"
                continue
            link = self._try(self._published)
            if link is not None:
                return link
        raise self._not_found()

    def _try(self, address: Address) -> Link | None:
        """Try the hosts of an address until rank 0 accepts this rank at one of them."""
        for host in address.candidates(self._hello.info.network):
            try:
                return self.send_hello(host, address)
            except OSError as error:
                # A name may become resolvable only when its host is up.
                is_late = isinstance(error, TimeoutError)
                self._last_reason = "timed out" if is_late else str(error.strerror or error)
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
        self._replies = {}
        self._channel.send("hello", {"nonce": address.nonce, "hello": asdict(self._hello)})
        # Rank 0 may be busy, so only a closed connection, the deadline or a changed
        # address ends this wait.
        while not self._wait_for(
            _ANSWERS, min(self._request.timeouts.connect, self._deadline.remaining)
        ):
            if self._deadline.expired or self._endpoint.look_up() != address:
                break
        self._raise_if_refused()
        if "accepted" not in self._replies:
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
            return "a program other than rank 0 is answering there"
        if "retry" in self._replies:
            return str(self._replies["retry"])
        if closed is None:
            return "it accepted the connection, but did not reply"
        return "it closed the connection without replying"

    def _not_found(self) -> RendezvousError:
        if isinstance(self._endpoint, TcpEndpoint):
            where = f"{self._endpoint.where.host}:{self._endpoint.where.port}"
            remedy = "that its host has this address"
        else:
            where = self._request.init_method
            remedy = (
                "that it uses the same init_method (a file must be on a disk that all hosts share)"
            )
        return RendezvousError(
            f"{self._hello.info} did not find rank 0 at {where} within {self._deadline.seconds:g} s"
            f" ({self._reason_and_publisher()}); check that rank 0 is running, {remedy}, and that"
            " no firewall blocks the connection"
        )

    def _reason_and_publisher(self) -> str:
        """Return why the last attempt failed, and who published the address."""
        published = self._published
        if published is None or not published.pid:
            return self._last_reason
        return (
            f"{self._last_reason}; pid {published.pid} on host {published.host} published its"
            " address there"
        )

    # Waiting for the other ranks.

    def _open_store(self, host: str) -> TCPStore:
        """Open the store before the welcome arrives.

        After the welcome, hundreds of ranks would connect to the store simultaneously.
        """
        port = self._replies["accepted"]
        try:
            return connect_store(host, port, self._deadline, self._raise_if_ended)
        except RendezvousError:
            self._await_welcome()  # raises a better error if rank 0 has refused, or is not replying
            raise

    def _await_welcome(self) -> tuple[RankInfo, ...]:
        if not self._wait_for(_DECISIONS, self._deadline.remaining):
            self._channel.send("handshake", {"overdue": self._deadline.seconds})
            self._wait_for(_DECISIONS, self._request.timeouts.answer)
        if "welcome" not in self._replies:
            self._raise_if_ended()
            raise self._lost("did not reply")
        return self._table()

    def _table(self) -> tuple[RankInfo, ...]:
        """Return all ranks, in order, from the welcome."""
        return tuple(RankInfo(*values) for values in self._replies["welcome"])

    def _raise_if_refused(self) -> None:
        if "refused" in self._replies:
            raise error_in(self._replies["refused"])

    def _raise_if_ended(self) -> None:
        self._raise_if_refused()
        if 0 not in self._channel.ended:
            return
        if "welcome" in self._replies:
            reason = self._channel.ended[0] or "it closed the connection"
            raise event_of("died", self._table()[0], reason).to_error()
        raise self._lost("closed the connection")

    def _lost(self, finding: str) -> RendezvousError:
        return RendezvousError(
            f"rank 0 at {self._where} {finding} after accepting {self._hello.info}; look at rank"
            " 0's output"
        )

    def _handle_message(self, body: Message) -> None:
        """Add replies, all together; on the channel's thread."""
        self._replies = {**self._replies, **body}

    def _wait_for(self, replies: tuple[str, ...], seconds: float) -> bool:
        """Wait until one of ``replies`` arrives or the connection is closed.

        Return whether one of them happened within ``seconds``.
        """
        return self._channel.wait_for(
            lambda: any(reply in self._replies for reply in replies) or 0 in self._channel.ended,
            seconds,
        )


# Errors sent as messages between rank 0 and the other ranks.


def gave_up_error(info: RankInfo, error: BaseException) -> RendezvousError:
    """Return the error for the other ranks when ``error`` ends one rank's handshake."""
    if isinstance(error, RendezvousError):
        return error
    return RendezvousError(f"{info} gave up before all ranks had connected: {reason_of(error)}")


def refusal_of(error: RendezvousError) -> Message:
    """Return the message that informs a rank of a failed start."""
    return {"refused": [str(error), *error.missing]}


def error_in(refused: Sequence[Any]) -> RendezvousError:
    """Return the error from the content of a refusal."""
    sentence, *missing = refused
    return RendezvousError(sentence, missing=tuple(missing))
