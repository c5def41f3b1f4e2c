"""Ranks that start form one group, or every rank names the reason for the failure."""

import re
import signal
import socket
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from lightning_ddp_ext.errors import RankDiedError, RendezvousError
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.endpoint import connect_store
from lightning_ddp_ext.rendezvous.init_method import File, Tcp
from lightning_ddp_ext.rendezvous.process_context import join
from lightning_ddp_ext.rendezvous.request import Timeouts
from tests.harness.network import Network
from tests.harness.ranks import HOST, RankProcesses, announce, free_port, hold, rank_name
from tests.rendezvous.connecting import (
    LONG,
    Answer,
    add_ones,
    common_message,
    message_of,
    outcomes_at,
    place,
    request,
    server,
    silent,
    started,
    web,
)


@pytest.mark.parametrize("init_method", [None, "env://"])
def test_every_rank_names_one_that_never_starts(init_method: str | None, tmp_path: Path) -> None:
    """All raise after the shortest ``init_timeout``, and list the connected ranks."""
    where = place("tcp", tmp_path)
    common = {"world_size": 3, "init_method": init_method}
    waits = (LONG, 5.0)
    outcomes = outcomes_at(where, [{"init_timeout": wait, **common} for wait in waits])
    address = f"{where} (env://)" if init_method else str(where)
    present = ", ".join(rank_name(outcome.rank, outcome.pid) for outcome in outcomes)
    assert common_message(outcomes, RendezvousError) == (
        f"rank 2 of 3 did not connect to {address} within 5 s (init_timeout);"
        f" present: {present}; check that every rank is running and can reach rank 0, or raise"
        " init_timeout"
    )


@pytest.mark.nightly
@pytest.mark.netns
def test_both_hosts_name_a_rank_beyond_a_link_cut_while_the_group_forms(
    two_hosts: Network,
) -> None:
    """All ranks exit, also one whose main thread is blocked."""
    where = Tcp(two_hosts[0].address, free_port())
    hosts = [two_hosts[0], two_hosts[1], two_hosts[0]]
    settings: list[dict[str, Any]] = [
        {"init_timeout": LONG, "timeouts": Timeouts(heartbeat=3.0)} for _ in hosts
    ]
    settings[2]["hold_before"] = "all_reduce"
    with started(where, settings, namespaces=hosts) as ranks:
        ranks.wait_for("in front", 2)
        two_hosts.cut()
        here, there, blocked = ranks.wait()
    death_there = f"{rank_name(1, there.pid, 'host-b')} died: no sign of life"
    death_here = f"{rank_name(0, here.pid, 'host-a')} died: no sign of life"
    assert message_of(here, RankDiedError).startswith(death_there)
    assert message_of(there, RankDiedError).startswith(death_here)
    assert f"[rank 2] RankDiedError: {death_there}" in blocked.output


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_rank_that_does_not_find_rank_zero_names_the_address(kind: str, tmp_path: Path) -> None:
    """The error has the address, the reason of the last attempt, and what to check."""
    where = place(kind, tmp_path)
    (outcome,) = outcomes_at(where, [{"rank": 1, "world_size": 2}])
    if isinstance(where, Tcp):
        address = f"127.0.0.1:{where.port}"
        reason = "Connection refused"
        remedy = "that its host has this address"
    else:
        address = str(where)
        reason = "rank 0 has not published its address there"
        remedy = "that it uses the same init_method (a file must be on a disk that all hosts share)"
    assert message_of(outcome, RendezvousError) == (
        f"{rank_name(1, outcome.pid)} did not find rank 0 at {address} within 4 s"
        f" ({reason}); check that rank 0 is running, {remedy}, and that no firewall blocks the"
        " connection"
    )


@pytest.mark.parametrize(
    ("kind", "victim", "end", "says"),
    [
        pytest.param(
            "tcp",
            1,
            signal.SIGKILL,
            r"{} exited before all ranks had connected \(its process ended unexpectedly\)",
            id="killed",
        ),
        pytest.param(
            "file",
            1,
            signal.SIGINT,
            r"{} gave up before all ranks had connected: KeyboardInterrupt",
            id="interrupted",
        ),
        pytest.param(
            "file",
            0,
            signal.SIGKILL,
            r"rank 0 at 127\.0\.0\.1:\d+ closed the connection after accepting rank \d \(",
            id="rank 0 killed",
        ),
    ],
)
def test_a_rank_that_exits_before_all_have_connected_is_named_immediately(
    kind: str, victim: int, end: signal.Signals, says: str, tmp_path: Path
) -> None:
    """The other ranks do not wait for ``init_timeout``."""
    with started(place(kind, tmp_path), [{"init_timeout": LONG, "world_size": 4}] * 3) as ranks:
        for rank in (1, 2):
            ranks.wait_for("connected", rank)
        ranks.kill(victim, end)
        others = ranks.wait(*({0, 1, 2} - {victim}))
    name = re.escape(rank_name(victim, ranks.pids[victim]))
    for other in others:
        assert re.match(says.format(name), message_of(other, RendezvousError))


@pytest.mark.parametrize(
    ("kind", "victim", "left_files"), [("tcp", 0, []), ("file", 0, []), ("file", 2, [])]
)
def test_a_rank_killed_while_the_group_forms_is_named_immediately(
    kind: str, victim: int, left_files: list[str], tmp_path: Path
) -> None:
    """The others raise long before ``init_timeout``.

    Rank 0 removes its address, unless it is killed.
    """
    settings: list[dict[str, Any]] = [{"init_timeout": LONG} for _ in range(3)]
    settings[victim]["hold_before"] = "init_process_group"
    with started(place(kind, tmp_path), settings) as ranks:
        ranks.wait_for("in front", victim)
        ranks.kill(victim)
        others = ranks.wait(*({0, 1, 2} - {victim}))
    death = (
        f"{rank_name(victim, ranks.pids[victim])} died: its process ended unexpectedly;"
        " every rank stops."
    )
    assert common_message(others, RankDiedError).startswith(death)
    assert [path.name for path in tmp_path.iterdir()] == left_files


def connect_early(seat: int, seats: int, where: Tcp) -> float:
    """Join; rank 1 first tries to connect before rank 0 listens, from rank 0's port."""
    attempts = count(1)
    create = socket.create_connection

    def create_connection(*args: Any, **kwargs: Any) -> socket.socket:
        if next(attempts) == 1:
            return create(*args, source_address=(where.host, where.port), **kwargs)
        announce("tried")
        return create(*args, **kwargs)

    if seat == 0:
        hold("late")
    else:
        socket.create_connection = create_connection
    join(request(seat, seats, where))
    return add_ones()


def test_a_rank_that_connects_to_itself_tries_again() -> None:
    """The kernel may choose rank 0's port for a rank that connects before rank 0
    listens. Rank 0 can still listen there later.
    """
    with RankProcesses(connect_early, 2, Tcp("127.0.0.1", free_port())) as ranks:
        ranks.wait_for("late", 0)
        ranks.wait_for("tried", 1)
        ranks.release(0)
        assert [outcome.result for outcome in ranks.wait()] == [2.0, 2.0]


@pytest.mark.netns
def test_ranks_connect_at_a_link_local_address(two_hosts: Network) -> None:
    """They connect even where the names of hosts resolve to loopback, because the scope
    names the network interface for channel, store and gloo.
    """
    for host in two_hosts:
        host.hosts_file.write_text("127.0.0.1 localhost host-a host-b\n")
    two_hosts[0].ip("addr add fe80::77/64 dev eth0 nodad")
    with started(
        Tcp("fe80::77%eth0", free_port()),
        [{"init_timeout": LONG}] * 2,
        namespaces=list(two_hosts),
    ) as ranks:
        assert [outcome.result for outcome in ranks.wait()] == [2.0, 2.0]


@pytest.mark.netns
def test_ranks_connect_once_rank_zeros_name_resolves(two_hosts: Network) -> None:
    """Kubernetes publishes the name of a host in a headless service after its start."""
    known = two_hosts[0].hosts_file.read_text()
    for host in two_hosts:
        host.hosts_file.write_text("127.0.0.1 localhost\n")
    with started(
        Tcp("host-a", free_port()),
        [{"init_timeout": LONG}] * 2,
        namespaces=list(two_hosts),
    ) as ranks:
        ranks.wait_for("listens", 0)
        for host in two_hosts:
            host.hosts_file.write_text(known)
        assert [outcome.result for outcome in ranks.wait()] == [2.0, 2.0]


@pytest.mark.nightly
@pytest.mark.netns
def test_both_hosts_name_the_other_after_a_link_cut_during_the_handshake(
    two_hosts: Network,
) -> None:
    """Rank 0 names the missing rank, and the other rank names rank 0."""
    where = Tcp(two_hosts[0].address, free_port())
    settings = [{"world_size": 3, "init_timeout": 6.0, "timeouts": Timeouts(answer=3.0)}] * 2
    with started(where, settings, namespaces=list(two_hosts)) as ranks:
        ranks.wait_for("connected", 1)
        two_hosts.cut()
        here, there = ranks.wait()
    missing = f"of 3 did not connect to {where} within 6 s (init_timeout)"
    silence = f"rank 0 at {where.host}:{where.port} did not reply after accepting"
    assert missing in message_of(here, RendezvousError)
    assert silence in message_of(there, RendezvousError)


@pytest.mark.parametrize("answer", [silent, web])
def test_rank_zero_names_a_port_that_another_program_uses(answer: Answer) -> None:
    """The message has the port, the reason and the remedies."""
    with server(answer) as where:
        (outcome,) = outcomes_at(where, [{"world_size": 2}])
    assert message_of(outcome, RendezvousError) == (
        f"init_method '{where}': rank 0 on {HOST} (pid {outcome.pid}) cannot bind port"
        f" {where.port}: Address already in use; stop the program that uses the port, or choose"
        " another port"
    )


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (silent, "it accepted the connection, but did not reply"),
        (web, "a program other than rank 0 is answering there"),
    ],
)
def test_another_programs_server_is_not_rank_zero(answer: Answer, reason: str) -> None:
    """At ``init_timeout``, the error says how the server answered."""
    with server(answer) as where:
        (outcome,) = outcomes_at(where, [{"rank": 1, "world_size": 2}], init_timeout=4.0)
    assert message_of(outcome, RendezvousError) == (
        f"{rank_name(1, outcome.pid)} did not find rank 0 at 127.0.0.1:{where.port}"
        f" within 4 s ({reason}); check that rank 0 is running,"
        " that its host has this address, and that no firewall blocks the connection"
    )


@pytest.mark.parametrize("answer", [silent, web])
def test_a_server_that_is_not_a_store_raises(answer: Answer) -> None:
    """The error follows soon after the deadline; torch's client might never return."""
    with (
        server(answer) as where,
        pytest.raises(RendezvousError, match=f"the store at 127.0.0.1:{where.port} cannot be used"),
    ):
        connect_store(where.host, where.port, Deadline(0.5))


def test_a_host_name_that_does_not_resolve_is_named() -> None:
    """Rank 0 names the missing rank, and that rank the host and the resolver's error."""
    where = Tcp("no-such-host.invalid", 29500)
    rank_zero, rank_one = outcomes_at(where, [{}, {}], init_timeout=1.0)
    with pytest.raises(socket.gaierror) as unresolved:
        socket.getaddrinfo(where.host, where.port)
    reason = f"did not find rank 0 at {where.host}:29500 within 1 s ({unresolved.value.strerror})"
    assert f"rank 1 of 2 did not connect to {where}" in message_of(rank_zero, RendezvousError)
    assert reason in message_of(rank_one, RendezvousError)


def test_a_file_that_is_empty_or_left_by_a_killed_run_is_used(tmp_path: Path) -> None:
    """The next run starts there, and removes the file at its end."""
    path = tmp_path / "store"
    path.touch()  # as ``tempfile.mkstemp`` makes it
    where = File(str(path))
    with started(where, [{"init_timeout": LONG, "world_size": 3}] * 2) as ranks:
        ranks.wait_for("connected", 1)
        for seat in range(2):
            ranks.kill(seat)
        ranks.wait()
    assert path.stat().st_size > 0
    assert path.stat().st_mode & 0o777 == 0o600, "for this user's eyes only"
    of_next_run = outcomes_at(where, [{}, {}], init_timeout=LONG)
    assert [outcome.result for outcome in of_next_run] == [2.0, 2.0]
    assert not path.exists()


def test_a_file_with_other_content_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    """The error of every rank shows how the file begins."""
    path = tmp_path / "config.yaml"
    path.write_text("learning_rate: 0.1\n")
    outcomes = outcomes_at(File(str(path)), [{}, {}])
    assert common_message(outcomes, RendezvousError) == (
        f"init_method 'file://{path}': the file does not contain the address of a rank 0 (it "
        "begins with b'learning_rate'); choose a file that does not exist yet"
    )
    assert path.read_text() == "learning_rate: 0.1\n"
