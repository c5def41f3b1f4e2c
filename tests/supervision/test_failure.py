"""A rank's own errors are told apart from errors that only echo the exit of another rank."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable

import pytest
import torch

from lightning_ddp_ext.errors import RankDiedError
from lightning_ddp_ext.ranks import reason_of
from lightning_ddp_ext.supervision.failure import echoes_another_rank
from tests.supervision.model import throw


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
