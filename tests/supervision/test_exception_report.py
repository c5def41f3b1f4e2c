"""A failed rank prints its traceback, and each of the others one line."""

import logging
import os
import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.harness.ranks import by_hand_env, launch_ranks, run_ranks
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


def lines_printed(directory: Path, *faults: At, world_size: int = 3) -> list[str]:
    """Return the output of ranks with these faults."""
    launch_ranks(fit_and_fail, world_size, directory, *faults)
    return model.lines_of((directory / "terminal").read_text())


@pytest.mark.parametrize("faults", [[At("setup", model.boom)], []], ids=["in fit", "after fit"])
def test_the_same_exception_everywhere_is_printed_once(faults: list[At], tmp_path: Path) -> None:
    """Ranks with the same failure print one traceback together, also outside of the
    Trainer.
    """
    lines = lines_printed(tmp_path, *faults)
    remark = "BoomError: no such layer (another rank prints the traceback)"
    assert sum(line.startswith("[rank ") and line.endswith(remark) for line in lines) == 2, lines
    assert sum(line.startswith("Traceback") for line in lines) == lines.count(BOOM) == 1, lines


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


def test_torchrun_has_the_cause_in_its_table(tmp_path: Path) -> None:
    """The rank that failed, and no other one, is the root cause, though all ended in
    the same second.
    """
    env = {**by_hand_env(3), "TORCHELASTIC_ERROR_FILE": lambda rank: f"{tmp_path}/{rank}.json"}
    outcomes = launch_ranks(fit_and_fail, 3, tmp_path, model.in_step(model.boom, 1), env=env)
    assert [path.name for path in tmp_path.glob("*.json")] == ["1.json"]
    failures = {
        each.rank: ProcessFailure(each.rank, each.pid, 1, f"{tmp_path}/{each.rank}.json")
        for each in outcomes
    }
    table = ChildFailedError("script", failures).format_msg()
    assert re.search(r"Root Cause [^@]*rank +: 1 [^@]*BoomError: no such layer", table), table


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
