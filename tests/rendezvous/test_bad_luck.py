"""What bad luck gets: whatever happens in a start-up, every rank that is there ends in time and names the reason."""

from __future__ import annotations

import fcntl
import os
import pkgutil
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_ddp_ext.errors import (
    DisagreementError,
    DuplicateRankError,
    MissingRanksError,
    RankDiedError,
    RankFailedError,
    RendezvousError,
    StoreError,
)
from lightning_ddp_ext.rendezvous import membership
from lightning_ddp_ext.rendezvous.init_method import Tcp
from lightning_ddp_ext.rendezvous.membership import Membership
from lightning_ddp_ext.rendezvous.process_group import leave
from tests.network import Network
from tests.ranks import announce, free_port, hold, run_ranks
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
from tests.rendezvous.test_store import server, silent, web

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


def test_rank_0_never_starts_over_tcp() -> None:
    """The others say at which address rank 0 does not answer, and what to check."""
    where = Tcp("127.0.0.1", free_port())
    outcomes = endings(where, [{"rank": 1, "world_size": 3}, {"rank": 2, "world_size": 3}])
    assert same_sentence(outcomes, StoreError) == (
        f"no answer from rank 0 at 127.0.0.1:{where.port} within 1.5 s (Connection refused); check that rank 0 is "
        "started, that this address is its host's, and that no firewall is between"
    )


def test_rank_0_never_starts_with_a_file(tmp_path: Path) -> None:
    """The others name it, and each other as present."""
    settings = [{"rank": 1, "world_size": 3}, {"rank": 2, "world_size": 3}]
    first, second = outcomes = endings(str(tmp_path / "store"), settings)
    message = same_sentence(outcomes, MissingRanksError)
    assert message.startswith("rank 0 of 3 did not come within init_timeout 1.5 s to file:///")
    assert f"present: {process(1, first.pid)}, {process(2, second.pid)}; " in message


def test_a_rank_killed_before_the_roll_call_is_missing(tmp_path: Path) -> None:
    """A process that is killed while it imports is named at init_timeout."""
    settings = [{"init_timeout": 1.5}] * 3
    with started(meet, str(tmp_path / "store"), settings, time_limit=limit(1.5)) as ranks:
        ranks.kill(1)
        let_go(ranks, 0, 2)
        message = same_sentence(ranks.wait(0, 2), MissingRanksError)
    assert message.startswith("rank 1 of 3 did not come within init_timeout 1.5 s")


def meet_but_stop_in_roll_call(
    seat: int, seats: int, where: Tcp | str, settings: Sequence[Settings], who: Sequence[int]
) -> float:
    """Join, but if this is one of ``who``, stand still once it has answered the roll call."""
    hold("ready")
    stop = {"bad_news": lambda: hold("in the roll call")} if seat in who else {}
    join_as(seat, where, [{**mine, **stop} for mine in settings])
    return add_ones()


@pytest.mark.parametrize(("kind", "victim"), [("tcp", 1), ("file", 0)])
def test_a_rank_killed_in_the_roll_call_is_missing(kind: str, victim: int, tmp_path: Path) -> None:
    """A process that has answered and is killed before the others is named by them at init_timeout."""
    settings = [{"init_timeout": 2.0}] * 3
    with started(
        meet_but_stop_in_roll_call, place(kind, tmp_path), settings, who=[victim], time_limit=limit(2.0)
    ) as ranks:
        let_go(ranks)
        ranks.wait_for("in the roll call", victim)
        ranks.kill(victim)
        message = same_sentence(ranks.wait(*({0, 1, 2} - {victim})), MissingRanksError)
    assert message.startswith(f"rank {victim} of 3 did not come within init_timeout 2 s")


def meet_but_fail_in_roll_call(seat: int, seats: int, where: Tcp | str, settings: Sequence[Settings], by: str) -> float:
    """Join, but rank 1 fails once it has answered the roll call, in the thread that calls or in the main one."""
    hold("ready")

    def fail() -> str | None:
        if by == "Ctrl-C":
            hold("in the roll call")
            return None
        raise ValueError("no such host")

    join_as(seat, where, [{**mine, "bad_news": fail} if seat == 1 else mine for mine in settings])
    return add_ones()


@pytest.mark.parametrize("by", ["exception", "Ctrl-C"])
@kinds
def test_a_rank_that_fails_in_the_roll_call_is_named_at_once(kind: str, by: str, tmp_path: Path) -> None:
    """The others need not wait for it until init_timeout; it raises what it would have raised."""
    settings = [{"init_timeout": LONG, "world_size": 4}] * 3
    with started(meet_but_fail_in_roll_call, place(kind, tmp_path), settings, by=by, time_limit=limit()) as ranks:
        let_go(ranks)
        if by == "Ctrl-C":
            ranks.wait_for("in the roll call", 1)
            ranks.kill(1, signal.SIGINT)
            let_go(ranks, 1)
        failed, *others = ranks.wait(1, 0, 2)
    kind_of_error, cause = (ValueError, "ValueError: no such host") if by == "exception" else (KeyboardInterrupt, "Key")
    assert failed.error is not None
    assert isinstance(failed.error.exception, kind_of_error)
    message = same_sentence(others, RendezvousError)
    assert message.startswith(f"{process(1, failed.pid)} has given up the roll call: {cause}")


def test_rank_0_killed_in_the_roll_call_takes_the_tcp_store_along() -> None:
    """The others say at once that the store is lost, and that rank 0 is to blame."""
    where = Tcp("127.0.0.1", free_port())
    settings = [{"init_timeout": LONG, "world_size": 4}] * 3
    with started(meet_but_stop_in_roll_call, where, settings, who=[1, 2], time_limit=limit()) as ranks:
        let_go(ranks)
        for seat in (1, 2):
            ranks.wait_for("in the roll call", seat)
        ranks.kill(0)
        let_go(ranks, 1, 2)
        for outcome in ranks.wait(1, 2):
            message = sentence(outcome, RendezvousError)
            assert message.startswith(f"{where}: lost the store during the roll call (")
            assert message.endswith("rank 0 or its host has gone away: look at its output")


# Somebody dies while the group forms.


def meet_but_stop_at(
    seat: int, seats: int, where: Tcp | str, settings: Sequence[Settings], step: str, who: Sequence[int]
) -> float:
    """Join, but if this is one of ``who``, stand still in front of a certain step."""
    hold("ready")
    path, _, name = f"{membership.__name__}:{step}".rpartition(".")
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
    """After the roll call a death is known from the lifelines, long before init_timeout, with host and pid."""
    options: dict[str, Any] = {"step": "Membership._form_group", "who": [victim]}
    settings = [{"init_timeout": LONG}] * 3
    with started(meet_but_stop_at, place(kind, tmp_path), settings, time_limit=limit(), **options) as ranks:
        let_go(ranks)
        ranks.wait_for("in front", victim)
        ranks.kill(victim)
        others = ranks.wait(*({0, 1, 2} - {victim}))
        death = f"{process(victim, ranks.pids[victim])} died: its process ended without a goodbye; every rank stops."
    if kind == "tcp":
        assert same_sentence(others, RankDiedError).startswith(death)
    for outcome in others:  # nothing wakes who reads in a file store: such a rank ends with this one line
        assert f"RankDiedError: {death}" in outcome.output
        assert outcome.exit_code == 1


def meet_when_somebody_is_dead(seat: int, seats: int, where: str, settings: Sequence[Settings]) -> None:
    """Rank 0 forms the group when it has heard of a death, rank 1 does not come so far."""
    hold("ready")
    form: Callable[..., None] = Membership._form_group

    def form_late(member: Membership, *args: Any) -> None:
        if seat == 1:
            hold("in front")
        member.await_news(LONG)
        form(member, *args)

    Membership._form_group = form_late  # type: ignore[method-assign]
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


def test_a_rank_killed_before_its_lifeline_is_named_by_all(tmp_path: Path) -> None:
    """Between roll call and lifeline nothing tells of a death, so rank 0 ends the start for all at init_timeout."""
    options: dict[str, Any] = {"step": "Lifelines.__init__", "who": [1]}
    settings = [{"init_timeout": 3.0}] * 3
    with started(meet_but_stop_at, str(tmp_path / "store"), settings, time_limit=limit(3.0), **options) as ranks:
        let_go(ranks)
        ranks.wait_for("in front", 1)
        ranks.kill(1)
        first, third = ranks.wait(0, 2)
        finding = f"{process(1, ranks.pids[1])} answered the roll call, but did not reach rank 0 at any of "
    assert sentence(first, StoreError).startswith(finding)
    assert f"{process(0, first.pid)} failed, so this rank stops: StoreError: {finding}" in sentence(
        third, RankFailedError
    )


# The link is cut.


def meet_and_show(seat: int, seats: int, where: Tcp | str, settings: Sequence[Settings]) -> float:
    """Join, and say so as soon as this process has answered the roll call."""
    hold("ready")
    told: list[bool] = []

    def tell_once() -> None:
        if not told:
            announce("in the roll call")
            told.append(True)

    join_as(seat, where, [{**mine, "bad_news": tell_once} for mine in settings])
    return add_ones()


@pytest.mark.netns
def test_a_link_cut_in_the_roll_call(two_hosts: Network) -> None:
    """Rank 0 misses the ranks behind the cut, and those say that they have lost the store, within the bound."""
    where = Tcp(two_hosts.address(0), free_port())
    settings = [{"world_size": 3, "init_timeout": 2.0}] * 2
    with started(meet_and_show, where, settings, time_limit=limit(2.0), namespaces=list(two_hosts)) as ranks:
        let_go(ranks)
        for seat in range(2):
            ranks.wait_for("in the roll call", seat)
        two_hosts.cut()
        here, there = ranks.wait()
    assert "of 3 did not come within init_timeout 2 s" in sentence(here, MissingRanksError)
    assert "lost the store during the roll call" in sentence(there, RendezvousError)


@pytest.mark.netns
def test_a_link_cut_while_the_group_forms(two_hosts: Network) -> None:
    """Both sides name a rank beyond the cut, also on a rank whose main thread stands still."""
    where = Tcp(two_hosts.address(0), free_port())
    hosts = [two_hosts[0], two_hosts[1], two_hosts[0]]
    options: dict[str, Any] = {"step": "._check_group", "who": [2], "namespaces": hosts}
    with started(meet_but_stop_at, where, [{"init_timeout": LONG}] * 3, time_limit=limit(10.0), **options) as ranks:
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
    """Rank 0 says that it cannot bind the port, and rank 1 that what listens there is not rank 0's store."""
    with server(answer) as where:
        first, second = endings(where, [{}, {}], init_timeout=1.0)
    assert sentence(first, StoreError) == (
        f"init_method '{where}': rank 0 on {HOST} (pid {first.pid}) cannot bind port {where.port}: Address already in "
        "use; stop the program that holds it or choose another port"
    )
    assert sentence(second, StoreError) == (
        f"what listens at 127.0.0.1:{where.port} does not answer as a torch.distributed store does: it is another "
        "program, or rank 0's process is stopped; choose a port that no other program uses, or look after rank 0"
    )


def test_a_host_that_no_rank_knows() -> None:
    """Every rank says that the name does not resolve, and what to give instead."""
    outcomes = endings(Tcp("no-such-host.invalid", 29500), [{}, {}], init_timeout=0.5)
    message = same_sentence(outcomes, StoreError)
    assert message.startswith("init_method 'tcp://no-such-host.invalid:29500': host 'no-such-host.invalid' does not")
    assert message.endswith("give the address of rank 0's host, or a name that every host knows")


# The file is not as it should be.


def killed(where: str, world_size: int, function: Any, point: str, **options: Any) -> None:
    """A run whose ranks are all killed at this point."""
    settings = [{"init_timeout": LONG, "world_size": world_size}] * 2
    with started(function, where, settings, time_limit=limit(), **options) as ranks:
        let_go(ranks)
        for seat in range(2):
            ranks.wait_for(point, seat)
        for seat in range(2):
            ranks.kill(seat)
        ranks.wait()


def meet_at_each(rank: int, world_size: int, places: Sequence[str]) -> list[float]:
    """Join, add ones and leave at one place after the other."""
    found = []
    for where in places:
        join_as(rank, where, [{"init_timeout": 5.0}] * world_size)
        found.append(add_ones())
        leave()
    return found


def test_a_file_left_by_a_killed_run(tmp_path: Path) -> None:
    """Killed at any point of start or work, with its last record whole or cut off, it does no harm: 20 of 20."""
    left = [str(tmp_path / f"left-{number}") for number in range(4)]
    killed(left[0], 2, meet_but_stop_at, "in front", step="Lifelines.__init__", who=[0, 1])
    killed(left[1], 2, meet_but_stop_at, "in front", step="Membership._form_group", who=[0, 1])
    killed(left[2], 2, meet_and_stay, "joined")
    killed(left[3], 3, meet_and_show, "in the roll call")
    places = []
    for path in left:
        for cut in (0, 1, 7, 30, 100):
            places.append(f"{path}-{cut}")
            shutil.copy(path, places[-1])
            os.truncate(places[-1], os.path.getsize(path) - cut)
    assert run_ranks(meet_at_each, 2, places, time_limit=60.0) == [[2.0] * 20] * 2
    assert not any(map(os.path.exists, places))


def test_a_file_with_something_else_is_left_alone(tmp_path: Path) -> None:
    """Every rank refuses it, shows how it begins, and changes nothing in it."""
    path = tmp_path / "config.yaml"
    path.write_text("learning_rate: 0.1\n")
    outcomes = endings(str(path), [{}, {}])
    assert same_sentence(outcomes, StoreError) == (
        f"init_method 'file://{path}': the file holds something else than a store (it begins with b'learning_rate'); "
        "name a file that does not exist yet"
    )
    assert path.read_text() == "learning_rate: 0.1\n"


def test_a_file_that_somebody_keeps_locked(tmp_path: Path) -> None:
    """Every rank says so at init_timeout."""
    path = tmp_path / "store"
    with path.open("wb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        outcomes = endings(str(path), [{}, {}], init_timeout=0.5)
    assert same_sentence(outcomes, StoreError).startswith(
        f"init_method 'file://{path}': another process has kept the file locked for "
    )


def stuck(seat: int, seats: int, where: str, settings: Sequence[Settings]) -> None:
    """A rank whose file store never answers again once the roll call has begun."""

    def half_a_record() -> None:
        with Path(where).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(b"\xff\0\0\0")

    hold("ready")
    join_as(seat, where, [{**mine, "bad_news": half_a_record} for mine in settings])


def test_half_a_record_in_the_middle_of_the_roll_call(tmp_path: Path) -> None:
    """A rank killed while it writes makes the others' stores read for ever; they end all the same, and say why."""
    where = str(tmp_path / "store")
    with started(stuck, where, [{"init_timeout": 0.5, "world_size": 2}], time_limit=limit(0.5)) as ranks:
        let_go(ranks)
        (outcome,) = ranks.wait()
    assert sentence(outcome, RendezvousError) == (
        f"file://{where}: lost the store during the roll call (it has not answered within init_timeout 0.5 s); a rank "
        "was killed while it wrote to the file, or the file system hangs: start all ranks again"
    )
