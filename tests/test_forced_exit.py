"""A countdown may force the exit of a process, and a save may delay it."""

from __future__ import annotations

import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest

from lightning_ddp_ext.forced_exit import ForcedExit

EXIT = """
import threading
from lightning_ddp_ext.forced_exit import ForcedExit

ForcedExit("countdown").start(0.0, 7, lambda: "rank 1 died")
threading.Event().wait()
"""
EXIT_DURING_SAVE = """
import threading
from lightning_ddp_ext.forced_exit import ForcedExit, delaying_forced_exit

with delaying_forced_exit(0.0):
    ForcedExit("countdown").start(0.0, 7, lambda: "rank 1 died", seconds_after_saves=0.0)
    threading.Event().wait()
"""


@pytest.mark.unit
def test_a_forced_exit_prints_its_message() -> None:
    """The process has the given exit status."""
    script = subprocess.run([sys.executable, "-c", EXIT], stderr=subprocess.PIPE, text=True)
    assert (script.returncode, script.stderr) == (7, "rank 1 died\n")


@pytest.mark.unit
def test_a_countdown_whose_exit_is_not_needed_can_be_started_again() -> None:
    """The process continues, and a second countdown also asks whether to exit."""
    is_needed = Mock(return_value=False)
    countdown = ForcedExit("unneeded")
    for _ in range(2):
        countdown.start(0.0, 1, str, is_needed=is_needed)
        for thread in threading.enumerate():
            if thread.name == "unneeded":
                thread.join()
    assert is_needed.call_count == 2


@pytest.mark.unit
def test_a_delay_of_no_seconds_counts_as_running() -> None:
    """A save without a deadline delays nothing, but the message names it."""
    script = subprocess.run(
        [sys.executable, "-c", EXIT_DURING_SAVE], stderr=subprocess.PIPE, text=True
    )
    expected = "rank 1 died. This rank will finish writing its checkpoint before it exits\n"
    assert (script.returncode, script.stderr) == (7, f"{expected}rank 1 died\n")
