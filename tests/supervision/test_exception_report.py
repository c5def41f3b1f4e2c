"""A failed rank prints a traceback, and the others one line: errors that only echo another rank's exit are known."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lightning_ddp_ext.errors import RankDiedError
from lightning_ddp_ext.ranks import reason_of
from lightning_ddp_ext.supervision.exception_report import install_excepthook
from lightning_ddp_ext.supervision.failure import echoes_another_rank
from tests.harness.ranks import launch_ranks
from tests.supervision import model
from tests.supervision.model import BoomError, Fault, boom, in_step, throw, wait_for_another_ranks_end
from tests.supervision.test_launchers import lines_of

BOOM = "tests.supervision.model.BoomError: no such layer"


def fail_otherwise() -> None:
    raise LookupError("no such file")


def fail_otherwise_once_informed() -> None:
    """Raise something else as soon as another rank's failure is known."""
    wait_for_another_ranks_end()
    fail_otherwise()


def fit(rank: int, world_size: int, terminal: Path, *faults: Fault) -> None:
    """Train with all ranks' stderr in one file, as on one terminal; without faults, fail after it."""
    logging.disable(logging.WARNING)  # Lightning's greetings
    os.dup2(os.open(terminal, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    model.fit(rank, world_size, f"file://{terminal}.store", *faults)
    boom()


def printed(directory: Path, *faults: Fault, world_size: int = 3) -> list[str]:
    """Return the output of ranks with these faults."""
    launch_ranks(fit, world_size, directory / "terminal", *faults)
    return lines_of((directory / "terminal").read_text())


@pytest.mark.parametrize("faults", [[Fault("setup", boom)], []], ids=["in fit", "after fit"])
def test_the_same_exception_everywhere_is_printed_once(faults: list[Fault], tmp_path: Path) -> None:
    """Ranks with the same failure print one traceback together, also outside of the Trainer."""
    lines = printed(tmp_path, *faults)
    remark = "BoomError: no such layer (another rank prints the traceback)"
    assert sum(line.startswith("[rank ") and line.endswith(remark) for line in lines) == 2, lines
    assert sum(line.startswith("Traceback") for line in lines) == lines.count(BOOM) == 1, lines


def test_different_exceptions_are_all_printed(tmp_path: Path) -> None:
    """A rank prints its own failure, followed by errors that a callback raises because of it."""
    faults = [in_step(boom, 0), Fault("on_exception", fail_otherwise, 0), in_step(fail_otherwise_once_informed, 1)]
    lines = printed(tmp_path, *faults, world_size=2)
    assert lines.count(BOOM) == 1
    assert lines.count("LookupError: no such file") == 2
    assert "LookupError: no such file" in lines[lines.index(BOOM) :]


def test_torchrun_has_the_cause_in_its_table(tmp_path: Path) -> None:
    """The rank that failed, and no other one, is the root cause, though all ended in the same second."""
    variables = {"TORCHELASTIC_ERROR_FILE": lambda rank: f"{tmp_path}/{rank}.json"}
    outcomes = launch_ranks(fit, 3, tmp_path / "terminal", in_step(boom, 1), env=variables)
    assert os.listdir(tmp_path).count("1.json") == sum(name.endswith(".json") for name in os.listdir(tmp_path)) == 1
    ended = {each.rank: ProcessFailure(each.rank, each.pid, 1, f"{tmp_path}/{each.rank}.json") for each in outcomes}
    assert re.search(
        r"Root Cause [^@]*rank +: 1 [^@]*BoomError: no such layer", ChildFailedError("script", ended).format_msg()
    )


def fail_with_a_hook(rank: int, world_size: int, directory: Path, chains: bool) -> int:
    """Count the calls of a user's hook after groups were formed again, as Trainers form them."""
    calls = []
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        calls.append(kind)
        if chains:
            before(kind, error, trace)

    sys.excepthook = hook
    for number in range(3):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/{number}", 1), rank=0, world_size=1)
        install_excepthook()
    try:
        boom()
    except BoomError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    return len(calls)


@pytest.mark.parametrize("chains", [True, False])
def test_a_users_hook_is_called_once(chains: bool, tmp_path: Path) -> None:
    """The number of groups does not matter; the hook calls the one before it, and torch's hook at most once."""
    (outcome,) = launch_ranks(fail_with_a_hook, 1, tmp_path, chains)
    assert outcome.result == 1, outcome.story()
    assert [line for line in outcome.output.splitlines() if BOOM in line] == [f"[rank0]: {BOOM}"] * chains


def finding(work: Callable[[], object]) -> tuple[str, bool]:
    """Return type and text of the exception, and whether it counts as an echo of another rank's exit."""
    try:
        work()
    except Exception as error:
        return reason_of(error), echoes_another_rank(error)
    raise AssertionError("this was to fail")


class Fatal(torch.utils.data.Dataset[int]):
    """Kills the worker that reads it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def lose_a_worker() -> None:
    gc.disable()  # Hypothesis has a callback in collections, which would swallow the error of torch's signal handler
    try:
        list(torch.utils.data.DataLoader(Fatal(), num_workers=1))
    finally:
        gc.enable()


OWN: dict[str, Callable[[], object]] = {
    "a lost worker": lose_a_worker,
    "other weights": lambda: torch.nn.Linear(2, 2).load_state_dict({"wight": torch.ones(2, 2)}),
    "other shapes": lambda: torch.ones(2, 3) @ torch.ones(2, 3),
    "a user's connection": lambda: throw(ConnectionRefusedError(111, "Connection refused by peer")),
    "a store": lambda: throw(RuntimeError("cannot store the index: its store is read-only")),
    "a value": lambda: throw(ValueError("cannot store sockets of gloo's")),
    "what names a rank": lambda: throw(RankDiedError("gloo: rank 1 died", rank=1, host="here", pid=4242)),
}


@pytest.mark.parametrize("name", OWN)
def test_other_errors_are_the_ranks_own(name: str) -> None:
    """Errors of models, data and a user's connections are not echoes, nor is one that already names the culprit."""
    reason, is_echo = finding(OWN[name])
    assert not is_echo, reason


@pytest.mark.parametrize("hidden", [False, True])
def test_an_error_because_of_an_echo_is_an_echo(hidden: bool) -> None:
    """An error that user code raises because of a broken collective also counts as an echo."""
    error = KeyError("logger")
    error.__context__ = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:34712.")
    error.__suppress_context__ = hidden
    assert echoes_another_rank(error)
    error.__context__ = LookupError("no")
    assert not echoes_another_rank(error)
