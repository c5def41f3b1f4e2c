"""A process that watches the one that launched it ends with it."""

from __future__ import annotations

import os
import subprocess
import threading

import pytest

from lightning_ddp_ext.supervision.parent_watch import LAUNCHER_PID, watch_launcher, watch_own_launcher
from tests.harness.ranks import RankProcesses, hold

LINE = "the process that launched this one (pid {}) is gone, so this one ends, too\n"


def forbidden(pid: int) -> int:
    raise PermissionError(1, "Operation not permitted")


def watch(rank: int, world_size: int, *, is_late: bool) -> None:
    os.pidfd_open = forbidden  # as in some sandboxes
    launcher = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # ends with its input
    if is_late:
        launcher.communicate()
    hold("launched", launcher.pid)
    os.environ[LAUNCHER_PID] = str(launcher.pid)
    watch_own_launcher()
    assert LAUNCHER_PID not in os.environ  # what this process starts may outlive the launcher
    watch_launcher(launcher.pid)
    launcher.communicate()
    threading.Event().wait()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_process_ends_with_the_one_it_watches(is_late: bool) -> None:
    """It says once which one is gone, and fails; also where that is gone before it begins to watch."""
    with RankProcesses(watch, 1, is_late=is_late) as ranks:
        pid = ranks.wait_for("launched", 0)
        ranks.release(0)
        (outcome,) = ranks.wait()
    assert (outcome.exit_code, outcome.output) == (1, LINE.format(pid)), outcome.story()
