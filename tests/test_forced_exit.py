"""A countdown may force the exit of a process, and a save may delay it."""

import threading
from collections.abc import Callable

import pytest

from lightning_ddp_ext.forced_exit import ForcedExit, delaying_forced_exit
from tests.harness.ranks import launch_ranks


def exit_when_due(rank: int, world_size: int) -> None:
    ForcedExit("countdown").start(0.0, 7, lambda: "rank 1 died")
    threading.Event().wait()


def exit_after_one_that_is_not_needed(rank: int, world_size: int) -> None:
    countdown = ForcedExit("countdown")
    was_asked = threading.Event()
    countdown.start(0.0, 1, str, is_needed=was_asked.set)
    was_asked.wait()
    for thread in threading.enumerate():
        if thread.name == "countdown":
            thread.join()
    countdown.start(0.0, 7, lambda: "rank 1 died")
    threading.Event().wait()


def exit_in_a_save_without_deadline(rank: int, world_size: int) -> None:
    with delaying_forced_exit(0.0):
        ForcedExit("save").start(0.0, 7, lambda: "rank 1 died", seconds_after_saves=0.0)
        threading.Event().wait()


ANNOUNCED = "rank 1 died. This rank will finish writing its checkpoint before it exits\n"


@pytest.mark.parametrize(
    ("function", "announced"),
    [
        pytest.param(exit_when_due, "", id="due"),
        pytest.param(exit_after_one_that_is_not_needed, "", id="again"),
        # It delays nothing, but counts as running.
        pytest.param(exit_in_a_save_without_deadline, ANNOUNCED, id="in a save"),
    ],
)
def test_a_forced_exit_prints_its_message(
    function: Callable[[int, int], None], announced: str
) -> None:
    """The process has the given exit status."""
    [outcome] = launch_ranks(function, 1)
    assert (outcome.exit_code, outcome.output) == (7, f"{announced}rank 1 died\n")
