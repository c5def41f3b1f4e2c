"""A rank whose process is gone: the others end, and say which one it was. Ranks that were started by hand."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_ddp_ext.errors import RankDiedError
from lightning_ddp_ext.rendezvous.process_context import current
from tests.harness.outcomes import Outcome
from tests.harness.ranks import RankProcesses, announce, hold
from tests.supervision.model import HERE, error_of, fit, who

UNEXPECTEDLY = "its process ended unexpectedly"


def expect_told(told: Outcome, culprit: int, pid: int, host: str = HERE, why: str = UNEXPECTEDLY) -> None:
    """The rank has raised what names the dead one."""
    error = error_of(told, RankDiedError, culprit, pid, host)
    assert str(error).startswith(f"{who(culprit, pid, host)} died: {why}; every rank stops.")


def fit_work_and_fit(rank: int, world_size: int, url: str) -> None:
    fit(rank, world_size, url, grace={"died": 0.3})
    hold("after fit")
    mine = current()
    assert mine is not None
    assert mine.peers.wait(20.0) is not None
    while timers := [thread for thread in threading.enumerate() if thread.name == "ddpx-exit"]:
        with suppress(RuntimeError):  # not started yet
            timers[0].join()  # it ends a process that is at work
    announce("still there")
    fit(rank, world_size, url)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_death_after_fit_is_raised_by_the_next_fit(culprit: int, tmp_path: Path) -> None:
    """A rank in the user's own code goes on; one that needs the dead rank again is told at once."""
    with RankProcesses(fit_work_and_fit, 2, f"file://{tmp_path}/store") as ranks:
        for rank in range(2):
            ranks.wait_for("after fit", rank)
        ranks.kill(culprit)
        ranks.release(1 - culprit)
        ranks.wait_for("still there", 1 - culprit)
        outcomes = ranks.wait()
    expect_told(outcomes[1 - culprit], culprit, outcomes[culprit].pid)
