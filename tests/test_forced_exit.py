"""A countdown forces the exit of a process that needs it, also after one that did not."""

import threading

from lightning_ddp_ext.forced_exit import ForcedExit
from tests.harness.ranks import launch_ranks


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


def test_a_countdown_can_start_again_after_one_that_was_not_needed() -> None:
    """The process then exits with the message and the status of the second one."""
    [outcome] = launch_ranks(exit_after_one_that_is_not_needed, 1)
    assert (outcome.exit_code, outcome.output) == (7, "rank 1 died\n")
