"""Processes join: they form one group and leave it in good order, or each of them names
the reason.
"""

import re
import signal
import socket
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from lightning_ddp_ext.errors import (
    MissingRanksError,
    RankDiedError,
    RendezvousError,
)
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.endpoint import connect_store
from lightning_ddp_ext.rendezvous.init_method import Tcp
from lightning_ddp_ext.rendezvous.process_context import join
from lightning_ddp_ext.rendezvous.request import Timeouts
from tests.harness.network import Network
from tests.harness.ranks import RankProcesses, announce, free_port, hold
from tests.rendezvous import servers


def connect_early(seat: int, seats: int, where: Tcp) -> float:
    """Seek rank 0 before it listens, while the kernel prefers rank 0's port for this
    end of the connection.
    """
    ports = Path("/proc/sys/net/ipv4/ip_local_port_range")
    attempts = count(1)
    create = socket.create_connection
    usual = ports.read_text()

    def create_connection(*args: Any, **kwargs: Any) -> socket.socket:
        attempt = next(attempts)
        # In the first attempt, the kernel gives this socket rank 0's port as its own.
        ports.write_text(f"{where.port} {where.port + 1}" if attempt == 1 else usual)
        if attempt > 1:
            announce("tried")
        return create(*args, **kwargs)

    if seat == 0:
        hold("late")
    else:
        socket.create_connection = create_connection
    join(servers.request(seat, seats, where))
    return servers.add_ones()


@pytest.mark.parametrize("init_method", [None, "env://"])
def test_a_rank_that_never_starts(init_method: str | None, tmp_path: Path) -> None:
    """After the shortest init_timeout, all name it, the missing rank, the present ones,
    the address and the remedy.
    """
    where = servers.place("tcp", tmp_path)
    common = {"world_size": 3, "init_method": init_method}
    waits = (servers.LONG, 5.0)
    outcomes = servers.endings(where, [{"init_timeout": wait, **common} for wait in waits])
    address = f"{where} (env://)" if init_method else str(where)
    present = ", ".join(servers.process(outcome.rank, outcome.pid) for outcome in outcomes)
    assert (
        servers.same_sentence(outcomes, MissingRanksError)
        == f"rank 2 of 3 did not connect to {address} within 5 s (init_timeout);"
        f" present: {present}; check that every rank is running and can reach rank 0, or raise"
        " init_timeout"
    )


@pytest.mark.nightly
@pytest.mark.netns
def test_a_link_cut_while_the_group_forms(two_hosts: Network) -> None:
    """Both sides name a rank beyond the cut, also on a rank whose main thread is
    blocked.
    """
    where = Tcp(two_hosts[0].address, free_port())
    hosts = [two_hosts[0], two_hosts[1], two_hosts[0]]
    settings: list[dict[str, Any]] = [
        {"init_timeout": servers.LONG, "timeouts": Timeouts(heartbeat=3.0)} for _ in hosts
    ]
    settings[2]["stop"] = "all_reduce"
    with servers.started(where, settings, namespaces=hosts) as ranks:
        ranks.wait_for("in front", 2)
        two_hosts.cut()
        here, there, blocked = ranks.wait()
    assert f"rank 1 (host host-b, pid {there.pid}) died: no sign of life" in servers.sentence(
        here, RankDiedError
    )
    assert f"rank 0 (host host-a, pid {here.pid}) died: no sign of life" in servers.sentence(
        there, RankDiedError
    )
    assert f"[rank 2] RankDiedError: rank 1 (host host-b, pid {there.pid}) died" in blocked.output


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_rank_0_never_starts(kind: str, tmp_path: Path) -> None:
    """The others name the address that they tried, what they found there, and what to
    check.
    """
    where = servers.place(kind, tmp_path)
    (outcome,) = servers.endings(where, [{"rank": 1, "world_size": 2}])
    if isinstance(where, Tcp):
        address = f"127.0.0.1:{where.port}"
        reason = "Connection refused"
        remedy = "that its host has this address"
    else:
        address = servers.url(where)
        reason = "rank 0 has not published its address there"
        remedy = "that it uses the same init_method (a file must be on a disk that all hosts share)"
    assert (
        servers.sentence(outcome, RendezvousError)
        == f"{servers.process(1, outcome.pid)} did not find rank 0 at {address} within 4 s"
        f" ({reason}); check that rank 0 is running, {remedy}, and that no firewall blocks the"
        " connection"
    )


@pytest.mark.parametrize(
    ("kind", "victim", "end", "says"),
    [
        (
            "tcp",
            1,
            signal.SIGKILL,
            r"{} exited before all ranks had connected \(its process ended unexpectedly\)",
        ),
        ("file", 1, signal.SIGINT, r"{} gave up before all ranks had connected: KeyboardInterrupt"),
        (
            "file",
            0,
            signal.SIGKILL,
            r"rank 0 at 127\.0\.0\.1:\d+ closed the connection after accepting rank \d \(",
        ),
    ],
)
def test_a_rank_that_ends_before_all_have_connected(
    kind: str, victim: int, end: signal.Signals, says: str, tmp_path: Path
) -> None:
    """The others name it immediately, without waiting for init_timeout."""
    with servers.started(
        servers.place(kind, tmp_path), [{"init_timeout": servers.LONG, "world_size": 4}] * 3
    ) as ranks:
        for rank in (1, 2):
            ranks.wait_for("connected", rank)
        ranks.kill(victim, end)
        others = ranks.wait(*({0, 1, 2} - {victim}))
    name = re.escape(servers.process(victim, ranks.pids[victim]))
    assert all(
        re.match(says.format(name), servers.sentence(other, RendezvousError)) for other in others
    )


@pytest.mark.parametrize(("kind", "victim"), [("tcp", 0), ("file", 0), ("file", 2)])
def test_a_rank_killed_while_the_group_forms_is_named_immediately(
    kind: str, victim: int, tmp_path: Path
) -> None:
    """The channel reports a death long before init_timeout, with host and pid; no
    address is left behind.
    """
    settings: list[dict[str, Any]] = [{"init_timeout": servers.LONG} for _ in range(3)]
    settings[victim]["stop"] = "init_process_group"
    with servers.started(servers.place(kind, tmp_path), settings) as ranks:
        ranks.wait_for("in front", victim)
        ranks.kill(victim)
        others = ranks.wait(*({0, 1, 2} - {victim}))
    death = (
        f"{servers.process(victim, ranks.pids[victim])} died: its process ended unexpectedly;"
        " every rank stops."
    )
    assert servers.same_sentence(others, RankDiedError).startswith(death)
    assert not list(tmp_path.iterdir())


@pytest.mark.netns
def test_a_rank_that_is_connected_to_itself(two_hosts: Network) -> None:
    """The kernel may choose rank 0's port for the attempt: the rank retries, and leaves
    the port to rank 0.
    """
    with RankProcesses(
        connect_early, 2, Tcp("127.0.0.1", 40000), namespaces=[two_hosts[0]] * 2
    ) as ranks:
        ranks.wait_for("late", 0)
        ranks.wait_for("tried", 1)
        ranks.release(0)
        assert [outcome.result for outcome in ranks.wait()] == [2.0, 2.0]


@pytest.mark.netns
def test_a_link_local_address(two_hosts: Network) -> None:
    """Its scope names the network interface, also for the store, and for gloo where
    names do not help.
    """
    for host in two_hosts:
        host.hosts_file.write_text("127.0.0.1 localhost host-a host-b\n")
    two_hosts[0].ip("addr add fe80::77/64 dev eth0 nodad")
    with servers.started(
        Tcp("fe80::77%eth0", free_port()),
        [{"init_timeout": servers.LONG}] * 2,
        namespaces=list(two_hosts),
    ) as ranks:
        assert [outcome.result for outcome in ranks.wait()] == [2.0, 2.0]


@pytest.mark.netns
def test_a_name_that_resolves_late(two_hosts: Network) -> None:
    """Like the name of a headless service: rank 0 listens, and the others retry."""
    known = two_hosts[0].hosts_file.read_text()
    for host in two_hosts:
        host.hosts_file.write_text("127.0.0.1 localhost\n")
    with servers.started(
        Tcp("host-a", free_port()), [{"init_timeout": servers.LONG}] * 2, namespaces=list(two_hosts)
    ) as ranks:
        ranks.wait_for("listens", 0)
        for host in two_hosts:
            host.hosts_file.write_text(known)
        assert [outcome.result for outcome in ranks.wait()] == [2.0, 2.0]


@pytest.mark.nightly
@pytest.mark.netns
def test_a_link_cut_before_all_have_connected(two_hosts: Network) -> None:
    """Each side names the other one, within the bound."""
    where = Tcp(two_hosts[0].address, free_port())
    settings = [{"world_size": 3, "init_timeout": 6.0, "timeouts": Timeouts(answer=3.0)}] * 2
    with servers.started(where, settings, namespaces=list(two_hosts)) as ranks:
        ranks.wait_for("connected", 1)
        two_hosts.cut()
        here, there = ranks.wait()
    assert f"of 3 did not connect to {where} within 6 s (init_timeout)" in servers.sentence(
        here, MissingRanksError
    )
    assert f"rank 0 at {where.host}:{where.port} did not reply after accepting" in servers.sentence(
        there, RendezvousError
    )


@pytest.mark.parametrize("answer", [servers.silent, servers.web, servers.drip])
def test_rank_zero_names_a_port_that_another_program_uses(answer: servers.Answer) -> None:
    """The message has the port, the reason and the remedies."""
    with servers.server(answer) as where:
        (outcome,) = servers.endings(where, [{"world_size": 2}])
    assert (
        servers.sentence(outcome, RendezvousError)
        == f"init_method '{where}': rank 0 on {servers.HOST} (pid {outcome.pid}) cannot bind port"
        f" {where.port}: Address already in use; stop the program that uses the port, or choose"
        " another port"
    )


@pytest.mark.parametrize("answer", [servers.silent, servers.drip])
def test_a_server_that_never_replies_is_not_rank_zero(answer: servers.Answer) -> None:
    """At init_timeout, the other rank says that the connection was accepted."""
    with servers.server(answer) as where:
        (outcome,) = servers.endings(where, [{"rank": 1, "world_size": 2}], init_timeout=4.0)
    assert servers.sentence(outcome, RendezvousError) == (
        f"{servers.process(1, outcome.pid)} did not find rank 0 at 127.0.0.1:{where.port}"
        " within 4 s (it accepted the connection, but did not reply); check that rank 0 is running,"
        " that its host has this address, and that no firewall blocks the connection"
    )


def test_a_web_server_is_not_rank_zero() -> None:
    """The other rank says that another program listens there."""
    with servers.server(servers.web) as where:
        (outcome,) = servers.endings(where, [{"rank": 1, "world_size": 2}])
    assert servers.sentence(outcome, RendezvousError) == (
        f"a program other than rank 0 is listening at 127.0.0.1:{where.port}; choose a port"
        " that no other program uses, or correct the address of rank 0's host"
    )


@pytest.mark.parametrize("answer", [servers.silent, servers.web])
def test_a_server_that_is_not_a_store_raises(answer: servers.Answer) -> None:
    """The error follows soon after the deadline, even if torch's client would wait for
    ever.
    """
    with (
        servers.server(answer) as where,
        pytest.raises(RendezvousError, match=f"the store at 127.0.0.1:{where.port} cannot be used"),
    ):
        connect_store(where.host, where.port, Deadline(0.5))


def test_a_host_name_that_does_not_resolve() -> None:
    """The other ranks name the host and the resolver's error, and rank 0 those ranks."""
    outcomes = servers.endings(Tcp("no-such-host.invalid", 29500), [{}, {}], init_timeout=1.0)
    with pytest.raises(socket.gaierror) as unresolved:
        socket.getaddrinfo("no-such-host.invalid", 29500)
    absent, unresolving = outcomes
    assert "rank 1 of 2 did not connect to tcp://no-such-host.invalid:29500" in servers.sentence(
        absent, MissingRanksError
    )
    assert (
        f"did not find rank 0 at no-such-host.invalid:29500 within 1 s"
        f" ({unresolved.value.strerror}); check" in servers.sentence(unresolving, RendezvousError)
    )


def test_a_file_that_is_empty_or_left_by_a_killed_run_will_do(tmp_path: Path) -> None:
    """The next run starts there, and removes the file at its end; ``tempfile.mkstemp``
    makes such files.
    """
    path = tmp_path / "store"
    path.touch()
    with servers.started(
        str(path), [{"init_timeout": servers.LONG, "stop": "all_reduce"}] * 2
    ) as ranks:
        for seat in range(2):
            ranks.wait_for("in front", seat)
        for seat in range(2):
            ranks.kill(seat)
        ranks.wait()
    assert path.stat().st_size > 0
    assert path.stat().st_mode & 0o777 == 0o600, "for this user's eyes only"
    assert [
        outcome.result
        for outcome in servers.endings(str(path), [{}, {}], init_timeout=servers.LONG)
    ] == [2.0] * 2
    assert not path.exists()


def test_a_file_with_something_else_is_left_alone(tmp_path: Path) -> None:
    """Every rank refuses it, shows how it begins, and changes nothing in it."""
    path = tmp_path / "config.yaml"
    path.write_text("learning_rate: 0.1\n")
    assert (
        servers.same_sentence(servers.endings(str(path), [{}, {}]), RendezvousError)
        == f"init_method 'file://{path}': the file does not contain the address of a rank 0 (it "
        "begins with b'learning_rate'); choose a file that does not exist yet"
    )
    assert path.read_text() == "learning_rate: 0.1\n"
