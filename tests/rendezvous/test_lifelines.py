"""A dead rank is named on every other one, a rank that leaves is not taken for dead, and strangers change nothing.

The ranks are in one process here; one that dies, or that is none, is a plain socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lightning_ddp_ext.errors import RankDiedError, RankFailedError, RankLeftError, StoreError
from lightning_ddp_ext.rendezvous.claims import Claim, Table
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.lifelines import Lifelines, answers, listen_for_lifelines
from lightning_ddp_ext.rendezvous.news import News
from tests.ranks import RankProcesses, announce
from tests.rendezvous.test_store import server, silent, web

ATTEMPT = "0123456789abcdef"
LONG = 20.0


def claims(world_size: int) -> tuple[Claim, ...]:
    return tuple(
        Claim(rank, world_size, "cpu", "tcp://h:1", {}, host=f"node{rank}", pid=1000 + rank, network="net")
        for rank in range(world_size)
    )


def news(kind: str, rank: int, reason: str = "", traceback_text: str = "") -> News:
    return News(kind, rank, f"node{rank}", 1000 + rank, reason, traceback_text)  # type: ignore[arg-type]


class Rank:
    """One rank's lifelines, and what it hears."""

    def __init__(self, table: Table, rank: int, listener: socket.socket | None = None) -> None:
        self.heard: queue.Queue[News] = queue.Queue()
        self.lifelines = Lifelines(table, rank, self.heard.put, Deadline(LONG), listener=listener)

    def hears(self) -> News:
        return self.heard.get(timeout=LONG)


class Run:
    """Ranks that have answered a roll call; those of ``connected`` have their lifelines."""

    def __init__(self, world_size: int, connected: Sequence[int] | None = None) -> None:
        listener, lifeline = listen_for_lifelines()
        self.table = Table(ATTEMPT, claims(world_size), lifeline)
        others = range(1, world_size) if connected is None else connected
        self.ranks = {0: Rank(self.table, 0, listener)}
        self.ranks |= {rank: Rank(self.table, rank) for rank in others}

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def dial(self) -> socket.socket:
        """A connection to rank 0's lifelines, from anybody."""
        connection = socket.create_connection(("127.0.0.1", self.table.lifeline[1]))
        connection.settimeout(LONG)
        return connection

    def impersonate(self, rank: int) -> socket.socket:
        """A connection that rank 0 takes for this rank's lifeline."""
        connection = self.dial()
        connection.sendall(line({"attempt": ATTEMPT, "rank": rank}))
        assert connection.recv(1 << 10) == line({"welcome": ATTEMPT})
        return connection

    def close(self, *ranks: int) -> None:
        for rank in ranks or sorted(self.ranks, reverse=True):
            self.ranks.pop(rank).lifelines.close()

    def is_undisturbed(self) -> None:
        """News still goes from each rank to all others, and nobody has heard of anything else."""
        told = news("failed", 1, "the only news")
        self[1].lifelines.tell(told)
        for rank in self.ranks.keys() - {1}:
            assert self[rank].hears() == told
        self.close()


@contextlib.contextmanager
def run(world_size: int, connected: Sequence[int] | None = None) -> Iterator[Run]:
    these = Run(world_size, connected)
    try:
        yield these
    finally:
        these.close()


def line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


def is_hung_up(connection: socket.socket) -> bool:
    """Whether the other side ends the connection without a word."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


# What becomes of a rank.


def test_a_death_is_named_on_all_ranks() -> None:
    """A connection that ends without a goodbye is a death, which rank 0 passes on with host, pid and reason."""
    with run(4, connected=[1, 2]) as ranks:
        ranks.impersonate(3).close()
        for rank in (0, 1, 2):
            assert ranks[rank].hears() == news("died", 3, "its process ended without a goodbye")


def test_a_reset_connection_is_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed with unread news leaves a reset instead of an end."""
    with run(2, connected=[]) as ranks:
        dying = ranks.impersonate(1)
        dying.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closing sends a reset
        dying.close()
        assert ranks[0].hears() == news("died", 1, "its process ended without a goodbye")


def test_the_death_of_rank_0_is_known_to_the_others() -> None:
    """Each rank has a line to rank 0, and hears of its end by itself."""
    listener, lifeline = listen_for_lifelines()
    with listener:
        welcome = threading.Thread(target=lambda: welcomes_and_dies(listener))
        welcome.start()
        rank = Rank(Table(ATTEMPT, claims(2), lifeline), 1)
        assert rank.hears() == news("died", 0, "its process ended without a goodbye")
        rank.lifelines.close()
        welcome.join()


def welcomes_and_dies(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    assert json.loads(connection.recv(1 << 10)) == {"attempt": ATTEMPT, "rank": 1}
    connection.sendall(line({"welcome": ATTEMPT}))
    connection.close()


def test_a_goodbye_is_no_death() -> None:
    """Ranks that leave are said to have left, once, and nothing more is heard of them."""
    with run(3) as ranks:
        first, heard = ranks[0], ranks[0].heard
        ranks.close(1)
        assert first.hears() == ranks[2].hears() == news("left", 1)
        ranks.close(2)
        assert first.hears() == news("left", 2)
        ranks.close(0)
        assert heard.empty()


def test_ranks_that_leave_at_once_say_goodbye_to_one_another() -> None:
    """Whatever the order in which lines are closed, nobody is taken for dead."""
    for _ in range(10):
        these = Run(6)
        ears = [rank.heard for rank in these.ranks.values()]
        leaving = [threading.Thread(target=rank.lifelines.close) for rank in these.ranks.values()]
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join()
        heard = [ear.get_nowait() for ear in ears for _ in range(ear.qsize())]
        assert {item.kind for item in heard} <= {"left"}


def test_closing_twice_is_harmless() -> None:
    """A second goodbye finds nothing to do."""
    with run(2) as ranks:
        ranks[1].lifelines.close()
        ranks[1].lifelines.close()
        assert ranks[0].hears() == news("left", 1)


def test_a_failure_is_told_to_all_others() -> None:
    """News of a rank that failed reaches every rank but itself, with its traceback."""
    failure = news("failed", 1, "ValueError: bad", "Traceback ...")
    with run(3) as ranks:
        ranks[1].lifelines.tell(failure)
        assert ranks[0].hears() == ranks[2].hears() == failure
        ranks.close(2)
        assert ranks[1].hears() == news("left", 2)  # and nothing before it


def test_the_first_news_of_a_rank_counts() -> None:
    """What becomes of a rank after it has failed is no further news."""
    with run(3, connected=[1]) as ranks:
        failing = ranks.impersonate(2)
        failing.sendall(line({"news": {**vars(news("failed", 2, "ValueError: bad"))}}))
        assert ranks[1].hears().kind == "failed"
        failing.close()
        ranks.close(0)
        assert ranks[1].hears() == news("left", 0)


def test_a_rank_that_connects_late_hears_what_it_has_missed() -> None:
    """Who is gone before a rank has its lifeline is news to it all the same."""
    with run(4, connected=[1, 2]) as ranks:
        ranks.close(1)
        assert ranks[2].hears() == news("left", 1)
        ranks.ranks[3] = Rank(ranks.table, 3)
        assert ranks[3].hears() == news("left", 1)


def test_of_a_long_text_what_matters_arrives() -> None:
    """Of an endless traceback the end is told, of an endless message the beginning."""
    with run(3) as ranks:
        ranks[1].lifelines.tell(news("failed", 1, "a" + "b" * 10**6, "c" * 10**6 + "d"))
        for rank in (0, 2):
            heard = ranks[rank].hears()
            assert (heard.reason[0], heard.traceback_text[-1]) == ("a", "d")
            assert {len(heard.reason), len(heard.traceback_text)} == {1 << 16}


def test_news_arrives_whole_at_a_rank_that_reads_slowly() -> None:
    """What does not fit into the buffers is sent as soon as there is room."""
    with run(2, connected=[]) as ranks, ranks.impersonate(1) as slow, slow.makefile("rb") as messages:
        told = news("failed", 0, traceback_text="x" * (1 << 16))
        telling = threading.Thread(target=lambda: [ranks[0].lifelines.tell(told) for _ in range(100)])
        telling.start()
        heard = [json.loads(messages.readline()) for _ in range(100)]
        telling.join()
    assert heard == [{"news": vars(told)}] * 100


def test_a_rank_that_reads_nothing_does_not_hold_up_the_others() -> None:
    """A stopped process whose buffers are full is given up after a second, and named."""
    with run(3, connected=[1]) as ranks, ranks.impersonate(2):
        endless = news("failed", 0, traceback_text="x" * (1 << 16))
        for _ in range(500):
            ranks[0].lifelines.tell(endless)
            if not ranks[0].heard.empty():
                break
        assert ranks[0].hears() == news("died", 2, "it took no news for 1 s")
        assert ranks[1].hears().rank == 0
        assert ranks[1].hears() == news("died", 2, "it took no news for 1 s")


@pytest.mark.parametrize(
    ("kind", "error", "sentence"),
    [
        ("died", RankDiedError, "rank 1 (host node1, pid 1001) died: why; every rank stops. Look for the reason in"),
        ("failed", RankFailedError, "rank 1 (host node1, pid 1001) failed, so this rank stops: why"),
        ("left", RankLeftError, "rank 1 (host node1, pid 1001) has finished and gone, but this rank still needs it"),
    ],
)
def test_news_becomes_an_error(kind: str, error: type[RankFailedError], sentence: str) -> None:
    """What a rank raises because of another one names that one, its host and pid, and carries its traceback."""
    raised = news(kind, 1, "why", "Traceback ...").to_error()
    assert type(raised) is error
    assert str(raised).startswith(sentence)
    assert (raised.rank, raised.host, raised.pid, raised.traceback_text) == (1, "node1", 1001, "Traceback ...")


# Strangers.


class Bomb:
    """What does harm to whoever unpickles it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (3,)


STRANGE = {
    "wrong nonce": line({"attempt": "fedcba9876543210", "rank": 1}),
    "no nonce": line({"rank": 1}),
    "rank 0": line({"attempt": ATTEMPT, "rank": 0}),
    "no such rank": line({"attempt": ATTEMPT, "rank": 3}),
    "a rank that is connected": line({"attempt": ATTEMPT, "rank": 1}),
    "a list": line([ATTEMPT, 1]),
    "a number": b"1\n",
    "brackets": b"[" * 1000 + b"\n",
    "HTTP": b"GET / HTTP/1.1\r\nHost: node0\r\n\r\n",
    "bytes": b"\xff\x00\x80" * 20 + b"\n",
    "a pickle": pickle.dumps(Bomb()) + b"\n",
    "an empty line": b"\n",
    "half a message": b'{"attempt": ',
    "nothing": b"",
}


@pytest.mark.parametrize("sent", STRANGE.values(), ids=STRANGE.keys())
def test_strangers_change_nothing(sent: bytes) -> None:
    """Whoever does not bring this attempt's nonce is hung up on, and the ranks never hear of it."""
    with run(3) as ranks, ranks.dial() as stranger:
        with contextlib.suppress(OSError):  # hung up on already
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
        answer = stranger.recv(1 << 10) if ATTEMPT.encode() in sent and sent.startswith(b"{") else b""
        assert answer == (line({"welcome": ATTEMPT}) if answer else b"")
        assert is_hung_up(stranger)
        ranks.is_undisturbed()


def test_an_endless_line_is_cut_off() -> None:
    """A stranger that sends 2 MB without a line break is hung up on while it still sends."""
    with run(3) as ranks, ranks.dial() as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(b"x" * (1 << 21))
        assert is_hung_up(stranger)
        ranks.is_undisturbed()


def test_many_strangers_at_once_keep_no_rank_out() -> None:
    """Of 200 connections that say nothing the oldest are hung up on, and a rank that comes after them gets through."""
    with run(3, connected=[1]) as ranks, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(ranks.dial()) for _ in range(200)]
        ranks.ranks[2] = Rank(ranks.table, 2)
        ranks[0].lifelines.wait_until_connected(Deadline(LONG))
        assert all(is_hung_up(stranger) for stranger in strangers[:60])
        ranks.is_undisturbed()


# Finding rank 0.


def test_a_run_that_goes_on_answers() -> None:
    """A latecomer learns from rank 0's lifelines that the table's run still goes on, and disturbs nobody by asking."""
    with run(2) as ranks:
        assert answers(ranks.table)
        assert not answers(Table("fedcba9876543210", ranks.table.claims, ranks.table.lifeline))
        ranks.is_undisturbed()


def test_a_run_that_is_over_does_not_answer() -> None:
    """Neither nobody nor a program of another kind at the same address is taken for the run."""
    with run(2) as ranks:
        table = ranks.table
    assert not answers(table)
    with server(web) as where:
        assert not answers(Table(ATTEMPT, claims(2), ((where.host,), where.port)))


def test_a_rank_that_cannot_reach_rank_0() -> None:
    """The message names both ranks, all addresses that were tried, the port, and what to do."""
    with run(2) as ranks:
        table = ranks.table
    with pytest.raises(StoreError) as failed:
        Lifelines(table, 1, print, Deadline(0.2))
    addresses = ", ".join(dict.fromkeys(["127.0.0.1", *table.lifeline[0]]))
    assert str(failed.value).startswith("rank 1 (host node1, pid 1001) cannot reach rank 0 (host node0, pid 1000) at ")
    assert f" port {table.lifeline[1]} within 0.2 s; look at the output of rank 0, or open the way" in str(failed.value)
    assert all(address in str(failed.value) for address in addresses.split(", "))


def test_a_silent_program_in_the_place_of_rank_0() -> None:
    """Somebody who accepts and never welcomes is no rank 0, and does not hold a rank up beyond its deadline."""
    with server(silent) as where, pytest.raises(StoreError, match="cannot reach rank 0"):
        Lifelines(Table(ATTEMPT, claims(2), ((where.host,), where.port)), 1, print, Deadline(0.3))


def test_ranks_on_several_hosts_try_the_address_that_is_known_to_work() -> None:
    """The host of a TCP store has been reached already, so it is tried before the addresses that rank 0 lists."""
    listener, (_, port) = listen_for_lifelines()
    apart = tuple(Claim(rank, 2, "cpu", "i", {}, host="h", pid=1, network=f"net{rank}") for rank in range(2))
    table = Table(ATTEMPT, apart, ((), port))
    first = Lifelines(table, 0, print, Deadline(LONG), listener=listener)
    second = Lifelines(table, 1, print, Deadline(LONG), preferred="localhost")
    first.wait_until_connected(Deadline(LONG))
    assert (first.local_address, first.remote_address) == (None, None)
    assert second.local_address
    assert second.remote_address
    second.close()
    first.close()


def test_rank_0_names_those_who_do_not_connect() -> None:
    """Ranks that have answered the roll call and do not come to the lifelines are named, with where they should."""
    with run(4, connected=[2]) as ranks, pytest.raises(StoreError) as failed:
        ranks[0].lifelines.wait_until_connected(Deadline(0.2))
    assert str(failed.value).startswith(
        "rank 1 (host node1, pid 1001), rank 3 (host node3, pid 1003) answered the roll call, but did not reach rank 0 "
    )
    assert f"port {ranks.table.lifeline[1]} within 0.2 s; look at its output, or open the way" in str(failed.value)


def test_rank_0_does_not_wait_for_others_once_somebody_is_gone() -> None:
    """A rank that has connected and died ends the waiting for the rest."""
    with run(3, connected=[]) as ranks:
        ranks.impersonate(1).close()
        assert ranks[0].hears().kind == "died"
        ranks[0].lifelines.wait_until_connected(Deadline(LONG))


# Forked children.


def be_rank(rank: int, world_size: int, fifo: str, port: int) -> News | None:
    """Rank 0 waits for news; rank 1 has a child that lives as long as rank 0 does."""
    if rank == 0:
        listener, (_, port) = listen_for_lifelines()
        announce("listening", port)
        first = Rank(Table(ATTEMPT, claims(2), (("127.0.0.1",), port)), 0, listener)
        with open(fifo, "w"):
            announce("child is there")
            heard = first.hears()
        first.lifelines.close()
        return heard
    Rank(Table(ATTEMPT, claims(2), (("127.0.0.1",), port)), 1)
    if os.fork() == 0:
        with open(fifo) as lives_with_rank_0:
            lives_with_rank_0.read()
        os._exit(0)
    threading.Event().wait()
    return None


def test_a_forked_child_does_not_keep_its_parent_alive(tmp_path: Path) -> None:
    """A rank that is killed is known to be dead at once, although a loader's worker that it has forked lives on."""
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    with RankProcesses(be_rank, 2, fifo, start=[0], port=0, time_limit=LONG) as first:
        port = first.wait_for("listening", 0)
        with RankProcesses(be_rank, 2, fifo, start=[1], port=port, time_limit=LONG) as second:
            first.wait_for("child is there", 0)
            second.kill(1)
            (outcome,) = first.wait()
            assert outcome.result == news("died", 1, "its process ended without a goodbye"), outcome.story()
