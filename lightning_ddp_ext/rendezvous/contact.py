"""Find rank 0, and receive its replies; the part of other ranks in the ``handshake``.

Rank 0 also tries to contact a rank 0, to detect that there is another one.
"""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass
from enum import Enum

from lightning_ddp_ext.errors import RendezvousError
from lightning_ddp_ext.rendezvous.channel import CLOSED, MALFORMED, Channel, Message
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.endpoint import Address, Endpoint, TcpEndpoint
from lightning_ddp_ext.rendezvous.network import connect_socket, host_of
from lightning_ddp_ext.rendezvous.peers import event_of
from lightning_ddp_ext.rendezvous.request import RankInfo, Request

# Why a process did not accept this rank, by the reason for which its connection closed.
_NO_REPLY = {
    None: "it accepted the connection, but did not reply",
    CLOSED: "it closed the connection without replying",
    MALFORMED: "a program other than rank 0 is answering there",
}


@dataclass(frozen=True)
class StartUp:
    """What every part of this rank's start-up needs.

    Attributes:
        request: the Trainer's request.
        endpoint: the way to find rank 0.
        info: this rank.
        deadline: the end of ``init_timeout``.
    """

    request: Request
    endpoint: Endpoint
    info: RankInfo
    deadline: Deadline

    @property
    def attempt_seconds(self) -> float:
        """The longest time for one attempt to contact rank 0 from now."""
        return min(self.request.timeouts.connect, self.deadline.remaining)


def find_rank_zero(start_up: StartUp) -> Contact:
    """Try to contact rank 0 until it accepts this rank, at most until the deadline.

    Raises:
        RendezvousError: rank 0 did not accept this rank in time, or refused the start;
            or a process exited, so that the ranks cannot connect.
    """
    reason = "not tried"  # why the last attempt failed
    for _ in start_up.deadline.ticks():
        if sentence := start_up.request.launch_failure():
            raise RendezvousError(sentence)
        reason = "rank 0 has not published its address there"
        address = start_up.endpoint.look_up()
        for host in address.candidates():
            try:
                return reach(host, address, start_up)
            except OSError as error:
                # A name may become resolvable only when its host is up.
                reason = str(error.strerror or error)
    where = start_up.request.init_method
    remedy = "that it uses the same init_method (a file must be on a disk that all hosts share)"
    if isinstance(start_up.endpoint, TcpEndpoint):
        where = f"{start_up.endpoint.where.host}:{start_up.endpoint.where.port}"
        remedy = "that its host has this address"
    raise RendezvousError(
        f"{start_up.info} did not find rank 0 at {where} within {start_up.deadline.seconds:g} s"
        f" ({reason}); check that rank 0 is running, {remedy}, and that no firewall blocks the"
        " connection"
    )


def reach(host: str, address: Address, start_up: StartUp) -> Contact:
    """Connect to the process at a host of an address, and wait until it accepts this rank.

    Args:
        host: one of the hosts of the address.
        address: the address, as the endpoint shows it now.
        start_up: that of this rank.

    Raises:
        OSError: the process does not reply, or does not wait for this rank.
        RendezvousError: it is a rank 0, and has refused this rank.
    """
    connected = connect_socket(host, address.port, max(0.1, start_up.attempt_seconds))
    contact = Contact(connected, f"{host}:{address.port}", start_up)
    try:
        contact.channel.connect(0, connected)
        contact.channel.send("hello", {"nonce": address.nonce, **asdict(start_up.info)})
        contact.await_acceptance(address)
    except BaseException:
        contact.channel.close(in_order=False)
        raise
    return contact


class Stage(Enum):
    """The stages of a contact, in order, each with the key of the reply that begins it."""

    UNANSWERED = ""  # without a reply; the process may not be rank 0
    ACCEPTED = "accepted"  # rank 0 has accepted this rank, and waits for others
    WELCOMED = "welcome"  # all ranks are connected
    REFUSED = "refused"  # rank 0 has refused the start, perhaps before it accepted this rank


class Contact:
    """A connection of this rank to the process at one address, which may be rank 0.

    The main thread uses it. The channel's thread replaces ``replies`` as a whole, so
    that the main thread reads it without a lock.

    Args:
        connected: a socket that is connected to the process.
        where: the address, for messages.
        start_up: that of this rank.

    Attributes:
        channel: the channel to the process, which stays open after the handshake.
        replies: the bodies of all replies so far, merged into one; a key stays.
        peer_host: the numeric host of the process.
        own_host: the numeric host of this rank in the same network.
    """

    def __init__(self, connected: socket.socket, where: str, start_up: StartUp) -> None:
        self._where = where
        self._start_up = start_up
        self.peer_host = host_of(connected.getpeername())
        self.own_host = host_of(connected.getsockname())
        self.replies: Message = {}
        self.channel = Channel(start_up.request.timeouts.heartbeat)
        self.channel.on_message("handshake", self._handle_message)

    @property
    def stage(self) -> Stage:
        """The last stage that a reply shows."""
        shown = (stage for stage in reversed(Stage) if stage.value in self.replies)
        return next(shown, Stage.UNANSWERED)

    @property
    def is_closed(self) -> bool:
        """Whether the connection has closed, which is possible at any stage."""
        return 0 in self.channel.ended

    def await_acceptance(self, address: Address) -> None:
        """Wait until the process at an address has accepted this rank.

        Rank 0 may be busy, so only a closed connection, the deadline or another address
        at the endpoint ends this wait.

        Raises:
            OSError: it does not reply, or does not wait for this rank.
            RendezvousError: it is a rank 0, and has refused this rank.
        """
        while not self._wait_while(Stage.UNANSWERED, self._start_up.attempt_seconds):
            if self._start_up.deadline.expired or self._start_up.endpoint.look_up() != address:
                break
        if self.stage is Stage.UNANSWERED:
            # None while the connection is open. A reason that is not listed, such as an
            # orderly exit or a silent host, counts as a closed connection.
            raise OSError(_NO_REPLY.get(self.channel.ended.get(0), _NO_REPLY[CLOSED]))
        raise_if_refused(self.replies)  # last, since a refusal may arrive at any time

    def await_welcome(self) -> tuple[RankInfo, ...]:
        """Wait until all ranks are connected, and return them in order.

        Rank 0 may have a longer ``init_timeout``, so tell it if the deadline of this
        rank passes; it then refuses the start.

        Raises:
            RendezvousError: rank 0 refused the start, exited, or did not reply.
            RankDiedError: rank 0 died after all ranks had connected.
        """
        if not self._wait_while(Stage.ACCEPTED, self._start_up.deadline.remaining):
            self.channel.send("handshake", {"overdue": self._start_up.deadline.seconds})
            self._wait_while(Stage.ACCEPTED, self._start_up.request.timeouts.answer)
        if self.stage is not Stage.WELCOMED:
            self.raise_if_ended()
            raise self._lost("did not reply")
        return self._table

    def raise_if_ended(self) -> None:
        """Raise if rank 0 has refused the start, or has closed the connection.

        Raises:
            RendezvousError: rank 0 refused the start, or exited before all ranks had
                connected.
            RankDiedError: it exited after that.
        """
        is_closed = self.is_closed  # read first: rank 0 closes after a refusal
        raise_if_refused(self.replies)
        if not is_closed:
            return
        if self.stage is Stage.WELCOMED:
            reason = self.channel.ended[0] or "it closed the connection"
            raise event_of("died", self._table[0], reason).to_error()
        raise self._lost("closed the connection")

    def _wait_while(self, stage: Stage, seconds: float) -> bool:
        """Wait until the stage has changed or the connection is closed.

        Return False if the time is up. A reply that arrives later also counts for callers,
        since they look at the stage.
        """
        return self.channel.wait_for(lambda: self.stage is not stage or self.is_closed, seconds)

    @property
    def _table(self) -> tuple[RankInfo, ...]:
        """All ranks, in order, from the welcome."""
        return tuple(RankInfo(*values) for values in self.replies["welcome"])

    def _lost(self, finding: str) -> RendezvousError:
        return RendezvousError(
            f"rank 0 at {self._where} {finding} after accepting {self._start_up.info}; look at"
            " rank 0's output"
        )

    def _handle_message(self, body: Message) -> None:
        """Merge a reply, as a whole; on the channel's thread."""
        self.replies = {**self.replies, **body}


def raise_if_refused(replies: Message) -> None:
    """Raise the refusal, if rank 0 has refused the start."""
    if Stage.REFUSED.value in replies:
        sentence, *missing = replies[Stage.REFUSED.value]
        raise RendezvousError(sentence, missing=tuple(missing))
