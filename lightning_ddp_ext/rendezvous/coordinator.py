"""Rank 0's part in the handshake: it hears who has come, and welcomes or refuses all of them together."""

from __future__ import annotations

import resource
import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import asdict
from functools import partial

from lightning_ddp_ext.errors import DisagreementError, DuplicateRankError, MissingRanksError, RendezvousError
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.endpoint import Address, PortInUse
from lightning_ddp_ext.rendezvous.handshake import Connections, error_in, gave_up, refusal_of
from lightning_ddp_ext.rendezvous.rank_table import Hello, RankInfo, RankTable, difference_between, ranks_in_words
from lightning_ddp_ext.rendezvous.request import StartUp
from lightning_ddp_ext.rendezvous.sockets import sockets_opened
from lightning_ddp_ext.rendezvous.store import host_store
from lightning_ddp_ext.rendezvous.wire import MAX_MESSAGE, Connection, Message, decode, encode

# Seconds between two looks at what may end the wait without a message.
_POLL = 0.25


class Coordinator:
    """Waits for all ranks, and answers those that come later.

    Raises:
        StoreError: it cannot listen.
        DuplicateRankError: another process is rank 0.
    """

    def __init__(self, start_up: StartUp) -> None:
        self._start_up = start_up
        self._hello, self._endpoint, self._channel = start_up.hello, start_up.endpoint, start_up.channel
        self._deadline = start_up.deadline
        self._present = {0: self._hello}
        self._table: RankTable | None = None
        self._error: RendezvousError | None = None
        self._told: set[int] = set()
        self._changed = threading.Condition()
        self._route = ""
        left = self._endpoint.look_up(self._deadline)
        if left is not None and left.nonce:
            self._refuse_second(left)
        _raise_limit_of_descriptors()
        listener, self._address = self._listen()
        self._known_nonces = {"", self._address.nonce}
        with sockets_opened() as self._store_sockets:
            self._store, self._store_port = host_store(listener.getsockname()[0])
        self._channel.listen("handshake", self._hear)
        self._channel.on_closed(self._on_closed)
        self._channel.accept(listener, self._admit)
        self._endpoint.publish(self._address)

    def run(self) -> Connections:
        """Wait until every rank has connected.

        Raises:
            MissingRanksError: some did not connect in time.
            DuplicateRankError: two processes are one rank.
            DisagreementError: world sizes, init methods or versions differ.
            RendezvousError: a rank ended or gave up.
        """
        withdraw = partial(self._endpoint.withdraw, self._address)
        try:
            table = self._wait_for_all()
        except BaseException as error:
            self._refuse(gave_up(self._hello.info, error))
            if isinstance(error, RendezvousError):
                self._stay()
            withdraw()
            raise
        return Connections(table, self._store, self._channel, self._store_sockets, self._route, withdraw)

    def _wait_for_all(self) -> RankTable:
        while not self._is_decided(_POLL):
            sentence = self._start_up.absence()
            if sentence is not None:
                self._refuse(RendezvousError(sentence))
            elif self._deadline.expired:
                self._refuse_missing()
            else:
                self._republish()
        if self._table is None:
            assert self._error is not None
            raise self._error
        return self._table

    def _is_decided(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: self._table is not None or self._error is not None, min(seconds, self._deadline.remaining)
            )

    # Another rank 0.

    def _listen(self) -> tuple[socket.socket, Address]:
        try:
            return self._endpoint.listen(self._hello.info)
        except PortInUse as taken:
            address = self._endpoint.look_up(self._deadline)
            assert address is not None
            self._refuse_second(address)
            raise taken.args[0] from None

    def _refuse_second(self, address: Address) -> None:
        """Raise what the rank 0 at this address says to a second one; return if no rank 0 answers there."""
        line = encode({"topic": "hello", "body": {"nonce": address.nonce, "hello": asdict(self._hello)}})
        refused: Message | None = None
        for host in address.candidates(self._hello.info.network):
            with suppress(OSError, KeyError, TypeError, ValueError):
                seconds = min(self._start_up.timeouts.connect, max(0.1, self._deadline.remaining))
                with socket.create_connection((host, address.port), timeout=seconds) as connected:
                    connected.sendall(line)
                    answer = decode(connected.makefile("rb").readline(MAX_MESSAGE)) or {}
                    refused = answer["body"]["refused"]
        if refused is not None:
            raise error_in(refused)

    def _republish(self) -> None:
        """See whether another rank 0 has overwritten this one's address, and lives."""
        published = self._endpoint.look_up(self._deadline)
        if published is None or published.nonce in self._known_nonces:
            return
        self._known_nonces.add(published.nonce)
        self._refuse_second(published)
        self._endpoint.publish(self._address)

    # On the channel's thread.

    def _admit(self, connection: Connection, message: Message) -> None:
        body = message.get("body", {})
        try:
            if message.get("topic") == "hello" and body["nonce"] != self._address.nonce:
                self._channel.reply(connection, "handshake", {"stranger": True})
            elif message.get("topic") == "hello":
                self._take(connection, Hello.of(body["hello"]))
        except (KeyError, TypeError, ValueError):
            return  # it is no rank; it may stay connected until there are too many of its kind

    def _take(self, connection: Connection, hello: Hello) -> None:
        if self._table is not None and hello.info in self._table.ranks:
            # This process is a rank already, and wants to begin anew before rank 0 does.
            self._channel.reply(connection, "handshake", {"stranger": True})
            return
        with self._changed:
            error = self._objection_to(hello)
            if error is None:
                self._present[hello.info.rank] = hello
        if error is not None:
            self._told.add(hello.info.rank)
            self._channel.reply(connection, "handshake", refusal_of(error))
            self._refuse(error)
            return
        if hello.info.network != self._hello.info.network:
            self._route = str(connection.socket.getsockname()[0]).removeprefix("::ffff:")
        self._channel.adopt(hello.info.rank, connection)
        self._channel.reply(connection, "handshake", {"heard": self._store_port})
        self._welcome_if_complete()

    def _objection_to(self, hello: Hello) -> RendezvousError | None:
        if self._error is not None:
            return self._error
        if self._table is not None:
            return _too_late(hello, self._table)
        difference = difference_between(self._hello, hello)
        if difference is not None:
            return DisagreementError(difference)
        known = self._present.get(hello.info.rank)
        return None if known is None else _duplicate(known.info, hello.info)

    def _welcome_if_complete(self) -> None:
        with self._changed:
            if self._error is not None or len(self._present) < self._hello.world_size:
                return
            infos = tuple(self._present[rank].info for rank in range(self._hello.world_size))
            self._table = RankTable(secrets.token_hex(8), infos)
            self._changed.notify_all()
        self._channel.send("handshake", {"welcome": self._table.to_message(), "route": self._route})

    def _on_closed(self, rank: int, reason: str) -> None:
        info = self._present[rank].info
        self._refuse(
            RendezvousError(f"{info} ended before all ranks had connected ({reason or 'it left'}); look at its output")
        )

    def _hear(self, body: Message) -> None:
        if "overdue" in body:
            self._refuse_missing()
        elif "gave_up" in body:
            self._refuse(RendezvousError(str(body["gave_up"])))

    # The end of the wait.

    def _refuse(self, error: RendezvousError) -> None:
        """End the start for all, unless its end is known already."""
        with self._changed:
            if self._table is not None or self._error is not None:
                return
            self._error = error
            self._told |= self._channel.peers
        self._channel.send("handshake", refusal_of(error))
        with self._changed:
            self._changed.notify_all()

    def _stay(self) -> None:
        """Stay for a while, so that ranks that come late hear why the start failed."""
        late = set(range(1, self._hello.world_size)) - set(self._present)
        deadline = Deadline(self._start_up.timeouts.after_refusal)
        for _ in deadline.ticks(longest=_POLL):
            if late <= self._told:
                break

    def _refuse_missing(self) -> None:
        present = [self._present[rank].info for rank in sorted(self._present.copy())]
        missing = sorted(set(range(self._hello.world_size)) - {info.rank for info in present})
        if not missing:  # the last one has come this moment
            return
        self._refuse(
            MissingRanksError(
                f"{ranks_in_words(missing)} of {self._hello.world_size} did not come within init_timeout "
                f"{self._deadline.seconds:g} s to {self._hello.init_method}; present: {', '.join(map(str, present))}; "
                "check that every rank is started and can reach it, or raise init_timeout",
                tuple(missing),
            )
        )


def _raise_limit_of_descriptors() -> None:
    """Each rank takes rank 0 some: for the channel, the store and the groups."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _duplicate(one: RankInfo, other: RankInfo) -> DuplicateRankError:
    first, second = sorted([one, other], key=lambda info: (info.host, info.pid))
    return DuplicateRankError(
        f"two processes claim rank {one.rank}: pid {first.pid} on host {first.host} and pid {second.pid} on host "
        f"{second.host}; give each process its own RANK, or rank="
    )


def _too_late(hello: Hello, table: RankTable) -> RendezvousError:
    info, size = hello.info, len(table)
    if info.rank >= size:
        return DisagreementError(
            f"this process wants to be rank {info.rank} of {hello.world_size}, but a run of {size} ranks is going on "
            f"at {hello.init_method} (rank 0: {table[0]}); end that run, or choose another init_method for this one"
        )
    return DuplicateRankError(
        f"rank {info.rank} is held by pid {table[info.rank].pid} on host {table[info.rank].host}, in a run that is "
        f"going on at {hello.init_method}; this process (pid {info.pid} on host {info.host}) came late: end that "
        "run, or choose another init_method or rank for this one"
    )
