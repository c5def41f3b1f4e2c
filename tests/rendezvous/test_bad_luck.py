"""What bad luck gets: whatever happens in a start-up, every rank that is there ends in time and names the reason."""

from __future__ import annotations

import os
import pkgutil
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_ddp_ext.errors import (
    MissingRanksError,
    RankDiedError,
    RendezvousError,
    StoreError,
)
from lightning_ddp_ext.rendezvous.coordinator import Coordinator
from lightning_ddp_ext.rendezvous.handshake import Handshake
from lightning_ddp_ext.rendezvous.init_method import Tcp
from lightning_ddp_ext.rendezvous.request import Timeouts
from tests.harness.network import Network
from tests.harness.ranks import announce, free_port, hold
from tests.rendezvous.rooms import (
    Settings,
    add_ones,
    endings,
    join_as,
    let_go,
    limit,
    meet_and_stay,
    place,
    process,
    same_sentence,
    sentence,
    started,
    url,
)
from tests.rendezvous.strangers import server, silent, web

HOST = os.uname().nodename
LONG = 60.0  # an init_timeout that cannot be what ends a test

kinds = pytest.mark.parametrize("kind", ["tcp", "file"])


# Somebody does not come.


@kinds
def test_a_rank_that_never_starts(kind: str, tmp_path: Path) -> None:
    """Both ranks that are there name the one that is not, the present ones with host and pid, and the remedy."""
    where = place(kind, tmp_path)
    outcomes = endings(where, [{"world_size": 3}] * 2)
    present = ", ".join(process(outcome.rank, outcome.pid) for outcome in outcomes)
    assert same_sentence(outcomes, MissingRanksError) == (
        f"rank 2 of 3 did not come within init_timeout 1.5 s to {url(where)}; present: {present}; "
        "check that every rank is started and can reach it, or raise init_timeout"
    )


@kinds
def test_rank_0_never_starts(kind: str, tmp_path: Path) -> None:
    """Each of the others says where it has looked, what it found there, and what to check."""
    where = place(kind, tmp_path)
    for rank, outcome in enumerate(endings(where, [{"rank": 1, "world_size": 3}, {"rank": 2, "world_size": 3}]), 1):
        looked = f"127.0.0.1:{where.port}" if isinstance(where, Tcp) else url(where)
        found, remedy = "Connection refused", "that this address is its host's"
        if kind == "file":
            found, remedy = "no rank 0 has published its address there", "that it sees the same file"
        assert sentence(outcome, StoreError) == (
            f"{process(rank, outcome.pid)} found no rank 0 at {looked} within 1.5 s ({found}); check that rank 0 is "
            f"started, {remedy}, and that no firewall is between"
        )


def meet_and_show(seat: int, seats: int, where: Tcp | str, settings: Sequence[Settings]) -> float:
    """Join, and say so as soon as this process has heard from rank 0, or as rank 0 waits for others."""
    hold("ready")
    hear, is_decided = Handshake._hear, Coordinator._is_decided

    def hear_and_tell(handshake: Handshake, body: Any) -> None:
        hear(handshake, body)
        if "heard" in body:
            announce("connected")

    def tell_and_wait(coordinator: Coordinator, seconds: float) -> bool:
        coordinator._is_decided = partial(is_decided, coordinator)  # type: ignore[method-assign]
        announce("connected")
        return is_decided(coordinator, seconds)

    Handshake._hear = hear_and_tell  # type: ignore[method-assign]
    Coordinator._is_decided = tell_and_wait  # type: ignore[method-assign]
    join_as(seat, where, settings)
    return add_ones()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
@kinds
def test_a_rank_that_ends_before_all_have_connected_is_named_at_once(
    kind: str, end: signal.Signals, tmp_path: Path
) -> None:
    """The others need not wait for init_timeout."""
    settings = [{"init_timeout": LONG, "world_size": 4}] * 3
    with started(meet_and_show, place(kind, tmp_path), settings, time_limit=limit()) as ranks:
        let_go(ranks)
        for seat in range(3):
            ranks.wait_for("connected", seat)
        ranks.kill(1, end)
        others = ranks.wait(0, 2)
    who = process(1, ranks.pids[1])
    assert same_sentence(others, RendezvousError).startswith(
        f"{who} ended before all ranks had connected (its process ended unexpectedly)"
        if end == signal.SIGKILL
        else f"{who} gave up before all ranks had connected: KeyboardInterrupt"
    )


@kinds
def test_rank_0_ends_before_all_have_connected(kind: str, tmp_path: Path) -> None:
    """The others say at once that rank 0 is gone."""
    where = place(kind, tmp_path)
    settings = [{"init_timeout": LONG, "world_size": 4}] * 3
    with started(meet_and_show, where, settings, time_limit=limit()) as ranks:
        let_go(ranks)
        for seat in range(3):
            ranks.wait_for("connected", seat)
        ranks.kill(0)
        outcomes = ranks.wait(1, 2)
    for rank, outcome in enumerate(outcomes, 1):
        message = sentence(outcome, StoreError)
        assert message.startswith("rank 0 at 127.0.0.1:")
        assert message.endswith(f"has gone away after it had accepted {process(rank, outcome.pid)}; look at its output")


# Somebody dies while the group forms.


def meet_but_stop_at(
    seat: int, seats: int, where: Tcp | str, settings: Sequence[Settings], step: str, who: Sequence[int]
) -> float:
    """Join, but if this is one of ``who``, stand still in front of a certain step."""
    hold("ready")
    path, _, name = f"lightning_ddp_ext.rendezvous.{step}".rpartition(".")
    owner = pkgutil.resolve_name(path)
    original: Callable[..., Any] = getattr(owner, name)

    def stop_in_front(*args: Any, **kwargs: Any) -> Any:
        hold("in front")
        return original(*args, **kwargs)

    if seat in who:
        setattr(owner, name, stop_in_front)
    join_as(seat, where, settings)
    return add_ones()


@pytest.mark.parametrize(("kind", "victim"), [("tcp", 0), ("tcp", 2), ("file", 1)])
def test_a_rank_killed_while_the_group_forms_is_named_at_once(kind: str, victim: int, tmp_path: Path) -> None:
    """A death is known from the channel, long before init_timeout, with host and pid."""
    options: dict[str, Any] = {"step": "process_group:ProcessGroups.form_default", "who": [victim]}
    settings = [{"init_timeout": LONG}] * 3
    with started(meet_but_stop_at, place(kind, tmp_path), settings, time_limit=limit(), **options) as ranks:
        let_go(ranks)
        ranks.wait_for("in front", victim)
        ranks.kill(victim)
        others = ranks.wait(*({0, 1, 2} - {victim}))
        death = f"{process(victim, ranks.pids[victim])} died: its process ended unexpectedly; every rank stops."
    assert same_sentence(others, RankDiedError).startswith(death)


# The link is cut.


@pytest.mark.netns
def test_a_link_cut_before_all_have_connected(two_hosts: Network) -> None:
    """Each side names the other one, within the bound."""
    where = Tcp(two_hosts.address(0), free_port())
    settings = [{"world_size": 3, "init_timeout": 2.0, "timeouts": Timeouts(answer=1.0)}] * 2
    with started(meet_and_show, where, settings, time_limit=limit(2.0), namespaces=list(two_hosts)) as ranks:
        let_go(ranks)
        for seat in range(2):
            ranks.wait_for("connected", seat)
        two_hosts.cut()
        here, there = ranks.wait()
    assert "of 3 did not come within init_timeout 2 s" in sentence(here, MissingRanksError)
    assert f"rank 0 at {where.host}:{where.port} has not answered after it had accepted" in sentence(there, StoreError)


@pytest.mark.netns
def test_a_link_cut_while_the_group_forms(two_hosts: Network) -> None:
    """Both sides name a rank beyond the cut, also on a rank whose main thread stands still."""
    where = Tcp(two_hosts.address(0), free_port())
    hosts = [two_hosts[0], two_hosts[1], two_hosts[0]]
    options: dict[str, Any] = {"step": "process_group._check_group", "who": [2], "namespaces": hosts}
    settings = [{"init_timeout": LONG, "timeouts": Timeouts(heartbeat=3.0)}] * 3
    with started(meet_but_stop_at, where, settings, time_limit=limit(10.0), **options) as ranks:
        let_go(ranks)
        ranks.wait_for("in front", 2)
        two_hosts.cut()
        here, there, blocked = ranks.wait()
    assert f"rank 1 (host host-b, pid {there.pid}) died: no sign of life" in sentence(here, RankDiedError)
    assert f"rank 0 (host host-a, pid {here.pid}) died: no sign of life" in sentence(there, RankDiedError)
    assert f"[rank 2] RankDiedError: rank 1 (host host-b, pid {there.pid}) died" in blocked.output


# Somebody is there twice, wants something else, or comes late.


# The address is somebody else's.


@pytest.mark.parametrize("answer", [silent, web])
def test_a_server_that_is_not_ours(answer: Callable[[socket.socket], None]) -> None:
    """Rank 0 says that it cannot bind the port, and rank 1 that what listens there is not rank 0."""
    with server(answer) as where:
        first, second = endings(where, [{}, {}], init_timeout=1.0)
    assert sentence(first, StoreError) == (
        f"init_method '{where}': rank 0 on {HOST} (pid {first.pid}) cannot bind port {where.port}: Address already in "
        "use; stop the program that holds it or choose another port"
    )
    assert sentence(second, StoreError) == (
        f"{process(1, second.pid)} found no rank 0 at 127.0.0.1:{where.port} within 1 s (it accepted, but is silent); "
        "check that rank 0 is started, that this address is its host's, and that no firewall is between"
        if answer is silent
        else f"what listens at 127.0.0.1:{where.port} is not rank 0: it is another program; choose a port that no "
        "other program uses, or give the address of rank 0's host"
    )


def test_a_host_that_no_rank_knows() -> None:
    """Every rank says that the name does not resolve, and what to give instead."""
    outcomes = endings(Tcp("no-such-host.invalid", 29500), [{}, {}], init_timeout=0.5)
    message = same_sentence(outcomes, StoreError)
    assert message.startswith("init_method 'tcp://no-such-host.invalid:29500': host 'no-such-host.invalid' does not")
    assert message.endswith("give the address of rank 0's host, or a name that every host knows")


# The file is not as it should be.


def test_a_file_left_by_a_killed_run(tmp_path: Path) -> None:
    """The next run at the same file starts, and removes it at its end."""
    where = str(tmp_path / "store")
    with started(meet_and_stay, where, [{"init_timeout": LONG}] * 2, time_limit=limit()) as ranks:
        let_go(ranks)
        for seat in range(2):
            ranks.wait_for("joined", seat)
            ranks.kill(seat)
        ranks.wait()
    assert os.path.exists(where)
    assert [outcome.result for outcome in endings(where, [{}, {}], init_timeout=LONG)] == [2.0] * 2
    assert not os.path.exists(where)


def test_an_empty_file_is_as_good_as_none(tmp_path: Path) -> None:
    """As ``tempfile.mkstemp`` leaves one."""
    path = tmp_path / "store"
    path.touch()
    assert [outcome.result for outcome in endings(str(path), [{}, {}], init_timeout=LONG)] == [2.0] * 2


def test_a_file_with_something_else_is_left_alone(tmp_path: Path) -> None:
    """Every rank refuses it, shows how it begins, and changes nothing in it."""
    path = tmp_path / "config.yaml"
    path.write_text("learning_rate: 0.1\n")
    outcomes = endings(str(path), [{}, {}])
    assert same_sentence(outcomes, StoreError) == (
        f"init_method 'file://{path}': the file holds something else than the address of a rank 0 (it "
        "begins with b'learning_rate'); name a file that does not exist yet"
    )
    assert path.read_text() == "learning_rate: 0.1\n"
