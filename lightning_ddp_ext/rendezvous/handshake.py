"""The part of every rank but rank 0 in the handshake: find rank 0, say who this is, wait for the answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass

from torch.distributed import Store, TCPStore

from lightning_ddp_ext.errors import (
    DisagreementError,
    DuplicateRankError,
    MissingRanksError,
    RendezvousError,
    StoreError,
)
from lightning_ddp_ext.rank_logger import own_logger
from lightning_ddp_ext.rendezvous.channel import Channel
from lightning_ddp_ext.rendezvous.endpoint import Address, TcpEndpoint, unresolvable
from lightning_ddp_ext.rendezvous.peer_event import event_of, reason_of
from lightning_ddp_ext.rendezvous.rank_table import RankInfo, RankTable
from lightning_ddp_ext.rendezvous.request import StartUp
from lightning_ddp_ext.rendezvous.sockets import Sockets, sockets_opened
from lightning_ddp_ext.rendezvous.store import connect_store
from lightning_ddp_ext.rendezvous.wire import MALFORMED, Message

_logger = own_logger(__name__)

_RETRY = 0.25
_KINDS = {kind.__name__: kind for kind in (DisagreementError, DuplicateRankError, MissingRanksError, StoreError)}


@dataclass(frozen=True)
class Connections:
    """What the handshake brings, open as long as the process is a rank.

    Attributes:
        table: all ranks.
        store: rank 0's.
        channel: to rank 0; ``None`` in a world of one rank.
        store_sockets: those of the store.
        route: the address of this host that ranks of other hosts can reach, if there are any.
        withdraw: on rank 0, removes what was published.
    """

    table: RankTable
    store: Store
    channel: Channel | None = None
    store_sockets: Sockets | None = None
    route: str = ""
    withdraw: Callable[[], None] = lambda: None


class Handshake:
    """Connects this rank to rank 0."""

    def __init__(self, start_up: StartUp) -> None:
        self._hello, self._endpoint, self._channel = start_up.hello, start_up.endpoint, start_up.channel
        self._deadline, self._timeouts, self._absence = start_up.deadline, start_up.timeouts, start_up.absence
        self._answers: Message = {}
        self._closed: str | None = None
        self._changed = threading.Condition()
        self._obstacle: OSError | str = "not tried"
        self._rank_zero = ("", 0)
        self._route = ""
        self._store: Future[TCPStore] = Future()
        self._store_sockets: Sockets | None = None

    def run(self) -> Connections:
        """Wait until all ranks have connected.

        Raises:
            StoreError: there is no rank 0.
            RendezvousError: one of its kinds; rank 0 has refused the start.
        """
        self._channel.listen("handshake", self._hear)
        self._channel.on_closed(self._on_closed)
        try:
            self._find_rank_zero()
            threading.Thread(target=self._open_store, name="ddpx-store", daemon=True).start()
            table = self._await_welcome()
            if self._hello.info.network == table[0].network:
                self._route = self._answers["route"]
            store = self._await_store(table)
        except BaseException as error:
            if "welcome" in self._answers:
                self._channel.send("event", asdict(event_of("failed", self._hello.info, reason_of(error))))
            elif "refused" not in self._answers:
                self._channel.send("handshake", {"gave_up": str(gave_up(self._hello.info, error))})
            raise
        return Connections(table, store, self._channel, self._store_sockets, self._route)

    # Finding rank 0.

    def _find_rank_zero(self) -> None:
        for _ in self._deadline.ticks(longest=_RETRY):
            sentence = self._absence()
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
            if isinstance(error, socket.gaierror) and not isinstance(self._obstacle, socket.gaierror):
                # A cluster's name service may learn the name of rank 0's host only when that host is up.
                _logger.warning("%s: the host does not resolve yet; trying again", self._hello.init_method)
            self._obstacle = error
            return False
        self._rank_zero = (host, address.port)
        self._route = str(connected.getsockname()[0]).removeprefix("::ffff:")
        with self._changed:
            self._answers, self._closed = {}, None
        self._channel.connect(0, connected)
        self._channel.send("hello", {"nonce": address.nonce, "hello": asdict(self._hello)})
        # Rank 0 may be busy, so only the end of the connection or of the start, or another address, ends this wait.
        while not self._wait_for("heard", min(self._timeouts.connect, self._deadline.remaining)):
            if self._deadline.expired or self._endpoint.look_up(self._deadline) != address:
                break
        if "refused" in self._answers:
            raise error_in(self._answers["refused"])
        if "heard" in self._answers:
            return True
        self._channel.disconnect(0)
        self._obstacle = self._no_answer()
        return False

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

    def _not_found(self) -> StoreError:
        if isinstance(self._endpoint, TcpEndpoint):
            where = f"{self._endpoint.where.host}:{self._endpoint.where.port}"
            remedy = "that this address is its host's, and that no firewall is between"
            if isinstance(self._obstacle, socket.gaierror):
                return unresolvable(self._endpoint.where, self._obstacle)
        else:
            where = self._hello.init_method
            remedy = "that it sees the same file, and that no firewall is between"
        found = self._obstacle
        if isinstance(found, OSError):
            found = "timed out" if isinstance(found, TimeoutError) else str(found.strerror or found)
        return StoreError(
            f"{self._hello.info} found no rank 0 at {where} within {self._deadline.seconds:g} s ({found}); "
            f"check that rank 0 is started, {remedy}"
        )

    # Waiting for the others.

    def _open_store(self) -> None:
        """Open the store while other ranks still connect; in a thread, as a refusal need not wait for it."""
        try:
            with sockets_opened() as self._store_sockets:
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

    def _await_welcome(self) -> RankTable:
        if not self._wait_for("welcome", self._deadline.remaining):
            self._channel.send("handshake", {"overdue": True})
            self._wait_for("welcome", self._timeouts.answer)
        if "refused" in self._answers:
            raise error_in(self._answers["refused"])
        if "welcome" not in self._answers:
            what = "has gone away" if self._closed is not None else "has not answered"
            raise StoreError(
                f"rank 0 at {self._where} {what} after it had accepted {self._hello.info}; look at its output"
            )
        return RankTable.of(self._answers["welcome"])

    def _wait_for(self, answer: str, seconds: float) -> bool:
        """Whether this answer, a refusal, or the end of the connection has come within so many seconds."""
        ends = {answer, "refused", "stranger"}
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed is not None or not ends.isdisjoint(self._answers), seconds
            )

    # On the channel's thread.

    def _hear(self, body: Message) -> None:
        with self._changed:
            self._answers.update(body)
            self._changed.notify_all()

    def _on_closed(self, rank: int, reason: str) -> None:
        with self._changed:
            self._closed = reason
            self._changed.notify_all()


# What rank 0 and the others tell each other of an error.


def gave_up(info: RankInfo, error: BaseException) -> RendezvousError:
    """What the others are told of a rank that raises ``error`` while they wait for it."""
    if isinstance(error, RendezvousError):
        return error
    return RendezvousError(f"{info} gave up before all ranks had connected: {reason_of(error)}")


def refusal_of(error: RendezvousError) -> Message:
    """The message that ends the start for a rank."""
    missing = list(getattr(error, "missing", ()))
    return {"refused": {"kind": type(error).__name__, "sentence": str(error), "missing": missing}}


def error_in(refused: Message) -> RendezvousError:
    """The error in such a message."""
    error = _KINDS.get(refused["kind"], RendezvousError)(refused["sentence"])
    if isinstance(error, MissingRanksError):
        error.missing = tuple(refused["missing"])
    return error
