"""Rank 0's part in the handshake: it hears who has come, and welcomes or refuses all of them together."""

from __future__ import annotations

import resource
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from lightning_ddp_ext.errors import DisagreementError, DuplicateRankError, MissingRanksError, RendezvousError
from lightning_ddp_ext.rendezvous.channel import Channel
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.endpoint import Address, Endpoint, PortInUse
from lightning_ddp_ext.rendezvous.peer_event import reason_of
from lightning_ddp_ext.rendezvous.rank_table import Hello, RankInfo, RankTable, difference_between, ranks_in_words
from lightning_ddp_ext.rendezvous.request import Timeouts
from lightning_ddp_ext.rendezvous.sockets import sockets_opened
from lightning_ddp_ext.rendezvous.store import host_store
from lightning_ddp_ext.rendezvous.wire import MAX_HELLO, Connection, Message, decode, encode

# Seconds between two looks at what may end the wait without a message.
_POLL = 0.25

State = Literal["starting", "running", "refused"]


class Coordinator:
    """Waits for all ranks, and answers those that come later.

    Args:
        hello: what this rank says of itself.
        endpoint: where it listens.
        channel: carries the handshake, and everything afterwards.
        deadline: of the start.
        timeouts: of the control channel.

    Raises:
        StoreError: it cannot listen.
        DuplicateRankError: another process is rank 0.
    """

    def __init__(
        self, hello: Hello, endpoint: Endpoint, channel: Channel, deadline: Deadline, timeouts: Timeouts
    ) -> None:
        self._hello = hello
        self._endpoint = endpoint
        self._channel = channel
        self._deadline = deadline
        self._timeouts = timeouts
        self._present = {0: hello}
        self._state: State = "starting"
        self._error: RendezvousError | None = None
        self._told: set[int] = set()
        self._changed = threading.Condition()
        self._challenged = {""}
        self.table: RankTable | None = None
        self.route = ""
        """The address of this host by which ranks of other hosts have reached it, if there are any."""
        left = endpoint.look_up(deadline)
        if left is not None and left.nonce:
            self._refuse_second(left)
        _raise_limit_of_descriptors()
        listener, self._address = self._listen()
        with sockets_opened() as self.store_sockets:
            self.store, self._store_port = host_store(listener.getsockname()[0])
        self._challenged.add(self._address.nonce)
        channel.listen("handshake", self._hear)
        channel.on_closed(self._on_closed)
        channel.accept(listener, self._admit)
        endpoint.publish(self._address)

    def wait(self, absence: Callable[[], str | None] = lambda: None) -> RankTable:
        """Wait until every rank has connected.

        Args:
            absence: asked now and then; a sentence if it is known that a rank cannot come.

        Returns:
            All ranks.

        Raises:
            MissingRanksError: some did not connect in time.
            DuplicateRankError: two processes are one rank.
            DisagreementError: world sizes, init methods or versions differ.
            RendezvousError: a rank ended or gave up.
        """
        try:
            is_decided = False
            while not is_decided:
                sentence = absence()
                if sentence is not None:
                    self._refuse(RendezvousError(sentence))
                is_decided = self._is_decided(_POLL)
                if self._deadline.expired:
                    self._refuse_missing()
                elif not is_decided:
                    self._republish()
        except BaseException as error:
            self._refuse(gave_up(self._hello.info, error))
            if not isinstance(error, RendezvousError):
                raise
        if self._error is not None:
            self._stay()
            raise self._error
        assert self.table is not None
        return self.table

    def close(self) -> None:
        """Take no more connections, and remove what was published."""
        self._channel.stop_accepting()
        self._endpoint.withdraw(self._address)

    # Opening.

    def _listen(self) -> tuple[socket.socket, Address]:
        try:
            return self._endpoint.listen(self._hello.info)
        except PortInUse as taken:
            self._refuse_second(self._endpoint.look_up(self._deadline))
            raise taken.args[0] from None

    # Another rank 0.

    def _refuse_second(self, address: Address | None) -> None:
        """Raise an error if a rank 0 lives at this address, which is not this process's."""
        found = None if address is None else self._challenge(address)
        if found is None:
            return
        other = found["info"]
        if found["state"] == "starting":
            raise _duplicate(self._hello.info, other)
        raise _too_late(self._hello, RankTable("", (other,) * int(found["world_size"])))

    def _challenge(self, address: Address) -> Message | None:
        """Ask who listens at an address; ``None`` if it is no rank 0 with this nonce."""
        line = encode({"topic": "challenge", "body": {"nonce": address.nonce, "info": vars(self._hello.info)}})
        for host in address.candidates(self._hello.info.network):
            with suppress(OSError, KeyError, TypeError, ValueError):
                seconds = min(self._timeouts.connect, max(0.1, self._deadline.remaining))
                with socket.create_connection((host, address.port), timeout=seconds) as connected:
                    connected.sendall(line)
                    answer = decode(connected.makefile("rb").readline(MAX_HELLO))
                    if answer is not None and answer["topic"] == "challenge":
                        return {**answer["body"], "info": RankInfo(**answer["body"]["info"])}
        return None

    def _republish(self) -> None:
        """See whether another rank 0 has overwritten this one's address, and lives."""
        published = self._endpoint.look_up(self._deadline)
        if published is None or published.nonce in self._challenged:
            return
        self._challenged.add(published.nonce)
        self._refuse_second(published)
        self._endpoint.publish(self._address)

    def _answer_challenge(self, connection: Connection, body: Message) -> None:
        if body["nonce"] != self._address.nonce:
            return
        with self._changed:
            state = self._state
        answer = {"state": state, "info": vars(self._hello.info), "world_size": self._hello.world_size}
        self._channel.reply(connection, "challenge", answer)
        if state == "starting":
            self._refuse(_duplicate(self._hello.info, RankInfo(**body["info"])))

    # On the channel's thread.

    def _admit(self, connection: Connection, message: Message) -> None:
        body = message.get("body", {})
        try:
            if message.get("topic") == "challenge":
                self._answer_challenge(connection, body)
            elif message.get("topic") == "hello" and body["nonce"] != self._address.nonce:
                self._channel.reply(connection, "handshake", {"stranger": True})
            elif message.get("topic") == "hello":
                self._take(connection, Hello.of(body["hello"]))
        except (KeyError, TypeError, ValueError):
            return  # it is no rank; it may stay connected until there are too many of its kind

    def _take(self, connection: Connection, hello: Hello) -> None:
        if self.table is not None and hello.info in self.table.ranks:
            # This process is a rank already, and wants to begin anew before rank 0 does.
            self._channel.reply(connection, "handshake", {"stranger": True})
            return
        with self._changed:
            error = self._objection_to(hello)
            if error is None:
                self._present[hello.info.rank] = hello
        if error is not None:
            self._told.add(hello.info.rank)
            self._channel.reply(connection, "handshake", _refusal(error))
            self._refuse(error)
            return
        if hello.info.network != self._hello.info.network:
            self.route = str(connection.socket.getsockname()[0]).removeprefix("::ffff:")
        self._channel.adopt(hello.info.rank, connection)
        self._channel.reply(connection, "handshake", {"heard": self._store_port})
        self._welcome_if_complete()

    def _objection_to(self, hello: Hello) -> RendezvousError | None:
        if self._error is not None:
            return self._error
        if self.table is not None:
            return _too_late(hello, self.table)
        difference = difference_between(self._hello, hello)
        if difference is not None:
            return DisagreementError(difference)
        known = self._present.get(hello.info.rank)
        return None if known is None else _duplicate(known.info, hello.info)

    def _welcome_if_complete(self) -> None:
        with self._changed:
            if self._state != "starting" or len(self._present) < self._hello.world_size:
                return
            infos = tuple(self._present[rank].info for rank in range(self._hello.world_size))
            self.table = RankTable(secrets.token_hex(8), infos)
            self._state = "running"
            self._changed.notify_all()
        self._channel.send("handshake", {"welcome": welcome_of(self.table, self.route)})

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

    def _is_decided(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._state != "starting", min(seconds, self._deadline.remaining))

    def _refuse(self, error: RendezvousError) -> None:
        """End the start for all, unless its end is known already."""
        with self._changed:
            if self._state != "starting":
                return
            self._state, self._error = "refused", error
            self._told |= self._channel.peers
        self._channel.send("handshake", _refusal(error))
        with self._changed:
            self._changed.notify_all()

    def _stay(self) -> None:
        """Stay for a while, so that ranks that come late hear why the start failed."""
        late = set(range(1, self._hello.world_size)) - set(self._present)
        deadline = Deadline(self._timeouts.after_refusal)
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


def gave_up(info: RankInfo, error: BaseException) -> RendezvousError:
    """What the others are told of a rank that raises ``error`` while they wait for it."""
    if isinstance(error, RendezvousError):
        return error
    return RendezvousError(f"{info} gave up before all ranks had connected: {reason_of(error)}")


def _refusal(error: RendezvousError) -> Message:
    missing = list(getattr(error, "missing", ()))
    return {"refused": {"kind": type(error).__name__, "sentence": str(error), "missing": missing}}


def welcome_of(table: RankTable, route: str) -> Message:
    """What every rank is told of all others; each host is written once, as there may be thousands of ranks."""
    hosts = {(info.host, info.network): None for info in table.ranks}
    numbers = {host: number for number, host in enumerate(hosts)}
    ranks = [[numbers[info.host, info.network], info.pid] for info in table.ranks]
    return {"start_id": table.start_id, "hosts": list(hosts), "ranks": ranks, "route": route}


def table_in(welcome: Message) -> RankTable:
    """The table that rank 0 has sent."""
    hosts = welcome["hosts"]
    infos = [RankInfo(rank, hosts[at][0], pid, hosts[at][1]) for rank, (at, pid) in enumerate(welcome["ranks"])]
    return RankTable(welcome["start_id"], tuple(infos))


def error_in(refused: Message) -> RendezvousError:
    """The error that rank 0 has sent."""
    kinds = {kind.__name__: kind for kind in (DuplicateRankError, DisagreementError, RendezvousError)}
    if refused["kind"] == MissingRanksError.__name__:
        return MissingRanksError(refused["sentence"], tuple(refused["missing"]))
    return kinds.get(refused["kind"], RendezvousError)(refused["sentence"])


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
