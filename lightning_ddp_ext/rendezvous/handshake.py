"""The part of every rank but rank 0 in the handshake: find rank 0, say who this is, wait for the answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict

from torch.distributed import TCPStore

from lightning_ddp_ext.errors import RendezvousError, StoreError
from lightning_ddp_ext.rank_logger import own_logger
from lightning_ddp_ext.rendezvous.channel import Channel
from lightning_ddp_ext.rendezvous.coordinator import error_in, gave_up, table_in
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.endpoint import Address, Endpoint, TcpEndpoint, unresolvable
from lightning_ddp_ext.rendezvous.peer_event import event_of, reason_of
from lightning_ddp_ext.rendezvous.rank_table import Hello, RankTable
from lightning_ddp_ext.rendezvous.request import Timeouts
from lightning_ddp_ext.rendezvous.sockets import Sockets, sockets_opened
from lightning_ddp_ext.rendezvous.store import connect_store
from lightning_ddp_ext.rendezvous.wire import MALFORMED, Message

_logger = own_logger(__name__)

_RETRY = 0.25


class Handshake:
    """Connects this rank to rank 0.

    Args:
        hello: what this rank says of itself.
        endpoint: where rank 0 listens.
        channel: carries the handshake, and everything afterwards.
        deadline: of the start.
        timeouts: of the control channel.
    """

    def __init__(
        self, hello: Hello, endpoint: Endpoint, channel: Channel, deadline: Deadline, timeouts: Timeouts
    ) -> None:
        self._hello = hello
        self._endpoint = endpoint
        self._channel = channel
        self._deadline = deadline
        self._timeouts = timeouts
        self._answers: Message = {}
        self._closed: str | None = None
        self._changed = threading.Condition()
        self._obstacle: OSError | str = "not tried"
        self._rank_zero = ("", 0)
        self._has_warned = False
        self._store: Future[TCPStore] = Future()
        self.store_sockets: Sockets | None = None
        """Those of the store's client."""
        self.route = ""
        """The address of this host on the way to rank 0."""

    def run(self, absence: Callable[[], str | None] = lambda: None) -> tuple[RankTable, TCPStore]:
        """Wait until all ranks have connected; returns them, and a client of rank 0's store.

        Args:
            absence: asked now and then; a sentence if it is known that rank 0 cannot come.

        Raises:
            StoreError: there is no rank 0.
            RendezvousError: one of its kinds; rank 0 has refused the start.
        """
        self._channel.listen("handshake", self._hear)
        self._channel.on_closed(self._on_closed)
        try:
            self._find_rank_zero(absence)
            threading.Thread(target=self._open_store, name="ddpx-store", daemon=True).start()
            self._await_welcome()
            table = self._table_in(self._answers["welcome"])
            return table, self._await_store(table)
        except BaseException as error:
            if "welcome" in self._answers:
                self._channel.send("event", asdict(event_of("failed", self._hello.info, reason_of(error))))
            elif "refused" not in self._answers:
                self._channel.send("handshake", {"gave_up": str(gave_up(self._hello.info, error))})
            raise

    # Finding rank 0.

    def _find_rank_zero(self, absence: Callable[[], str | None]) -> None:
        for _ in self._deadline.ticks(longest=_RETRY):
            sentence = absence()
            if sentence is not None:
                raise RendezvousError(sentence)
            address = self._endpoint.look_up(self._deadline)
            if address is None:
                self._obstacle = self._endpoint.not_found()
            elif any(self._is_rank_zero_at(host, address) for host in address.candidates(self._hello.info.network)):
                return
        raise self._not_found()

    def _is_rank_zero_at(self, host: str, address: Address) -> bool:
        try:
            seconds = max(0.1, min(self._timeouts.connect, self._deadline.remaining))
            connected = socket.create_connection((host, address.port), timeout=seconds)
        except OSError as error:
            self._note(error)
            return False
        self._rank_zero = (host, address.port)
        self.route = str(connected.getsockname()[0]).removeprefix("::ffff:")
        with self._changed:
            self._answers, self._closed = {}, None
        self._channel.connect(0, connected)
        self._channel.send("hello", {"nonce": address.nonce, "hello": asdict(self._hello)})
        # Rank 0 may be busy, so only the end of the connection or of the start, or another address, ends this wait.
        is_published = True
        while is_published and not self._is_answered("heard") and not self._deadline.expired:
            is_published = self._endpoint_says(address)
            self._wait_for("heard", self._deadline if not address.nonce else Deadline(_RETRY))
        if "refused" in self._answers:
            raise error_in(self._answers["refused"])
        if "heard" in self._answers:
            return True
        self._channel.disconnect(0)
        self._obstacle = self._no_answer()
        return False

    def _endpoint_says(self, address: Address) -> bool:
        return not address.nonce or self._endpoint.look_up(self._deadline) == address

    def _no_answer(self) -> str:
        if self._closed == MALFORMED and not isinstance(self._endpoint, TcpEndpoint):
            return "another program answers there"
        if self._closed == MALFORMED:
            raise StoreError(
                f"what listens at {self._where} is not rank 0: it is another program; choose a port that no other "
                "program uses, or give the address of rank 0's host"
            )
        if "stranger" in self._answers:
            return "another run answers there"
        return (
            "it closed the connection without an answer" if self._closed is not None else "it accepted, but is silent"
        )

    @property
    def _where(self) -> str:
        return f"{self._rank_zero[0]}:{self._rank_zero[1]}"

    def _note(self, error: OSError) -> None:
        self._obstacle = error
        if isinstance(error, socket.gaierror) and not self._has_warned:
            # A cluster's name service may learn the name of rank 0's host only when that host is up.
            _logger.warning("%s: the host does not resolve yet; trying again", self._hello.init_method)
            self._has_warned = True

    def _not_found(self) -> StoreError:
        if isinstance(self._endpoint, TcpEndpoint):
            where = f"{self._endpoint.where.host}:{self._endpoint.where.port}"
            remedy = "that this address is its host's, and that no firewall is between"
            if isinstance(self._obstacle, socket.gaierror):
                return unresolvable(self._endpoint.where, self._obstacle)
        else:
            where = self._hello.init_method
            remedy = "that it sees the same file, and that no firewall is between"
        return StoreError(
            f"{self._hello.info} found no rank 0 at {where} within {self._deadline.seconds:g} s "
            f"({_in_words(self._obstacle)}); check that rank 0 is started, {remedy}"
        )

    # Waiting for the others.

    def _open_store(self) -> None:
        """Open the store while other ranks still connect; in a thread, as a refusal need not wait for it."""
        try:
            with sockets_opened() as self.store_sockets:
                store = connect_store(self._rank_zero[0], self._answers["heard"], self._deadline)
            self._store.set_result(store)
        except Exception as error:
            self._store.set_exception(error)
        with self._changed:
            self._changed.notify_all()

    def _await_store(self, table: RankTable) -> TCPStore:
        with self._changed:
            self._changed.wait_for(lambda: self._store.done() or self._closed is not None)
        if not self._store.done() and self._closed is not None:
            raise event_of("died", table[0], self._closed).to_error()
        return self._store.result()

    def _table_in(self, welcome: Message) -> RankTable:
        table = table_in(welcome)
        if self._hello.info.network == table[0].network:
            self.route = welcome["route"]
        return table

    def _await_welcome(self) -> None:
        self._wait_for("welcome", self._deadline)
        if not self._is_answered("welcome"):
            self._channel.send("handshake", {"overdue": True})
            self._wait_for("welcome", Deadline(self._timeouts.answer))
        if "refused" in self._answers:
            raise error_in(self._answers["refused"])
        if "welcome" not in self._answers:
            what = "has gone away" if self._closed is not None else "has not answered"
            raise StoreError(
                f"rank 0 at {self._where} {what} after it had accepted {self._hello.info}; look at its output"
            )

    def _wait_for(self, answer: str, deadline: Deadline) -> None:
        """Wait for this answer, a refusal, or the end of the connection."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_answered(answer), deadline.remaining)

    def _is_answered(self, answer: str) -> bool:
        return self._closed is not None or not {answer, "refused", "stranger"}.isdisjoint(self._answers)

    # On the channel's thread.

    def _hear(self, body: Message) -> None:
        with self._changed:
            self._answers.update(body)
            self._changed.notify_all()

    def _on_closed(self, rank: int, reason: str) -> None:
        with self._changed:
            self._closed = reason
            self._changed.notify_all()


def _in_words(obstacle: OSError | str) -> str:
    if isinstance(obstacle, str):
        return obstacle
    return "timed out" if isinstance(obstacle, TimeoutError) else str(obstacle.strerror or obstacle)
