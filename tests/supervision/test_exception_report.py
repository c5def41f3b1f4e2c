"""What ranks print at the end, on one terminal: a rank's own failure as a traceback, another one's as a line."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest
import torch.distributed as dist

from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.supervision.exception_report import install_excepthook
from tests.harness.outcomes import Outcome
from tests.harness.ranks import hold, launch_ranks, run_ranks
from tests.supervision.model import BoomError, Fault, Model, boom, by_hand, die, make_trainer

HERE = socket.gethostname()


# --- on real Trainers, by hand --------------------------------------------------------------------


@pytest.fixture
def terminal(tmp_path: Path) -> Path:
    """A file for what all ranks write to stderr, as on one terminal."""
    return tmp_path / "terminal"


def fit(rank: int, world_size: int, terminal: Path, *faults: Fault, catches: bool = False) -> None:
    logging.disable(logging.WARNING)  # Lightning's greetings
    os.dup2(os.open(terminal, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    trainer = make_trainer(world_size, strategy=by_hand(rank, world_size, f"file://{terminal}.store"))
    try:
        trainer.fit(Model(faults))
    except BoomError:
        if not catches:
            raise
        hold("caught")
    for fault in faults:
        fault.strike("after fit", rank)


def read(terminal: Path) -> list[str]:
    """The lines, without warnings and without what torch puts in front of those of a traceback."""
    text = re.sub(r"^\[rank\d+\]: ?", "", terminal.read_text(), flags=re.MULTILINE)
    return [line for line in text.splitlines() if line.strip() and "deprecated" not in line]


def told(rank: int, culprit: Outcome, reason: str) -> str:
    return (
        f"[rank {rank}] RankFailedError: rank {culprit.rank} (host {HERE}, pid {culprit.pid}) failed, "
        f"so this rank stops: {reason}"
    )


def expect_one_traceback(lines: list[str], last: str) -> None:
    """Among the lines is one traceback, which ends with ``last``."""
    assert sum(line.startswith("Traceback") for line in lines) == 1, "\n".join(lines)
    assert lines.count(last) == 1, "\n".join(lines)


BOOM = "tests.supervision.model.BoomError: no such layer"


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_the_rank_that_failed_prints_its_traceback(culprit: int, terminal: Path) -> None:
    """The others print a line each."""
    outcomes = launch_ranks(fit, 3, terminal, Fault("training_step").on(culprit))
    lines = read(terminal)
    assert {told(rank, outcomes[culprit], "BoomError: no such layer") for rank in {0, 1, 2} - {culprit}} <= set(lines)
    expect_one_traceback(lines, BOOM)


@pytest.mark.parametrize("place", ["setup", "after fit"])
def test_the_same_exception_everywhere_is_printed_once(place: str, terminal: Path) -> None:
    """Ranks that fail alike print one traceback between them."""
    launch_ranks(fit, 3, terminal, Fault(place))
    lines = read(terminal)
    remark = "BoomError: no such layer (another rank prints the traceback)"
    assert sum(line.startswith("[rank ") and line.endswith(remark) for line in lines) == 2, "\n".join(lines)
    expect_one_traceback(lines, BOOM)


def fail_otherwise_once_told() -> None:
    """Raise something else as soon as another rank's failure is known."""
    context = current()
    assert context is not None
    assert context.peers.wait(20.0) is not None
    raise LookupError("no such file")


def test_different_exceptions_are_both_printed(terminal: Path) -> None:
    """A rank with a failure of its own prints that, too."""
    launch_ranks(fit, 2, terminal, Fault("training_step").on(0), Fault("training_step", fail_otherwise_once_told).on(1))
    lines = read(terminal)
    assert {"LookupError: no such file", BOOM} <= set(lines)


def fail_in_callback() -> None:
    raise LookupError("no such file")


@pytest.mark.parametrize("culprit", [0, 1])
def test_what_a_callback_makes_of_the_failure_is_printed_with_it(culprit: int, terminal: Path) -> None:
    """An exception in ``on_exception`` on the rank that failed stands behind the first one."""
    faults = Fault("training_step").on(culprit), Fault("on_exception", fail_in_callback).on(culprit)
    outcomes = launch_ranks(fit, 2, terminal, *faults)
    lines = read(terminal)
    assert told(1 - culprit, outcomes[culprit], "BoomError: no such layer") in lines
    assert lines.index("LookupError: no such file") > lines.index(BOOM)


def test_of_a_death_every_rank_prints_a_line(terminal: Path) -> None:
    """There is no traceback of a process that was killed, and how far the others were explains nothing."""
    outcomes = launch_ranks(fit, 3, terminal, Fault("training_step", die).on(1))
    who = f"rank 1 (host {HERE}, pid {outcomes[1].pid}) died: its process ended unexpectedly; every rank stops."
    assert sorted(line.partition(" Look")[0] for line in read(terminal)) == [
        f"[rank {rank}] RankDiedError: {who}" for rank in (0, 2)
    ]


# --- other people's hooks -------------------------------------------------------------------------

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def raise_and_catch() -> BoomError:
    try:
        boom()
    except BoomError as error:
        return error
    raise AssertionError


def form_group(directory: Path, number: int) -> None:
    """As a Trainer does: a group, in front of whose hook ours is put."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.FileStore(f"{directory}/store-{number}", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    install_excepthook()


class Recorder:
    """A user's hook: notes what it is called with, and calls the one that it was put in front of, if there is one."""

    def __init__(self, before: Hook | None = None) -> None:
        self.before = before
        self.seen: list[BaseException] = []

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.seen.append(error)
        if self.before is not None:
            self.before(kind, error, trace)


def count_calls(rank: int, world_size: int, directory: Path, *, new_group: bool, chains: bool) -> list[int]:
    first = Recorder(sys.__excepthook__)
    sys.excepthook = first
    form_group(directory, 1)
    ours = sys.excepthook
    second = Recorder(ours if chains else None)
    sys.excepthook = second
    if new_group:
        form_group(directory, 2)
    else:
        install_excepthook()
    assert sys.excepthook is ours
    error = raise_and_catch()
    sys.excepthook(type(error), error, error.__traceback__)
    return [hook.seen.count(error) for hook in (first, second)]


@pytest.mark.parametrize("new_group", [False, True], ids=["same group", "new group"])
def test_a_hook_that_comes_between_is_called(new_group: bool, tmp_path: Path) -> None:
    """A hook that a user installs between two Trainers is called, and calls the ones before it as it always would."""
    outcomes = launch_ranks(count_calls, 1, tmp_path, new_group=new_group, chains=True)
    assert outcomes[0].result == [1, 1], outcomes[0].story()
    assert outcomes[0].output.count("BoomError: no such layer") == 1
    assert run_ranks(count_calls, 1, tmp_path, new_group=new_group, chains=False) == [[0, 1]]


def print_through_hooks(rank: int, world_size: int, directory: Path, groups: int) -> list[object]:
    user = Recorder(sys.__excepthook__)
    sys.excepthook = user
    for number in range(groups):
        form_group(directory, number)
        install_excepthook()
    error = raise_and_catch()
    sys.excepthook(type(error), error, error.__traceback__)
    return user.seen


@pytest.mark.parametrize("groups", [0, 1, 3])
def test_a_users_hook_is_called_once(groups: int, tmp_path: Path) -> None:
    """However many groups a process has formed, a user's hook prints once, and torch says once which rank it is."""
    (outcome,) = launch_ranks(print_through_hooks, 1, tmp_path, groups)
    assert [type(error).__name__ for error in outcome.result] == ["BoomError"], outcome.story()
    prefix = "[rank0]: " if groups else ""
    lines = outcome.output.splitlines()
    assert lines[0] == f"{prefix}Traceback (most recent call last):"
    assert lines[-1] == f"{prefix}tests.supervision.model.BoomError: no such layer"
