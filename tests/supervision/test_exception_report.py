"""What ranks print at the end, on one terminal: a rank's own failure as a traceback, another one's as a line."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest
import torch.distributed as dist

from lightning_ddp_ext.supervision.exception_report import install_excepthook
from tests.harness.ranks import launch_ranks
from tests.supervision import model
from tests.supervision.model import BoomError, Fault, boom, wait_for_another_ranks_end

BOOM = "tests.supervision.model.BoomError: no such layer"


def fail_otherwise() -> None:
    raise LookupError("no such file")


def fail_otherwise_once_told() -> None:
    """Raise something else as soon as another rank's failure is known."""
    wait_for_another_ranks_end()
    fail_otherwise()


def fit(rank: int, world_size: int, terminal: Path, *faults: Fault) -> None:
    """Train with all ranks' stderr in one file, as on one terminal."""
    logging.disable(logging.WARNING)  # Lightning's greetings
    os.dup2(os.open(terminal, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    model.fit(rank, world_size, f"file://{terminal}.store", *faults)
    for fault in faults:
        fault.strike("after fit", rank)


def lines_of(directory: Path, *faults: Fault, world_size: int = 3) -> list[str]:
    """What ranks with these faults print, without warnings and what torch puts in front of a traceback's lines."""
    launch_ranks(fit, world_size, directory / "terminal", *faults)
    text = re.sub(r"^\[rank\d+\]: ?", "", (directory / "terminal").read_text(), flags=re.MULTILINE)
    return [line for line in text.splitlines() if line.strip() and "deprecated" not in line]


@pytest.mark.parametrize("place", ["setup", "after fit"])
def test_the_same_exception_everywhere_is_printed_once(place: str, tmp_path: Path) -> None:
    """Ranks that fail alike print one traceback between them, outside of the Trainer, too."""
    lines = lines_of(tmp_path, Fault(place))
    remark = "BoomError: no such layer (another rank prints the traceback)"
    assert sum(line.startswith("[rank ") and line.endswith(remark) for line in lines) == 2, lines
    assert sum(line.startswith("Traceback") for line in lines) == lines.count(BOOM) == 1, lines


def test_different_exceptions_are_all_printed(tmp_path: Path) -> None:
    """A rank with a failure of its own prints that, and what a callback raises because of it behind it."""
    faults = [
        Fault("training_step").on(0),
        Fault("on_exception", fail_otherwise).on(0),
        Fault("training_step", fail_otherwise_once_told).on(1),
    ]
    lines = lines_of(tmp_path, *faults, world_size=2)
    assert lines.count(BOOM) == 1
    assert lines.count("LookupError: no such file") == 2
    assert "LookupError: no such file" in lines[lines.index(BOOM) :]


class Hook:
    """A user's hook: counts its calls, and calls the one that it was put in front of, if there is one."""

    def __init__(self, before: Callable[..., object] | None = None) -> None:
        self.before = before
        self.calls = 0

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.calls += 1
        if self.before is not None:
            self.before(kind, error, trace)


def fail_with_hooks(rank: int, world_size: int, directory: Path, groups: list[int], *, chains: bool) -> list[int]:
    """How often hooks of a user's are called, after each of which so many groups are formed, as Trainers do it."""
    hooks = []
    for turn, number in enumerate(groups):
        hooks.append(Hook(sys.excepthook if turn == 0 or chains else None))
        sys.excepthook = hooks[-1]
        for each in range(number):
            if dist.is_initialized():
                dist.destroy_process_group()
            store = dist.FileStore(f"{directory}/store-{turn}-{each}", 1)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            install_excepthook()
    try:
        boom()
    except BoomError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    return [hook.calls for hook in hooks]


@pytest.mark.parametrize(
    ("groups", "chains", "calls"),
    [([0], True, [1]), ([3], True, [1]), ([1, 1], True, [1, 1]), ([1, 1], False, [0, 1])],
)
def test_a_users_hook_is_called_once(groups: list[int], chains: bool, calls: list[int], tmp_path: Path) -> None:
    """However many groups a process has formed since; it calls the one before it, if it wants to."""
    (outcome,) = launch_ranks(fail_with_hooks, 1, tmp_path, groups, chains=chains)
    assert outcome.result == calls, outcome.story()
    assert outcome.output.count(BOOM) == chains
    prefix = "[rank0]: " if groups == [3] else ""  # torch says which rank it is
    assert len(groups) > 1 or outcome.output.splitlines()[-1] == f"{prefix}{BOOM}"
