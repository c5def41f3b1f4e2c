"""The handshake between rank 0 and others: who is welcome, and what all are told otherwise."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
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
from tests.rendezvous.strangers import server, silent, web

LONG = 30.0
Result = RankTable | BaseException


class Process:
    """One process among the ranks, as a thread; ``result`` is the table, or what was raised."""

    def __init__(
        self, rank: int, world_size: int, endpoint: Endpoint, *, init_timeout: float = LONG, **fields: Any
    ) -> None:
        self.info = RankInfo(rank, "host", fields.pop("pid", 100 + rank), "network")
        values = {"init_method": "file:///run", "versions": {"torch": "2.13.0"}, **fields}
        self.hello = Hello(self.info, world_size, **values)
        self.endpoint = endpoint
        self.deadline = Deadline(init_timeout)
        self.channel = Channel(heartbeat=30.0)
        self.withdraw: Callable[[], None] = lambda: None
        self.future: Future[RankTable] = Future()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        timeouts = Timeouts(after_refusal=0.5, answer=1.0, connect=0.5)
        start_up = StartUp(self.hello, self.endpoint, self.channel, self.deadline, timeouts)
        try:
            found = Coordinator(start_up).run() if self.info.rank == 0 else Handshake(start_up).run()
            self.withdraw = found.withdraw
            self.future.set_result(found.table)
        except BaseException as error:
            self.channel.close(in_order=False)
            self.future.set_exception(error)

    @property
    def result(self) -> Result:
        error = self.future.exception(timeout=LONG)
        return self.future.result() if error is None else error

    def close(self) -> None:
        self.withdraw()
        self.channel.close()


def results(processes: Sequence[Process]) -> list[Result]:
    found = [process.result for process in processes]
    for process in processes:
        process.close()
    return found


def same_error(processes: Sequence[Process], kind: type[RendezvousError]) -> str:
    found = results(processes)
    assert {type(error) for error in found} == {kind}, found
    (message,) = set(map(str, found))
    return message


@pytest.fixture(params=["tcp", "file"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Endpoint:
    return TcpEndpoint(Tcp("127.0.0.1", free_port())) if request.param == "tcp" else FileEndpoint(str(tmp_path / "run"))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_all_ranks_get_the_same_table(order: Sequence[int], endpoint: Endpoint) -> None:
    """In whatever order they come."""
    tables = results([Process(rank, 3, endpoint) for rank in order])
    assert len(set(map(str, tables))) == 1
    assert isinstance(tables[0], RankTable)
    assert [info.pid for info in tables[0].ranks] == [100, 101, 102]


def test_missing_ranks_are_named_with_those_who_are_present(endpoint: Endpoint) -> None:
    """To all, when the first of them has waited long enough."""
    patient = [Process(0, 4, endpoint), Process(1, 4, endpoint)]
    hasty = Process(3, 4, endpoint, init_timeout=0.5)
    message = same_error([*patient, hasty], MissingRanksError)
    assert message.startswith("rank 2 of 4 did not come within init_timeout ")
    assert "present: rank 0 (host host, pid 100), rank 1 (host host, pid 101), rank 3 (host host, pid 103); " in message


def test_two_processes_that_are_one_rank(endpoint: Endpoint) -> None:
    """All are told of both."""
    processes = [Process(0, 3, endpoint), Process(1, 3, endpoint), Process(1, 3, endpoint, pid=7)]
    assert same_error(processes, DuplicateRankError) == (
        "two processes claim rank 1: pid 7 on host host and pid 101 on host host; give each process its own RANK, or "
        "rank="
    )


def test_two_rank_zeros(endpoint: Endpoint) -> None:
    """Both are told, and those that have come to one of them."""
    processes = [Process(0, 3, endpoint), Process(1, 3, endpoint), Process(0, 3, endpoint, pid=7)]
    assert same_error(processes, DuplicateRankError).startswith("two processes claim rank 0: pid 7 on host host and ")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"world_size": 3}, "world_size must be the same on all ranks: rank 0 (host host, pid 100) has 2, rank 1 "),
        ({"versions": {"torch": "2.12"}}, "the version of torch must be the same on all ranks: rank 0 "),
        ({"init_method": "env://"}, "init_method must be the same on all ranks: rank 0 "),
    ],
)
def test_ranks_that_disagree(fields: dict[str, Any], expected: str, endpoint: Endpoint) -> None:
    """Both are told who has what."""
    second = {"world_size": 2, **fields}
    processes = [Process(0, 2, endpoint), Process(1, second.pop("world_size"), endpoint, **second)]
    message = same_error(processes, DisagreementError)
    assert message.startswith(expected)
    assert message.endswith("; start every rank with the same settings and the same installation")


def test_ranks_may_know_the_host_of_rank_0_by_different_names(endpoint: Endpoint) -> None:
    """They are connected, so it is the same host."""
    names = ("tcp://10.0.0.1:29500", "tcp://head:29500")
    tables = results([Process(rank, 2, endpoint, init_method=name) for rank, name in enumerate(names)])
    assert all(isinstance(table, RankTable) for table in tables)


def test_latecomers_are_told_of_the_run_that_is_going_on(endpoint: Endpoint) -> None:
    """And change nothing for it."""
    running = [Process(0, 2, endpoint), Process(1, 2, endpoint)]
    assert all(isinstance(process.result, RankTable) for process in running)
    for late, kind, expected in (
        (Process(0, 2, endpoint, pid=7), DuplicateRankError, "rank 0 is held by pid 100 on host host, in a run that "),
        (Process(1, 2, endpoint, pid=7), DuplicateRankError, "rank 1 is held by pid 101 on host host, in a run that "),
        (Process(4, 5, endpoint), DisagreementError, "this process wants to be rank 4 of 5, but a run of 2 ranks is "),
    ):
        message = same_error([late], kind)
        assert message.startswith(expected)
        assert "end that run, or choose another init_method" in message
    assert running[0].channel.peers == {1}
    results(running)


def test_late_ranks_hear_why_the_start_failed(endpoint: Endpoint) -> None:
    """Rank 0 stays for a moment."""
    first = [Process(0, 3, endpoint), Process(1, 3, endpoint), Process(1, 3, endpoint, pid=7)]
    assert isinstance(first[1].result, DuplicateRankError)
    assert str(Process(2, 3, endpoint).result) == str(first[1].result)
    results(first)


def test_an_address_that_a_killed_run_left_is_replaced(tmp_path: Path) -> None:
    """Whoever has read it looks again."""
    endpoint = FileEndpoint(str(tmp_path / "run"))
    listener, address = endpoint.listen(RankInfo(0, "host", 1, "network"))
    endpoint.publish(address)
    listener.close()
    early = Process(1, 2, endpoint)
    assert all(isinstance(table, RankTable) for table in results([early, Process(0, 2, endpoint)]))
    assert list(tmp_path.iterdir()) == []


def test_an_answer_counts_only_with_the_nonce_that_was_read(tmp_path: Path) -> None:
    """At the port of a killed run there may be another run's rank 0 by now."""
    ours, other = FileEndpoint(str(tmp_path / "ours")), FileEndpoint(str(tmp_path / "other"))
    stranger = Process(0, 2, other)
    deadline = Deadline(LONG)
    while (found := other.look_up(deadline)) is None:
        assert not deadline.expired
    ours.publish(type(found)(found.hosts, found.port, "of a killed run", found.info))
    lost = Process(1, 2, ours, init_timeout=0.5)
    error = lost.result
    assert isinstance(error, StoreError)
    assert "(another run answers there); check that rank 0 is started" in str(error)
    assert all(isinstance(table, RankTable) for table in results([stranger, Process(1, 2, other)]))
    lost.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        encode({"topic": "hello", "body": {"nonce": ""}}),
        encode({"topic": "x"}),
        b"\0" * 9000,
    ],
    ids=["web", "half a hello", "other topic", "zeros"],
)
def test_strangers_do_not_disturb_a_start(sent: bytes, tmp_path: Path) -> None:
    """Port scanners, say."""
    where = Tcp("127.0.0.1", free_port())
    endpoint = TcpEndpoint(where)
    zero = Process(0, 2, endpoint)
    deadline = Deadline(LONG)
    while True:
        try:
            stranger = socket.create_connection((where.host, where.port))
            break
        except OSError:
            assert not deadline.expired
    stranger.sendall(sent)
    assert all(isinstance(table, RankTable) for table in results([zero, Process(1, 2, endpoint)]))
    stranger.close()


@pytest.mark.parametrize("answer", [silent, web])
def test_a_stale_address_at_which_another_program_listens(
    answer: Callable[[socket.socket], None], tmp_path: Path
) -> None:
    """A rank that has read it goes on to look into the file."""
    endpoint = FileEndpoint(str(tmp_path / "run"))
    with server(answer) as where:
        info = RankInfo(0, "host", 1, "network")
        endpoint.publish(Address((where.host,), where.port, "of a killed run", info))
        early = Process(1, 2, endpoint)
        zero = Process(0, 2, endpoint)
        assert all(isinstance(table, RankTable) for table in results([early, zero]))


def test_a_rank_beyond_its_own_world_is_no_rank(endpoint: Endpoint) -> None:
    """Whoever sends that does not disturb the start."""
    zero, stranger = Process(0, 2, endpoint), Process(1, 2, endpoint)
    assert all(isinstance(table, RankTable) for table in results([zero, stranger]))
    with pytest.raises(ValueError, match="rank 7 of 4"):
        Hello.of({"info": vars(RankInfo(7)), "world_size": 4, "init_method": "", "versions": {}})
