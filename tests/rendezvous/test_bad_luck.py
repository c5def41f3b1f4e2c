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
    DisagreementError,
    DuplicateRankError,
    MissingRanksError,
    RankDiedError,
    RendezvousError,
    StoreError,
)
from lightning_ddp_ext.rendezvous.coordinator import Coordinator
from lightning_ddp_ext.rendezvous.handshake import Handshake
from lightning_ddp_ext.rendezvous.init_method import Tcp
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.request import Timeouts
from tests.network import Network
from tests.ranks import announce, free_port, hold
from tests.rendezvous.rooms import (
    Settings,
    add_ones,
    endings,
    join_as,
    let_go,
    limit,
    meet,
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


def test_a_rank_killed_before_it_connects_is_missing(tmp_path: Path) -> None:
    """A process that is killed while it imports is named at init_timeout."""
    settings = [{"init_timeout": 1.5}] * 3
    with started(meet, str(tmp_path / "store"), settings, time_limit=limit(1.5)) as ranks:
        ranks.kill(1)
        let_go(ranks, 0, 2)
        message = same_sentence(ranks.wait(0, 2), MissingRanksError)
    assert message.startswith("rank 1 of 3 did not come within init_timeout 1.5 s")


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


def meet_when_somebody_is_dead(seat: int, seats: int, where: str, settings: Sequence[Settings]) -> None:
    """Rank 0 forms the group when it has heard of a death, rank 1 does not come so far."""
    hold("ready")
    form: Callable[..., None] = ProcessContext.form_group

    def form_late(context: ProcessContext, *args: Any) -> None:
        if seat == 1:
            hold("in front")
        context.peers.wait(LONG)
        form(context, *args)

    ProcessContext.form_group = form_late  # type: ignore[method-assign]
    join_as(seat, where, settings)


def test_a_death_that_is_known_before_the_group_forms(tmp_path: Path) -> None:
    """A rank does not begin to wait for others of whom it knows that one is dead."""
    settings = [{"init_timeout": LONG}] * 2
    with started(meet_when_somebody_is_dead, str(tmp_path / "store"), settings, time_limit=limit()) as ranks:
        let_go(ranks)
        ranks.wait_for("in front", 1)
        ranks.kill(1)
        (outcome,) = ranks.wait(0)
        assert sentence(outcome, RankDiedError).startswith(process(1, ranks.pids[1]))


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


@kinds
@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_that_claim_one_rank(kind: str, rank: int, tmp_path: Path) -> None:
    """All of the processes name both, with pid and host, and the remedy."""
    outcomes = endings(
        place(kind, tmp_path), [{"rank": seat, "world_size": 3} for seat in (0, 1, rank)], init_timeout=LONG
    )
    first, second = sorted(outcome.pid for outcome in outcomes if outcome.rank in (rank, 2))
    assert same_sentence(outcomes, DuplicateRankError) == (
        f"two processes claim rank {rank}: pid {first} on host {HOST} and pid {second} on host {HOST}; "
        "give each process its own RANK, or rank="
    )


@pytest.mark.parametrize(
    ("kind", "field", "values"),
    [
        ("tcp", "world_size", (3, 2)),
        ("file", "world_size", (2, 3)),
        ("tcp", "init_method", ("env://", "tcp://127.0.0.1:29500")),
        ("file", "versions", ({"torch": "2.13.0"}, {"torch": "2.12.1"})),
    ],
)
def test_ranks_that_disagree(kind: str, field: str, values: tuple[Any, Any], tmp_path: Path) -> None:
    """Every process names what must be the same, the two that differ, what each of them has, and the remedy."""
    mine, theirs = values
    settings = [{"world_size": 3, field: mine}, {"world_size": 3, field: theirs}, {"world_size": 3, field: mine}]
    if values == (2, 3):  # no rank 2 in a world of 2: two ranks alone disagree
        settings = settings[:2]
    outcomes = endings(place(kind, tmp_path), settings, init_timeout=LONG)
    what, shown = field, (mine, theirs)
    if field == "versions":
        what, shown = "the version of torch", (mine["torch"], theirs["torch"])
    assert same_sentence(outcomes, DisagreementError) == (
        f"{what} must be the same on all ranks: {process(0, outcomes[0].pid)} has {shown[0]}, "
        f"{process(1, outcomes[1].pid)} has {shown[1]}; start every rank with the same settings and the same "
        "installation"
    )


@kinds
def test_a_latecomer_is_told_who_holds_its_rank(kind: str, tmp_path: Path) -> None:
    """Processes that come to a complete run read who is there already; the run itself is not disturbed."""
    where = place(kind, tmp_path)
    shared = {"world_size": 2, "init_timeout": LONG}
    settings = [{**shared}, {**shared}, {**shared, "rank": 0}, {**shared, "rank": 1}, {**shared, "rank": 4}]
    settings[4]["world_size"] = 5
    with started(meet_and_stay, where, settings, start=[0, 1], time_limit=2 * limit()) as ranks:
        let_go(ranks)
        for seat in range(2):
            ranks.wait_for("joined", seat)
        for late in (2, 3, 4):
            ranks.start(late)
            let_go(ranks, late)
        again_0, again_1, beyond = ranks.wait(2, 3, 4)
        let_go(ranks, 0, 1)
        assert [(outcome.result, outcome.exit_code) for outcome in ranks.wait(0, 1)] == [(2.0, 0)] * 2
        pids = ranks.pids
    for rank, outcome in enumerate((again_0, again_1)):
        assert sentence(outcome, DuplicateRankError) == (
            f"rank {rank} is held by pid {pids[rank]} on host {HOST}, in a run that is going on at {url(where)}; "
            f"this process (pid {outcome.pid} on host {HOST}) came late: end that run, or choose another init_method "
            "or rank for this one"
        )
    assert sentence(beyond, DisagreementError) == (
        f"this process wants to be rank 4 of 5, but a run of 2 ranks is going on at {url(where)} (rank 0: "
        f"{process(0, pids[0])}); end that run, or choose another init_method for this one"
    )


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
