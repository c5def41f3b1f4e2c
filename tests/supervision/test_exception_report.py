"""A failed rank prints its traceback, and each of the others one line."""

import logging
import os
import sys
from pathlib import Path

import torch.distributed as dist

from tests.harness.ranks import launch_ranks, run_ranks
from tests.harness.training import At
from tests.supervision import model

BOOM = "tests.supervision.model.BoomError: no such layer"


def fail_otherwise(*_: object) -> None:
    raise LookupError("no such file")


def fail_otherwise_once_informed(*_: object) -> None:
    """Raise something else as soon as another rank's failure is known."""
    model.wait_for_another_ranks_end()
    fail_otherwise()


def fit_and_fail(rank: int, world_size: int, directory: Path, *faults: At) -> None:
    """Train with these faults; ranks that survive fail afterwards. All ranks' stderr is in
    one file, as on one terminal.
    """
    logging.disable(logging.WARNING)  # Lightning's greetings
    terminal = os.open(directory / "terminal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(terminal, sys.stderr.fileno())
    model.fit(rank, world_size, directory, *faults)
    model.boom()


def lines_printed(directory: Path, *faults: At, world_size: int) -> list[str]:
    """Return the output of ranks with these faults."""
    launch_ranks(fit_and_fail, world_size, directory, *faults)
    return model.lines_of((directory / "terminal").read_text())


def test_different_exceptions_are_all_printed(tmp_path: Path) -> None:
    """A rank prints its own failure, followed by errors that a callback raises because
    of it.
    """
    faults = [
        model.in_step(model.boom, 0),
        At("on_exception", fail_otherwise, ranks=[0]),
        model.in_step(fail_otherwise_once_informed, 1),
    ]
    lines = lines_printed(tmp_path, *faults, world_size=2)
    assert lines.count(BOOM) == 1
    assert lines.count("LookupError: no such file") == 2
    assert "LookupError: no such file" in lines[lines.index(BOOM) :]


def hook_after_reconnecting(rank: int, world_size: int, directory: Path) -> bool:
    """Set a hook between two runs for which the ranks connect; whether it is still set."""
    model.fit(rank, world_size, directory)

    def hook(*_: object) -> None: ...

    sys.excepthook = hook
    dist.destroy_process_group()
    model.fit(rank, world_size, directory)
    return sys.excepthook is hook


def test_a_users_hook_stays_in_front(tmp_path: Path) -> None:
    """Neither torch's hook nor ours moves in front of it when a group is formed again."""
    assert run_ranks(hook_after_reconnecting, 2, tmp_path) == [True, True]
