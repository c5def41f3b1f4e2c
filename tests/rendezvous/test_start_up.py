"""Ranks that start form one group, or every rank names the reason for the failure."""

import contextlib
import re
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_ddp_ext.errors import RankDiedError, RendezvousError
from lightning_ddp_ext.rendezvous.init_method import File, Tcp
from lightning_ddp_ext.rendezvous.process_context import join
from lightning_ddp_ext.rendezvous.request import Timeouts
from tests.harness.environment import Network
from tests.harness.ranks import HOST, free_port, launch_ranks, message_of, rank_name
from tests.harness.training import backend
from tests.rendezvous.connecting import (
    LONG,
    Place,
    common_message,
    outcomes_at,
    place,
    request,
    server,
    silent,
    started,
    web,
)


def test_every_rank_names_one_that_never_starts(tmp_path: Path) -> None:
    """All raise after the shortest ``init_timeout``, and list the connected ranks."""
    where = place("tcp", tmp_path)
    common = {"world_size": 3, "init_method": "env://"}
    outcomes = outcomes_at(where, [{"init_timeout": wait, **common} for wait in (LONG, 5.0)])
    present = ", ".join(rank_name(outcome.rank, outcome.pid) for outcome in outcomes)
    assert common_message(outcomes, RendezvousError) == (
        f"rank 2 of 3 did not connect to {where} (env://) within 5 s (init_timeout);"
        f" present: {present}; check that every rank is running and can reach rank 0, or raise"
        " init_timeout"
    )


def free_place() -> contextlib.AbstractContextManager[Tcp]:
    return contextlib.nullcontext(Tcp("127.0.0.1", free_port()))


@pytest.mark.parametrize(
    ("at_place", "reason"),
    [
        pytest.param(free_place, "Connection refused", id="nothing"),
        pytest.param(
            partial(server, silent),
            "it accepted the connection, but did not reply",
            id="a silent server",
        ),
        pytest.param(
            partial(server, web),
            "a program other than rank 0 is answering there",
            id="a web server",
        ),
    ],
)
def test_a_rank_that_does_not_find_rank_zero_names_the_address(
    at_place: Callable[[], contextlib.AbstractContextManager[Tcp]], reason: str
) -> None:
    """The error has the reason of the last attempt, and what to check."""
    with at_place() as where:
        (outcome,) = outcomes_at(where, [{"rank": 1, "world_size": 2}])
    assert message_of(outcome, RendezvousError) == (
        f"{rank_name(1, outcome.pid)} did not find rank 0 at 127.0.0.1:{where.port} within 4 s"
        f" ({reason}); check that rank 0 is running, that its host has this address, and that no"
        " firewall blocks the connection"
    )


def test_a_rank_that_finds_no_address_names_the_file(tmp_path: Path) -> None:
    """The error says what to check of the file."""
    where = place("file", tmp_path)
    (outcome,) = outcomes_at(where, [{"rank": 1, "world_size": 2}])
    assert message_of(outcome, RendezvousError) == (
        f"{rank_name(1, outcome.pid)} did not find rank 0 at {where} within 4 s (rank 0 has not"
        " published its address there); check that rank 0 is running, that it uses the same"
        " init_method (a file must be on a disk that all hosts share), and that no firewall blocks"
        " the connection"
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
            r"{} exited before all ranks had connected",
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
        ranks.wait_for_all("connected", 1, 2)
        ranks.kill(victim, end)
        others = ranks.wait(*({0, 1, 2} - {victim}))
    name = re.escape(rank_name(victim, ranks.pids[victim]))
    for other in others:
        assert re.match(says.format(name), message_of(other, RendezvousError))


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_while_the_group_forms_is_named_immediately(
    victim: int, tmp_path: Path
) -> None:
    """The others raise long before ``init_timeout``, and no file is left."""
    settings: list[dict[str, Any]] = [{"init_timeout": LONG} for _ in range(3)]
    settings[victim]["hold_before"] = "init_process_group"
    with started(place("file", tmp_path), settings) as ranks:
        ranks.wait_for("in front", victim)
        ranks.kill(victim)
        others = ranks.wait(*({0, 1, 2} - {victim}))
    death = (
        f"{rank_name(victim, ranks.pids[victim])} died: its process ended unexpectedly;"
        " every rank stops."
    )
    assert common_message(others, RankDiedError).startswith(death)
    assert list(tmp_path.iterdir()) == []


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


def test_rank_zero_names_a_port_that_another_program_uses() -> None:
    """The message has the port, the reason and the remedies."""
    with server(silent) as where:
        (outcome,) = outcomes_at(where, [{"world_size": 2}])
    assert message_of(outcome, RendezvousError) == (
        f"init_method '{where}': rank 0 on {HOST} (pid {outcome.pid}) cannot bind port"
        f" {where.port}: Address already in use; stop the program that uses the port, or choose"
        " another port"
    )


def test_a_host_name_that_does_not_resolve_is_named() -> None:
    """The error has the host, and the resolver's error."""
    where = Tcp("no-such-host.invalid", 29500)
    (outcome,) = outcomes_at(where, [{"rank": 1, "world_size": 2}], init_timeout=1.0)
    with pytest.raises(socket.gaierror) as unresolved:
        socket.getaddrinfo(where.host, where.port)
    reason = f"did not find rank 0 at {where.host}:29500 within 1 s ({unresolved.value.strerror})"
    assert reason in message_of(outcome, RendezvousError)


def test_a_file_with_other_content_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    """The error of every rank shows how the file begins."""
    path = tmp_path / "config.yaml"
    path.write_text("learning_rate: 0.1\n")
    assert common_message(outcomes_at(File(str(path)), [{}, {}]), RendezvousError) == (
        f"init_method 'file://{path}': the file does not contain the address of a rank 0 (it "
        "begins with b'learning_rate'); choose a file that does not exist yet"
    )
    assert path.read_text() == "learning_rate: 0.1\n"


# The group that the ranks form.


def aborted(tensor: torch.Tensor) -> None:
    """Return zeros, as an aborted collective of NCCL may."""
    tensor.zero_()


def stuck(*args: Any, **kwargs: Any) -> None:
    """Never return, as NCCL if GPUs or hosts cannot reach each other."""
    threading.Event().wait()


def form_broken_group(rank: int, world_size: int, where: Place, functions: dict[str, Any]) -> None:
    for target, function in functions.items():
        patch(target, function).start()  # until this process exits
    join(request(rank, world_size, where, init_timeout=2.0, backend=backend("nccl_stand_in")))


ALL_REDUCE = "torch.distributed.all_reduce"
ABORT = "torch.distributed.distributed_c10d._abort_process_group"
LATE = "did not connect its devices within 2 s (init_timeout); look for messages of nccl_stand_in"


@pytest.mark.parametrize(
    ("functions", "finding"),
    [
        ({ALL_REDUCE: aborted}, "adds ones up to 0; look for messages of nccl_stand_in above"),
        ({"torch.distributed.init_process_group": stuck}, LATE),
        ({ALL_REDUCE: stuck, ABORT: stuck}, LATE),
    ],
    ids=["aborted", "never formed", "stuck, and its abort"],
)
def test_a_group_that_does_not_work_is_refused(
    functions: dict[str, Any], finding: str, tmp_path: Path
) -> None:
    """The error is raised in time and names a remedy, and the process exits."""
    (outcome,) = launch_ranks(form_broken_group, 1, place("file", tmp_path), functions)
    assert f"the nccl_stand_in group of 1 ranks {finding}" in message_of(outcome, RendezvousError)
