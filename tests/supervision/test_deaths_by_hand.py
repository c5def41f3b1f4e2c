"""A rank whose process is gone: the others end, and say which one it was. Ranks that were started by hand."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_ddp_ext.errors import RankDiedError
from lightning_ddp_ext.rendezvous.process_context import current
from tests.harness.network import Network
from tests.harness.outcomes import Outcome
from tests.harness.ranks import RankProcesses, free_port, hold, launch_ranks
from tests.supervision.model import Fault, Model, announce_third_step, by_hand, make_trainer, vanish, wait_for_ever

UNEXPECTEDLY = "its process ended unexpectedly"


def fit(
    rank: int,
    world_size: int,
    url: str,
    *faults: Fault,
    endless: bool = False,
    num_workers: int = 0,
    **options: Any,
) -> None:
    trainer = make_trainer(
        world_size,
        strategy=by_hand(rank, world_size, url, **options),
        max_epochs=-1 if endless else 1,
        limit_val_batches=0,
    )
    trainer.fit(Model(faults, num_workers=num_workers))


def expect_told(told: Outcome, culprit: int, pid: int, host: str = socket.gethostname(), reason: str = "") -> None:
    """The rank has raised what names the dead one."""
    assert told.error is not None, told.story()
    error = told.error.exception
    assert type(error) is RankDiedError, told.story()
    assert (error.rank, error.host, error.pid) == (culprit, host, pid)
    who = f"rank {culprit} (host {host}, pid {pid})"
    assert str(error).startswith(f"{who} died: {reason or UNEXPECTEDLY}; every rank stops.")
    assert told.exit_code == 1


@pytest.fixture
def url(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    method = getattr(request, "param", "file")
    return f"file://{tmp_path}/store" if method == "file" else f"tcp://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("url", ["file", "tcp"], indirect=True)
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_kill_in_training_is_named_by_the_others(culprit: int, url: str) -> None:
    """Whichever rank it is, and whether or not it hosts the store."""
    with RankProcesses(fit, 3, url, Fault("third_step", announce_third_step), endless=True) as ranks:
        for rank in range(3):
            ranks.wait_for("in step 3", rank)
        ranks.kill(culprit)
        outcomes = ranks.wait()
    for rank in {0, 1, 2} - {culprit}:
        expect_told(outcomes[rank], culprit, outcomes[culprit].pid)


def test_workers_of_a_killed_rank_hide_nothing(url: str) -> None:
    """Processes that load data have copies of a rank's connections; they neither keep its death secret nor survive."""
    step = Fault("third_step", announce_third_step)
    with RankProcesses(fit, 2, url, step, endless=True, num_workers=2) as ranks:
        workers = []
        for rank in range(2):
            ranks.wait_for("in step 3", rank)
            workers += psutil.Process(ranks.pids[rank]).children()
        ranks.kill(1)
        told, killed = ranks.wait()
    expect_told(told, 1, killed.pid)
    assert len(workers) == 4
    assert psutil.wait_procs(workers, timeout=20.0)[1] == []


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("place", ["setup", "training_step", "on_fit_end"])
def test_leaving_without_notice_is_a_death(place: str, culprit: int, url: str) -> None:
    """``os._exit`` ends a rank for the others as a kill does, whatever its status says."""
    outcomes = launch_ranks(fit, 2, url, Fault(place, vanish).on(culprit), Fault("on_fit_end", wait_for_news))
    assert outcomes[culprit].exit_code == 0
    expect_told(outcomes[1 - culprit], culprit, outcomes[culprit].pid)


def wait_for_news() -> None:
    mine = current()
    assert mine is not None
    news = mine.peers.wait(20.0)
    assert news is not None
    raise news.to_error()


def fit_with_little_patience(rank: int, world_size: int, url: str, *faults: Fault) -> None:
    fit(rank, world_size, url, *faults, grace={"died": 0.3})


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_nothing_can_wake_is_ended(culprit: int, url: str) -> None:
    """Where the main thread waits in user code for ever, the process ends all the same, with the verdict printed."""
    stuck = 1 - culprit
    with RankProcesses(
        fit_with_little_patience,
        2,
        url,
        Fault("training_step", wait_for_ever).on(stuck),
        Fault("training_step", announce_and_stay).on(culprit),
    ) as ranks:
        for rank in range(2):
            ranks.wait_for("in step", rank)
        ranks.kill(culprit)
        outcomes = ranks.wait()
    who = f"rank {culprit} (host {socket.gethostname()}, pid {outcomes[culprit].pid})"
    assert f"[rank {stuck}] RankDiedError: {who} died: {UNEXPECTEDLY}; every rank stops." in outcomes[stuck].output
    assert outcomes[stuck].exit_code == 1


def announce_and_stay() -> None:
    hold("in step")


# --- a death outside of training ------------------------------------------------------------------


def work_on_after_fit(rank: int, world_size: int, url: str, *, again: bool) -> str:
    fit(rank, world_size, url, grace={"died": 0.3})
    hold("after fit")
    mine = current()
    assert mine is not None
    assert mine.peers.wait(20.0) is not None
    while timers := [thread for thread in threading.enumerate() if thread.name == "ddpx-exit"]:
        with suppress(RuntimeError):  # not started yet
            timers[0].join()  # it ends a process that is at work
    if again:
        fit(rank, world_size, url)
    return "done"


def test_a_death_after_fit_ends_nobody(url: str) -> None:
    """A rank in the user's own code needs no other rank, and finishes what it does."""
    with RankProcesses(work_on_after_fit, 2, url, again=False) as ranks:
        for rank in range(2):
            ranks.wait_for("after fit", rank)
        ranks.kill(1)
        ranks.release(0)
        (outcome,) = ranks.wait(0)
    assert (outcome.result, outcome.exit_code) == ("done", 0), outcome.story()


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_fit_after_a_death_names_the_dead_rank(culprit: int, url: str) -> None:
    """Who needs a dead rank again is told so at once, instead of after ``init_timeout``."""
    with RankProcesses(work_on_after_fit, 3, url, again=True) as ranks:
        for rank in range(3):
            ranks.wait_for("after fit", rank)
        ranks.kill(culprit)
        others = {0, 1, 2} - {culprit}
        for rank in others:
            ranks.release(rank)
        outcomes = ranks.wait()
    for rank in others:
        error = outcomes[rank].error
        assert error is not None, outcomes[rank].story()
        assert error.type_name == "RankDiedError", outcomes[rank].story()
        who = f"rank {culprit} (host {socket.gethostname()}, pid {outcomes[culprit].pid})"
        assert error.message.startswith(f"{who} died: {UNEXPECTEDLY}; every rank stops.")


# --- two machines ---------------------------------------------------------------------------------


@pytest.mark.netns
@pytest.mark.parametrize("method", ["tcp", "file"])
def test_a_cut_link_is_a_death_on_both_sides(method: str, two_hosts: Network, shared_dir: Path) -> None:
    """When two machines lose sight of each other, the ranks on each name one of those on the other."""
    host_a, host_b = two_hosts
    url = f"tcp://{host_a.address}:29517" if method == "tcp" else f"file://{shared_dir}/store"
    places = [host_a, host_a, host_b, host_b]
    step = Fault("third_step", announce_third_step)
    with RankProcesses(fit_on_two_nodes, 4, url, step, namespaces=places, time_limit=45.0) as ranks:
        for rank in range(4):
            ranks.wait_for("in step 3", rank)
        two_hosts.cut()
        outcomes = ranks.wait()
    silent = "no sign of life from its host for 4 s"
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None, outcome.story()
        culprit = outcome.error.exception.rank  # type: ignore[union-attr]
        assert culprit in ((2, 3) if rank in (0, 1) else (0,)), outcome.story()
        host = "host-b" if rank in (0, 1) else "host-a"
        expect_told(outcome, culprit, outcomes[culprit].pid, host, silent)


def fit_on_two_nodes(rank: int, world_size: int, url: str, *faults: Fault) -> None:
    strategy = by_hand(rank, world_size, url, heartbeat_timeout=4)
    trainer = make_trainer(2, strategy=strategy, num_nodes=2, max_epochs=-1, limit_val_batches=0)
    trainer.fit(Model(faults))
