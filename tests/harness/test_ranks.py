"""A rank that does not do its work fails the test."""

import os
import sys
from collections.abc import Callable

import pytest

from tests.harness.ranks import run_ranks


def exit_early(rank: int, world_size: int, leave: Callable[[int], None]) -> None:
    leave(0)


@pytest.mark.parametrize("leave", [os._exit, sys.exit])
def test_a_rank_that_exits_before_its_function_returns_is_named(
    leave: Callable[[int], None],
) -> None:
    """``run_ranks`` does not take an exit with status 0 for a result."""
    with pytest.raises(
        AssertionError, match=r"rank 0 \(pid \d+\): exit status 0 before the function returned\n"
    ):
        run_ranks(exit_early, 1, leave)
