"""A process that watches another one ends with it."""

from __future__ import annotations

import os
import subprocess
import threading

import pytest

from lightning_ddp_ext.supervision import parent_watch
from lightning_ddp_ext.supervision.parent_watch import LAUNCHER_PID, watch_own_launcher
from tests.harness.ranks import RankProcesses, hold, launch_ranks, run_ranks


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ddpx-launcher"]


def wait_for_ever() -> None:
    threading.Event().wait()


def an_ended_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def watch(rank: int, world_size: int, *, has_pidfd: bool) -> None:
    if not has_pidfd:
        del os.pidfd_open
    launcher = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # ends with its input
    parent_watch.watch_launcher(launcher.pid)
    parent_watch.watch_launcher(launcher.pid)
    hold("watching", (launcher.pid, len(watchers())))
    launcher.communicate()
    wait_for_ever()


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_a_process_ends_with_the_one_it_watches(has_pidfd: bool) -> None:
    """It says which one is gone, and fails; watching twice is watching once."""
    with RankProcesses(watch, 1, has_pidfd=has_pidfd) as ranks:
        pid, threads = ranks.wait_for("watching", 0)
        ranks.release(0)
        (outcome,) = ranks.wait()
    assert threads == 1
    assert outcome.exit_code == 1
    assert outcome.output == f"the process that launched this one (pid {pid}) is gone, so this one ends, too\n"


def watch_too_late(rank: int, world_size: int, *, has_pidfd: bool) -> None:
    if not has_pidfd:
        del os.pidfd_open
    parent_watch.watch_launcher(an_ended_process())
    wait_for_ever()


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_a_launcher_that_is_gone_already_counts(has_pidfd: bool) -> None:
    """Whoever is orphaned before it begins to watch ends at once."""
    (outcome,) = launch_ranks(watch_too_late, 1, has_pidfd=has_pidfd)
    assert outcome.exit_code == 1
    assert "is gone, so this one ends, too" in outcome.output


def test_python_is_told_from_other_programs() -> None:
    """A process that cannot be looked at is given the benefit of the doubt."""
    other = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        assert parent_watch._is_python(os.getpid())
        assert not parent_watch._is_python(other.pid)
    finally:
        other.communicate()
    assert parent_watch._is_python(other.pid)


def begin_as_started_rank(rank: int, world_size: int) -> tuple[str | None, int]:
    os.environ[LAUNCHER_PID] = str(os.getppid())
    watch_own_launcher()
    return os.environ.get(LAUNCHER_PID), len(watchers())


def test_the_launchers_word_is_for_the_started_process_alone() -> None:
    """What a rank starts itself does not find the variable, and so may outlive the launcher."""
    assert run_ranks(begin_as_started_rank, 1) == [(None, 1)]
