"""A countdown may force the exit of a process, and a save may delay it."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from lightning_ddp_ext.forced_exit import ForcedExit, delaying_forced_exit, wait_for_delays

EXIT = """
import sys, threading
from lightning_ddp_ext.forced_exit import ForcedExit

status, message = int(sys.argv[1]), sys.argv[2]
ForcedExit("countdown").start(0.0, status, lambda: message)
threading.Event().wait()
"""


@pytest.mark.unit
@pytest.mark.parametrize(
    ("message", "printed"), [("rank 1 died", "rank 1 died\n"), ("", "")], ids=["message", "none"]
)
def test_a_forced_exit_prints_its_message(message: str, printed: str) -> None:
    """The process has the given exit status; without a message it prints no line."""
    status = 7
    script = subprocess.run(
        [sys.executable, "-c", EXIT, str(status), message], stderr=subprocess.PIPE, text=True
    )
    assert (script.returncode, script.stderr) == (status, printed)


@pytest.mark.unit
def test_a_countdown_whose_exit_is_not_needed_can_be_started_again() -> None:
    """The process continues, and a second countdown also asks whether to exit."""
    answers = [False, False]
    countdown = ForcedExit("unneeded")
    while answers:
        countdown.start(0.0, 1, str, is_needed=answers.pop)
        for thread in threading.enumerate():
            if thread.name == "unneeded":
                thread.join()


@pytest.mark.unit
def test_a_delay_of_no_seconds_counts_as_running() -> None:
    """A save without a deadline delays nothing, but it was running."""
    assert not wait_for_delays()
    with delaying_forced_exit(0.0):
        assert wait_for_delays()
