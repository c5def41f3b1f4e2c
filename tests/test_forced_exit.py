"""The countdown of a forced exit, in a process of its own."""

import threading

from lightning_ddp_ext.forced_exit import ForcedExit
from tests.harness.ranks import launch_ranks


def count_down_twice(rank: int, world_size: int) -> None:
    """Start a countdown that ends without an exit, and one whose exit is needed."""
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
    [outcome] = launch_ranks(count_down_twice, 1)
    assert (outcome.exit_code, outcome.output) == (7, "rank 1 died\n")
