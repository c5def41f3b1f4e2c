"""Actions run once at the exit of a process, and a countdown may force its exit."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from lightning_ddp_ext.forced_exit import ForcedExit, delaying_forced_end, wait_for_delays


@pytest.mark.unit
@pytest.mark.parametrize("start", ["register()", "Process(target=register).start()"])
def test_an_exit_action_runs_once(start: str) -> None:
    """It runs in an ordinary process and in a child of multiprocessing."""
    lines = (
        "from multiprocessing import get_context",
        "from lightning_ddp_ext.at_exit import at_exit",
        "Process = get_context('fork').Process",
        "register = lambda: at_exit(lambda: print('ran', flush=True))",
        start,
    )
    script = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE, text=True, check=True
    )
    assert script.stdout == "ran\n"


@pytest.mark.unit
def test_a_void_countdown_can_be_started_again() -> None:
    """The process continues, and a second countdown is also asked whether it is void."""
    due: list[int] = []
    countdown = ForcedExit("void-countdown")
    for number in (1, 2):
        countdown.start(0.0, 1, str, is_void=lambda number=number: due.append(number) is None)
        for thread in threading.enumerate():
            if thread.name == "void-countdown":
                thread.join()
    assert due == [1, 2]


@pytest.mark.unit
def test_a_delay_of_no_seconds_counts_as_running() -> None:
    """A save without a deadline delays nothing, but it was running."""
    assert not wait_for_delays()
    with delaying_forced_end(0.0):
        assert wait_for_delays()
