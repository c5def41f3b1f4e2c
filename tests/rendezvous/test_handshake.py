"""The handshake between rank 0 and others: who is welcome, and what all are told otherwise."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_ddp_ext.errors import RendezvousError
from lightning_ddp_ext.rendezvous.channel import Channel
from lightning_ddp_ext.rendezvous.coordinator import Coordinator
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.endpoint import Address, Endpoint, FileEndpoint, TcpEndpoint
from lightning_ddp_ext.rendezvous.handshake import Handshake
from lightning_ddp_ext.rendezvous.init_method import Tcp
from lightning_ddp_ext.rendezvous.rank_table import Hello, RankInfo
from lightning_ddp_ext.rendezvous.request import Request, Timeouts
from lightning_ddp_ext.rendezvous.wire import MAX_HELLO, encode
from tests.harness.ranks import free_port
from tests.rendezvous.rooms import Answer, request, server, silent, web

LONG = 30.0
Table = tuple[RankInfo, ...]
Result = Table | Exception


class Process:
    """One process among the ranks, as a thread; ``result`` is the table, or what was raised."""

    def __init__(
        self, rank: int, world_size: int, endpoint: Endpoint, *, init_timeout: float = LONG, **fields: Any
    ) -> None:
        self.info = RankInfo(rank, "host", fields.pop("pid", 100 + rank), "network")
        hello = Hello(self.info, world_size, **{"init_method": "file:///run", "versions": {"torch": "2.13"}, **fields})
        self.channel = Channel(heartbeat=30.0)
        wanted = replace(
            request(rank, world_size, Tcp("127.0.0.1", 1)),
            endpoint=endpoint,
            timeouts=Timeouts(after_refusal=1.0, answer=3.0, connect=2.0),
        )
        self._result: Future[Result] = Future()
        self._withdraw: Callable[[], None] = lambda: None
        threading.Thread(target=self._run, args=[wanted, hello, Deadline(init_timeout)], daemon=True).start()

    def _run(self, wanted: Request, hello: Hello, deadline: Deadline) -> None:
        try:
            found = (Coordinator if self.info.rank == 0 else Handshake)(wanted, hello, self.channel, deadline).run()
            self.channel.start(lambda rank, reason: None)
            self._withdraw = found.withdraw
            self._result.set_result(found.table)
        except Exception as error:
            self.channel.close(in_order=False)
            self._result.set_result(error)

    @property
    def result(self) -> Result:
        return self._result.result(timeout=LONG)

    def close(self) -> None:
        self._withdraw()
        self.channel.close()


def results(*processes: Process) -> list[Result]:
    found = [process.result for process in processes]
    for process in processes:
        process.close()
    return found


def same_error(*processes: Process) -> str:
    found = results(*processes)
    assert {type(error) for error in found} == {RendezvousError}, found
    (message,) = set(map(str, found))
    return message


def expect_welcome(*processes: Process) -> None:
    """Fail unless all get the same table, of themselves."""
    tables = results(*processes)
    assert len(set(map(str, tables))) == 1
    assert isinstance(tables[0], tuple), tables
    assert set(tables[0]) == {process.info for process in processes}


def tcp() -> TcpEndpoint:
    return TcpEndpoint(Tcp("127.0.0.1", free_port()))


def listeners() -> set[Any]:
    """The addresses at which this process listens."""
    return {each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}


@pytest.fixture(params=["tcp", "file"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Endpoint:
    return tcp() if request.param == "tcp" else FileEndpoint(str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("third", "expected"),
    [
        ({"rank": 1, "pid": 7}, "two processes claim rank 1: pid 7 on host host and pid 101 on "),
        ({"rank": 0, "pid": 7}, "two processes claim rank 0: pid 7 on host host and "),
        ({"world_size": 4}, "world_size must be the same on all ranks: rank 0 (host host, pid 100) has 3, rank 2 "),
        ({"versions": {"torch": "2.12"}}, "the version of torch must be the same on all ranks: rank 0 "),
        ({"init_method": "env://"}, "init_method must be the same on all ranks: rank 0 "),
    ],
)
def test_a_start_that_cannot_be(third: dict[str, Any], expected: str, endpoint: Endpoint) -> None:
    """All ranks name those that claim the same rank, or that differ in a setting, and the remedy."""
    processes = [
        Process(0, 3, endpoint),
        Process(1, 3, endpoint),
        Process(**{"rank": 2, "world_size": 3, "endpoint": endpoint, **third}),
    ]
    message = same_error(*processes)
    assert message.startswith(expected)
    remedy = "give each process its own RANK, or rank="
    if not expected.startswith("two processes"):
        remedy = "start every rank with the same settings and the same installation"
    assert message.endswith(f"; {remedy}")


def test_late_ranks_hear_why_the_start_failed(endpoint: Endpoint) -> None:
    """Rank 0 stays for a moment."""
    first = [Process(0, 3, endpoint), Process(1, 3, endpoint), Process(1, 3, endpoint, pid=7)]
    assert isinstance(first[1].result, RendezvousError)
    same_error(*first, Process(2, 3, endpoint))


def test_latecomers_are_told_of_the_run_that_is_going_on(endpoint: Endpoint) -> None:
    """And change nothing for it."""
    running = [Process(0, 2, endpoint), Process(1, 2, endpoint)]
    assert all(isinstance(process.result, tuple) for process in running)
    for rank, world_size in ((0, 2), (1, 2), (4, 5)):
        assert same_error(Process(rank, world_size, endpoint, pid=7)) == (
            "a run of 2 ranks is going on at file:///run with rank 0 (host host, pid 100), and "
            f"rank {rank} (host host, pid 7) of {world_size} is late; end that run, or choose another init_method for "
            "this one"
        )
    assert running[0].channel.ended == {}
    results(*running)


def test_an_answer_counts_only_with_the_nonce_that_was_read(tmp_path: Path) -> None:
    """At the port of a killed run there may be another run's rank 0 by now."""
    ours, other = FileEndpoint(str(tmp_path / "ours")), FileEndpoint(str(tmp_path / "other"))
    running = [Process(rank, 2, other) for rank in range(2)]
    assert all(isinstance(process.result, tuple) for process in running)
    address = other.look_up(Deadline(LONG))
    assert address is not None
    ours.publish(replace(address, nonce="of a killed run"))
    lost = Process(1, 2, ours, init_timeout=2.0, pid=7)
    # The last attempt may have had no time for an answer.
    found = r"\((another run answers there|it accepted, but is silent); pid {} on host {} has published its address"
    assert re.search(found.format(os.getpid(), socket.gethostname()), same_error(lost))
    results(*running)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """Rank 0 says which one, why, and what to do."""
    path = tmp_path / "removed" / "run"
    assert same_error(Process(0, 2, FileEndpoint(str(path)))) == (
        f"init_method 'file://{path}': rank 0 on {socket.gethostname()} (pid {os.getpid()}) cannot write its address "
        "there: No such file or directory; make the directory, free space on its disk, or choose another file"
    )


def test_strangers_do_not_disturb_a_start() -> None:
    """Port scanners, say, ranks beyond their own world, and however many that say nothing.

    At a loopback address only those of this host reach rank 0 and its store.
    """
    listens, before = threading.Event(), listeners()

    class Told(TcpEndpoint):
        def publish(self, address: Address) -> None:
            listens.set()

    endpoint = Told(Tcp("127.0.0.1", free_port()))
    zero = Process(0, 2, endpoint)
    assert listens.wait(LONG)
    assert {address.ip for address in listeners() - before} == {"127.0.0.1"}
    beyond = asdict(Hello(RankInfo(7), 4, "", {}))
    strangers = []
    for sent in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 9000,
        b'["a", 1]\n',
        b"\xff\xfe\n",
        b"[" * 9999 + b"\n",
        b"x" * (MAX_HELLO + 1),
        encode("a", {"text": "x" * MAX_HELLO}),
        encode("x", {}),
        encode("hello", {"nonce": ""}),
        encode("hello", {"nonce": "", "hello": beyond}),
        *[b""] * 300,
    ):
        strangers.append(socket.create_connection((endpoint.where.host, endpoint.where.port)))
        strangers[-1].sendall(sent)
    expect_welcome(zero, Process(1, 2, endpoint))
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("answer", [None, silent, web])
def test_a_stale_address_is_replaced(answer: Answer | None, tmp_path: Path) -> None:
    """A rank that has read what a killed run left looks again, also where another program listens there by now."""
    endpoint = FileEndpoint(str(tmp_path / "run"))
    with server(answer or silent) as where:
        port = where.port if answer else free_port()
        endpoint.publish(Address((where.host,), port, "of a killed run", "network"))
        expect_welcome(Process(1, 2, endpoint), Process(0, 2, endpoint))
    assert list(tmp_path.iterdir()) == []
