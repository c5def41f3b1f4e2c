"""Processes join: they form one group and leave it in good order, or each of them names
the reason.
"""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import socket
import threading
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from lightning_ddp_ext.errors import (
    MissingRanksError,
    RankDiedError,
    RankFailedError,
    RendezvousError,
)
from lightning_ddp_ext.rendezvous.init_method import Tcp
from lightning_ddp_ext.rendezvous.process_context import join
from lightning_ddp_ext.rendezvous.request import Timeouts
from tests.harness.network import Network
from tests.harness.outcomes import Outcome, stories
from tests.harness.ranks import RankProcesses, announce, free_port, hold, launch_ranks
from tests.rendezvous import servers


def connect_early(seat: int, seats: int, where: Tcp) -> float:
    """Seek rank 0 before it listens, while the kernel prefers rank 0's port for this
    end of the connection.
    """
    ports = Path("/proc/sys/net/ipv4/ip_local_port_range")
    tries = count(1)
    create = socket.create_connection
    usual = ports.read_text()

    def create_connection(*args: Any, **kwargs: Any) -> socket.socket:
        first = next(tries) == 1
        ports.write_text(f"{where.port} {where.port + 1}" if first else usual)
        if not first:
            announce("tried")
        return create(*args, **kwargs)

    if seat == 0:
        hold("late")
    else:
        socket.create_connection = create_connection
    join(servers.request(seat, seats, where))
    return servers.add_ones()


def join_with_few_descriptors(number: int, world_size: int, where: Tcp | str) -> tuple[float, int]:
    """Join and add ones; how many files this process may open by then."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    join(servers.request((number + 2) % world_size, world_size, where))
    return servers.add_ones(), resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_ranks_connect_in_any_order_and_exit_in_good_order(kind: str, tmp_path: Path) -> None:
    """All ranks join one group, exit with status 0 without calling ``leave``, and leave
    no file behind.

    Rank 0, to which all connect, raises its limit of open files by what it needs.
    """
    outcomes = launch_ranks(join_with_few_descriptors, 3, servers.place(kind, tmp_path))
    assert [outcome.result for outcome in outcomes] == [(3.0, 256), (3.0, 512 + 3 * 16), (3.0, 256)]
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("init_method", [None, "env://"])
def test_a_rank_that_never_starts(init_method: str | None, tmp_path: Path) -> None:
    """After init_timeout all name the missing rank, the present ones, the address and
    the remedy.
    """
    where: Any = servers.place("tcp", tmp_path)
    common = {"world_size": 3, "init_method": init_method}
    outcomes = servers.endings(
        where, [{"init_timeout": wait, **common} for wait in (servers.LONG, 5.0)]
    )
    where = f"{where} (env://)" if init_method else where
    present = ", ".join(servers.process(outcome.rank, outcome.pid) for outcome in outcomes)
    assert (
        servers.same_sentence(outcomes, MissingRanksError)
        == f"rank 2 of 3 did not connect to {where} within {servers.LONG:g} s (init_timeout); present:"
        f" {present}; check that every rank is running and can reach rank 0, or raise"
        " init_timeout"
    )


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_rank_0_never_starts(kind: str, tmp_path: Path) -> None:
    """The others name the address that they tried, what they found there, and what to
    check.
    """
    where = servers.place(kind, tmp_path)
    (outcome,) = servers.endings(where, [{"rank": 1, "world_size": 2}])
    looked = f"127.0.0.1:{where.port}" if isinstance(where, Tcp) else servers.url(where)
    found = "Connection refused"
    remedy = "that its host has this address"
    if kind == "file":
        found = "rank 0 has not published its address there"
        remedy = "that it uses the same init_method"
    assert (
        servers.sentence(outcome, RendezvousError)
        == f"{servers.process(1, outcome.pid)} did not find rank 0 at {looked} within 4 s ({found}); check"
        f" that rank 0 is running, {remedy}, and that no firewall blocks the connection"
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
        for _ in (1, 2):
            ranks.wait_for("connected", 0)
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
        f"{servers.process(victim, ranks.pids[victim])} died: its process ended unexpectedly; every rank"
        " stops."
    )
    assert servers.same_sentence(others, RankDiedError).startswith(death)
    assert not list(tmp_path.iterdir())


opened_tunnels: list[AbstractContextManager[Tcp]] = []  # until this process exits


def forward(target: tuple[str, int], connection: socket.socket) -> None:
    """Forward data in both directions, as a tunnel does."""
    onward = socket.socket()
    if onward.connect_ex(target) != 0:
        connection.close()
    for ends in ((connection, onward), (onward, connection)):
        threading.Thread(target=copy_data, args=ends, daemon=True).start()


def copy_data(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while received := source.recv(1 << 16):
            sink.sendall(received)
    with contextlib.suppress(OSError):  # also after a reset: else the other end would wait on
        sink.shutdown(socket.SHUT_WR)


def join_by_tunnel(
    rank: int, world_size: int, own_host: str, port: int, address: str, seconds: float
) -> float:
    """Join where rank 1 reaches rank 0's port by a port of rank 1's host; rank 0 has
    this address, and calls its host ``own_host``. Rank 1 waits for so many seconds.
    """
    local = ("127.0.0.1", port)
    on_network = (address, port + 1)
    source, target = (on_network, local) if rank == 0 else (local, on_network)
    tunnel = servers.server(partial(forward, target), host=source[0], port=source[1])
    tunnel.__enter__()
    opened_tunnels.append(tunnel)
    hold("ready")
    if rank == 0:
        join(servers.request(0, world_size, Tcp(own_host, port), init_timeout=servers.LONG))
    else:
        join(servers.request(1, world_size, Tcp("127.0.0.1", port), init_timeout=seconds))
    return servers.add_ones()


def run_by_tunnel(own_host: str, hosts: Network, seconds: float) -> list[Outcome]:
    """Let the ranks join once both ends of the tunnel are open; return their outcomes."""
    arguments = (own_host, free_port(), hosts[0].address, seconds)
    with RankProcesses(join_by_tunnel, 2, *arguments, namespaces=list(hosts)) as ranks:
        for rank in range(2):
            ranks.wait_for("ready", rank)
        for rank in range(2):
            ranks.release(rank)
        return ranks.wait()


@pytest.mark.netns
def test_a_tunnel_that_forwards_one_port(two_hosts: Network) -> None:
    """As ``ssh -L`` does: the store is found at rank 0's host."""
    outcomes = run_by_tunnel(two_hosts[0].address, two_hosts, servers.LONG)
    assert [outcome.result for outcome in outcomes] == [2.0, 2.0], stories(outcomes)


@pytest.mark.netns
def test_a_tunnel_to_a_rank_0_that_only_its_own_host_reaches(two_hosts: Network) -> None:
    """All ranks raise the reason after their welcome."""
    first, second = run_by_tunnel("127.0.0.1", two_hosts, 6.0)
    reason = servers.sentence(second, RendezvousError)
    name = servers.process(1, second.pid, "host-b")
    assert re.match(
        re.escape(f"{name} reached rank 0 at 127.0.0.1:")
        + r"\d+, but not its store at port \d+.*; allow connections between all hosts on every"
        r" port, which collectives also need$",
        reason,
    ), reason
    assert (
        servers.sentence(first, RankFailedError)
        == f"{name} failed, so this rank stops: RendezvousError: {reason}"
    )


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
    """Like the name of a headless service: rank 0 listens and logs the reason; the
    others retry.
    """
    known = two_hosts[0].hosts_file.read_text()
    for host in two_hosts:
        host.hosts_file.write_text("127.0.0.1 localhost\n")
    with servers.started(
        Tcp("host-a", free_port()), [{"init_timeout": servers.LONG}] * 2, namespaces=list(two_hosts)
    ) as ranks:
        ranks.wait_for_output("does not resolve on host-a", 0)
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
        ranks.wait_for("connected", 0)
        two_hosts.cut()
        here, there = ranks.wait()
    assert f"of 3 did not connect to {where} within 6 s (init_timeout)" in servers.sentence(
        here, MissingRanksError
    )
    assert f"rank 0 at {where.host}:{where.port} did not reply after accepting" in servers.sentence(
        there, RendezvousError
    )


@pytest.mark.parametrize("answer", [servers.silent, servers.web, servers.drip])
def test_a_server_that_is_not_ours(answer: servers.Answer) -> None:
    """Rank 0 reports that it cannot bind the port, rank 1 that another program listens
    there.
    """
    with servers.server(answer) as where:
        first, second = servers.endings(where, [{}, {}], init_timeout=4.0)
    assert (
        servers.sentence(first, RendezvousError)
        == f"init_method '{where}': rank 0 on {servers.HOST} (pid {first.pid}) cannot bind port"
        f" {where.port}: Address already in use; stop the program that uses the port, or choose"
        " another port"
    )
    assert servers.sentence(second, RendezvousError) == (
        f"{servers.process(1, second.pid)} did not find rank 0 at 127.0.0.1:{where.port} within 4 s (it"
        " accepted the connection, but did not reply); check that rank 0 is running, that its host"
        " has this address, and that no firewall blocks the connection"
        if answer is not servers.web
        else (
            f"a program other than rank 0 is listening at 127.0.0.1:{where.port}; choose a port"
            " that no other program uses, or correct the address of rank 0's host"
        )
    )


def test_a_host_name_that_does_not_resolve() -> None:
    """Every rank raises that the name does not resolve, with a remedy."""
    outcomes = servers.endings(Tcp("no-such-host.invalid", 29500), [{}, {}], init_timeout=1.0)
    message = servers.same_sentence(outcomes, RendezvousError)
    assert message.startswith(
        "init_method 'tcp://no-such-host.invalid:29500': host 'no-such-host.invalid' does not"
    )
    assert message.endswith(
        "use the address of rank 0's host, or a name that every host can resolve"
    )


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
