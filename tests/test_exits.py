"""What a process does at its exit, and a countdown that may force it to exit."""

import subprocess
import sys
import threading

import pytest

from lightning_ddp_ext.forced_exit import ForcedExit, delaying_forced_exit, wait_for_delays


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


def test_a_countdown_whose_exit_is_not_needed_can_be_started_again() -> None:
    """The process continues, and a second countdown also asks whether to exit."""
    answers = [False, False]
    countdown = ForcedExit("unneeded")
    while answers:
        countdown.start(0.0, 1, str, is_needed=answers.pop)
        for thread in threading.enumerate():
            if thread.name == "unneeded":
                thread.join()


def test_a_delay_of_no_seconds_counts_as_running() -> None:
    """A save without a deadline delays nothing, but it was running."""
    assert not wait_for_delays()
    with delaying_forced_exit(0.0):
        assert wait_for_delays()
