"""Find rank 0, and receive its replies; the part of other ranks in the ``handshake``.

Rank 0 also tries to contact a rank 0, to detect that there is another one.
"""

from __future__ import annotations

import socket
from dataclasses import asdict

from lightning_ddp_ext.errors import RendezvousError
from lightning_ddp_ext.rendezvous.channel import CLOSED, MALFORMED, Channel, Message
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.endpoint import Address, Endpoint, TcpEndpoint
from lightning_ddp_ext.rendezvous.network import connect_socket, host_of
from lightning_ddp_ext.rendezvous.peers import event_of
from lightning_ddp_ext.rendezvous.request import RankInfo, Request, Timeouts

# Why a process did not accept this rank, by the reason for which its connection closed.
_NO_REPLY = {
    None: "it accepted the connection, but did not reply",
    CLOSED: "it closed the connection without replying",
    MALFORMED: "a program other than rank 0 is answering there",
}


class Contact:
    """A connection of this rank to the process at one address, which may be rank 0.

    The keys of ``replies`` show the state, as in the table of ``handshake``:

    - none: the process has not replied, and may not be rank 0;
    - ``accepted``: rank 0 has accepted this rank, and waits for others;
    - ``accepted``, ``welcome`` and ``route``: all ranks are connected;
    - ``refused``, perhaps after ``accepted``: rank 0 has refused the start.

    In each state, ``channel.ended`` has the number 0 if the connection has closed.

    The main thread uses it. The channel's thread replaces ``replies`` as a whole, so
    that the main thread reads it without a lock.

    Args:
        info: this rank.
        connected: a socket that is connected to the process.
        where: the address, for messages.
        heartbeat: as for :class:`Channel`.

    Attributes:
        channel: the channel to the process, which stays open after the handshake.
        replies: the bodies of all replies so far, merged into one; a key stays.
        peer_host: the numeric host of the process.
        own_host: the numeric host of this rank in the same network.
    """

    def __init__(
        self, info: RankInfo, connected: socket.socket, where: str, heartbeat: float
    ) -> None:
        self._info = info
        self._where = where
        self.peer_host = host_of(connected.getpeername())
        self.own_host = host_of(connected.getsockname())
        self.replies: Message = {}
        self.channel = Channel(heartbeat)
        self.channel.on_message("handshake", self._handle_message)

    def wait_until_answered(self, reply: str, seconds: float) -> bool:
        """Wait until a reply or a refusal arrives, or the connection is closed.

        Args:
            reply: its key, ``accepted`` or ``welcome``.
            seconds: the longest wait.

        Returns:
            False if the time is up. The caller finds out what has happened from the
            state, in which a reply that arrives after the time also counts.
        """
        return self.channel.wait_for(
            lambda: (
                not self.replies.keys().isdisjoint((reply, "refused")) or 0 in self.channel.ended
            ),
            seconds,
        )

    def await_welcome(self, deadline: Deadline, answer: float) -> tuple[RankInfo, ...]:
        """Wait until all ranks are connected, and return them in order.

        Rank 0 may have a longer ``init_timeout``, so tell it if the deadline of this
        rank passes; it then refuses the start.

        Args:
            deadline: the end of this rank's ``init_timeout``.
            answer: the seconds in which rank 0 must reply after the deadline.

        Raises:
            RendezvousError: rank 0 refused the start, exited, or did not reply.
            RankDiedError: rank 0 died after all ranks had connected.
        """
        if not self.wait_until_answered("welcome", deadline.remaining):
            self.channel.send("handshake", {"overdue": deadline.seconds})
            self.wait_until_answered("welcome", answer)
        if "welcome" not in self.replies:
            self.raise_if_ended()
            raise self._lost("did not reply")
        return _table_in(self.replies)

    def raise_if_ended(self) -> None:
        """Raise if rank 0 has refused the start, or has closed the connection.

        Raises:
            RendezvousError: rank 0 refused the start, or exited before all ranks had
                connected.
            RankDiedError: it exited after that.
        """
        has_ended = 0 in self.channel.ended  # read first: rank 0 closes after a refusal
        raise_if_refused(self.replies)
        if not has_ended:
            return
        if "welcome" in self.replies:
            reason = self.channel.ended[0] or "it closed the connection"
            raise event_of("died", _table_in(self.replies)[0], reason).to_error()
        raise self._lost("closed the connection")

    def _lost(self, finding: str) -> RendezvousError:
        return RendezvousError(
            f"rank 0 at {self._where} {finding} after accepting {self._info}; look at rank 0's"
            " output"
        )

    def _handle_message(self, body: Message) -> None:
        """Merge a reply, as a whole; on the channel's thread."""
        self.replies = {**self.replies, **body}


def find_rank_zero(
    request: Request, endpoint: Endpoint, info: RankInfo, deadline: Deadline
) -> Contact:
    """Try to contact rank 0 until it accepts this rank, at most until the deadline.

    Raises:
        RendezvousError: rank 0 did not accept this rank in time, or refused the start;
            or a process exited, so that the ranks cannot connect.
    """
    reason = "not tried"  # why the last attempt failed
    for _ in deadline.ticks():
        if sentence := request.launch_failure():
            raise RendezvousError(sentence)
        reason = "rank 0 has not published its address there"
        address = endpoint.look_up()
        for host in address.candidates():
            try:
                return reach(
                    host,
                    address,
                    info=info,
                    timeouts=request.timeouts,
                    deadline=deadline,
                    endpoint=endpoint,
                )
            except OSError as error:
                # A name may become resolvable only when its host is up.
                reason = str(error.strerror or error)
    where = request.init_method
    remedy = "that it uses the same init_method (a file must be on a disk that all hosts share)"
    if isinstance(endpoint, TcpEndpoint):
        where = f"{endpoint.where.host}:{endpoint.where.port}"
        remedy = "that its host has this address"
    raise RendezvousError(
        f"{info} did not find rank 0 at {where} within {deadline.seconds:g} s ({reason}); check"
        f" that rank 0 is running, {remedy}, and that no firewall blocks the connection"
    )


def reach(
    host: str,
    address: Address,
    *,
    info: RankInfo,
    timeouts: Timeouts,
    deadline: Deadline,
    endpoint: Endpoint,
) -> Contact:
    """Wait until the process at a host of an address has accepted this rank.

    Rank 0 may be busy, so only a closed connection, the deadline or a changed address
    ends this wait.

    Args:
        host: one of the hosts of the address.
        address: the address, as ``endpoint`` shows it now.
        info: this rank.
        timeouts: the timeouts of the control channel.
        deadline: the end of the wait.
        endpoint: where rank 0 publishes its address, which another one may replace.

    Raises:
        OSError: it does not reply, or does not wait for this rank.
        RendezvousError: it is a rank 0, and has refused this rank.
    """
    seconds = max(0.1, min(timeouts.connect, deadline.remaining))
    connected = connect_socket(host, address.port, seconds)
    contact = Contact(info, connected, f"{host}:{address.port}", timeouts.heartbeat)
    try:
        contact.channel.connect(0, connected)
        contact.channel.send("hello", {"nonce": address.nonce, **asdict(info)})
        while not contact.wait_until_answered(
            "accepted", min(timeouts.connect, deadline.remaining)
        ):
            if deadline.expired or endpoint.look_up() != address:
                break
        raise_if_refused(contact.replies)
        if "accepted" not in contact.replies:
            # None while the connection is open. A reason that is not listed, such as an
            # orderly exit or a silent host, counts as a closed connection.
            raise OSError(_NO_REPLY.get(contact.channel.ended.get(0), _NO_REPLY[CLOSED]))
    except BaseException:
        contact.channel.close(in_order=False)
        raise
    return contact


def raise_if_refused(replies: Message) -> None:
    """Raise the refusal, if rank 0 has refused the start."""
    if "refused" in replies:
        sentence, *missing = replies["refused"]
        raise RendezvousError(sentence, missing=tuple(missing))


def _table_in(replies: Message) -> tuple[RankInfo, ...]:
    """Return all ranks, in order, from the welcome."""
    return tuple(RankInfo(*values) for values in replies["welcome"])
