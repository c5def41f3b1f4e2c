"""The handshake between rank 0 and others: who is welcome, and what all are told otherwise."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_ddp_ext.errors import (
    DisagreementError,
    DuplicateRankError,
    MissingRanksError,
    RendezvousError,
    StoreError,
)
from lightning_ddp_ext.rendezvous.channel import Channel
from lightning_ddp_ext.rendezvous.coordinator import Coordinator
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.endpoint import Address, Endpoint, FileEndpoint, TcpEndpoint
from lightning_ddp_ext.rendezvous.handshake import Handshake
from lightning_ddp_ext.rendezvous.init_method import Tcp
from lightning_ddp_ext.rendezvous.rank_table import Hello, RankInfo, RankTable
from lightning_ddp_ext.rendezvous.request import StartUp, Timeouts
from lightning_ddp_ext.rendezvous.wire import encode
from tests.harness.ranks import free_port
from tests.rendezvous.rooms import Answer, server, silent, web

LONG = 30.0
Result = RankTable | BaseException


class Process:
    """One process among the ranks, as a thread; ``result`` is the table, or what was raised."""

    def __init__(
        self, rank: int, world_size: int, endpoint: Endpoint, *, init_timeout: float = LONG, **fields: Any
    ) -> None:
        self.info = RankInfo(rank, "host", fields.pop("pid", 100 + rank), "network")
        values = {"init_method": "file:///run", "versions": {"torch": "2.13.0"}, **fields}
        self.channel = Channel(heartbeat=30.0)
        timeouts = Timeouts(after_refusal=1.0, answer=3.0, connect=2.0)
        hello = Hello(self.info, world_size, **values)
        self._start_up = StartUp(hello, endpoint, self.channel, Deadline(init_timeout), timeouts)
        self._withdraw: Callable[[], None] = lambda: None
        self._future: Future[RankTable] = Future()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        start = Coordinator if self.info.rank == 0 else Handshake
        try:
            found = start(self._start_up).run()
            self._withdraw = found.withdraw
            self._future.set_result(found.table)
        except BaseException as error:
            self.channel.close(in_order=False)
            self._future.set_exception(error)

    @property
    def result(self) -> Result:
        error = self._future.exception(timeout=LONG)
        return self._future.result() if error is None else error

    def close(self) -> None:
        self._withdraw()
        self.channel.close()


def results(*processes: Process) -> list[Result]:
    found = [process.result for process in processes]
    for process in processes:
        process.close()
    return found


def same_error(kind: type[RendezvousError], *processes: Process) -> str:
    found = results(*processes)
    assert {type(error) for error in found} == {kind}, found
    (message,) = set(map(str, found))
    return message


def expect_welcome(*processes: Process) -> None:
    """Fail unless all get the same table, of themselves."""
    tables = results(*processes)
    assert len(set(map(str, tables))) == 1
    assert isinstance(tables[0], RankTable), tables
    assert set(tables[0].ranks) == {process.info for process in processes}


def tcp() -> TcpEndpoint:
    return TcpEndpoint(Tcp("127.0.0.1", free_port()))


@pytest.fixture(params=["tcp", "file"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Endpoint:
    return tcp() if request.param == "tcp" else FileEndpoint(str(tmp_path / "run"))


def told_when_published(endpoint: Endpoint) -> threading.Event:
    """Set once rank 0 listens."""
    is_published, publish = threading.Event(), endpoint.publish

    def publish_and_tell(address: Address) -> None:
        publish(address)
        is_published.set()

    object.__setattr__(endpoint, "publish", publish_and_tell)
    return is_published


def test_all_are_told_as_soon_as_one_has_waited_long_enough(endpoint: Endpoint) -> None:
    patient = [Process(0, 4, endpoint), Process(1, 4, endpoint)]
    message = same_error(MissingRanksError, *patient, Process(3, 4, endpoint, init_timeout=2.0))
    assert message.startswith("rank 2 of 4 did not come within init_timeout ")
    assert "present: rank 0 (host host, pid 100), rank 1 (host host, pid 101), rank 3 (host host, pid 103); " in message


def test_two_processes_that_are_one_rank(endpoint: Endpoint) -> None:
    """All are told of both, and so is a rank that comes late: rank 0 stays for a moment."""
    processes = [Process(0, 3, endpoint), Process(1, 3, endpoint), Process(1, 3, endpoint, pid=7)]
    assert isinstance(processes[1].result, DuplicateRankError)
    assert same_error(DuplicateRankError, *processes, Process(2, 3, endpoint)) == (
        "two processes claim rank 1: pid 7 on host host and pid 101 on host host; give each process its own RANK, or "
        "rank="
    )


def test_two_rank_zeros(endpoint: Endpoint) -> None:
    """Both are told, and those that have come to one of them."""
    processes = [Process(0, 3, endpoint), Process(1, 3, endpoint), Process(0, 3, endpoint, pid=7)]
    assert same_error(DuplicateRankError, *processes).startswith("two processes claim rank 0: pid 7 on host host and ")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"world_size": 3}, "world_size must be the same on all ranks: rank 0 (host host, pid 100) has 2, rank 1 "),
        ({"versions": {"torch": "2.12"}}, "the version of torch must be the same on all ranks: rank 0 "),
        ({"init_method": "env://"}, "init_method must be the same on all ranks: rank 0 "),
    ],
)
def test_ranks_that_disagree(fields: dict[str, Any], expected: str) -> None:
    """Both are told who has what."""
    endpoint, second = tcp(), {"world_size": 2, **fields}
    message = same_error(
        DisagreementError, Process(0, 2, endpoint), Process(1, second.pop("world_size"), endpoint, **second)
    )
    assert message.startswith(expected)
    assert message.endswith("; start every rank with the same settings and the same installation")


def test_ranks_may_know_the_host_of_rank_0_by_different_names() -> None:
    """They are connected, so it is the same host."""
    endpoint, names = tcp(), ("tcp://10.0.0.1:29500", "tcp://head:29500")
    expect_welcome(*(Process(rank, 2, endpoint, init_method=name) for rank, name in enumerate(names)))


def test_latecomers_are_told_of_the_run_that_is_going_on(endpoint: Endpoint) -> None:
    """And change nothing for it."""
    running = [Process(0, 2, endpoint), Process(1, 2, endpoint)]
    assert all(isinstance(process.result, RankTable) for process in running)
    for late, kind, expected in (
        (Process(0, 2, endpoint, pid=7), DuplicateRankError, "rank 0 is held by pid 100 on host host, in a run that "),
        (Process(1, 2, endpoint, pid=7), DuplicateRankError, "rank 1 is held by pid 101 on host host, in a run that "),
        (Process(4, 5, endpoint), DisagreementError, "this process wants to be rank 4 of 5, but a run of 2 ranks is "),
    ):
        message = same_error(kind, late)
        assert message.startswith(expected)
        assert "end that run, or choose another init_method" in message
    assert running[0].channel.peers == {1}
    results(*running)


def test_an_answer_counts_only_with_the_nonce_that_was_read(tmp_path: Path) -> None:
    """At the port of a killed run there may be another run's rank 0 by now."""
    ours, other = FileEndpoint(str(tmp_path / "ours")), FileEndpoint(str(tmp_path / "other"))
    is_published = told_when_published(other)
    stranger = Process(0, 2, other)
    assert is_published.wait(LONG)
    address = other.look_up(Deadline(LONG))
    assert address is not None
    ours.publish(replace(address, nonce="of a killed run"))
    lost = Process(1, 2, ours, init_timeout=2.0)
    assert "(another run answers there); check that rank 0 is started" in same_error(StoreError, lost)
    expect_welcome(stranger, Process(1, 2, other))


def test_strangers_do_not_disturb_a_start() -> None:
    """Port scanners, say, or ranks beyond their own world."""
    endpoint = tcp()
    is_published = told_when_published(endpoint)
    zero = Process(0, 2, endpoint)
    assert is_published.wait(LONG)
    beyond = asdict(Hello(RankInfo(7), 4, "", {}))
    strangers = []
    for sent in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 9000,
        encode({"topic": "x"}),
        encode({"topic": "hello", "body": {"nonce": ""}}),
        encode({"topic": "hello", "body": {"nonce": "", "hello": beyond}}),
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
        endpoint.publish(Address((where.host,), port, "of a killed run", RankInfo(0, "host", 1, "network")))
        expect_welcome(Process(1, 2, endpoint), Process(0, 2, endpoint))
    assert list(tmp_path.iterdir()) == []
