"""Train a model that fails at a chosen moment, on chosen ranks, in a chosen way."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

import lightning_ddp_ext as ddpx
from lightning_ddp_ext.errors import RankFailedError
from lightning_ddp_ext.rendezvous.process_context import current
from tests.harness import training
from tests.harness.outcomes import Outcome
from tests.harness.ranks import announce
from tests.harness.training import At, Net

HERE = socket.gethostname()


class BoomError(ValueError):
    """The error of these tests; no other code raises it."""


def throw(error: Exception) -> None:
    raise error


def boom() -> None:
    raise BoomError("no such layer")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


def wait_for_ever() -> None:
    """Block in a way that no broken connection unblocks."""
    threading.Event().wait()


def wait_for_another_ranks_end() -> None:
    context = current()
    assert context is not None
    assert context.peers.wait(60.0) is not None


def announce_step() -> None:
    """For rank processes of the harness, and what they fork."""
    announce("at work", (dist.get_rank(), os.getpid()))


def who(rank: int, pid: int, host: str = HERE) -> str:
    """Return a rank's name in messages."""
    return f"rank {rank} (host {host}, pid {pid})"


def error_of(
    survivor: Outcome, kind: type[RankFailedError], culprit: int, pid: int, host: str = HERE
) -> RankFailedError:
    """Return a rank's error; fail unless it is of this kind and names the culprit."""
    error = survivor.failure.exception
    assert type(error) is kind, survivor.story()
    assert (error.rank, error.host, error.pid, survivor.exit_code) == (culprit, host, pid, 1)
    return error


class Fault(At):
    """Calls ``action`` when a hook runs, after a number of ``earlier`` calls; on
    ``ranks``, by default on all.
    """

    def __init__(
        self, hook: str, action: Callable[[], object], *ranks: int, earlier: int = 0
    ) -> None:
        super().__init__(hook, self._strike, earlier=earlier)
        self._action = action
        self._ranks = ranks

    def _strike(self, trainer: pl.Trainer) -> None:
        if not self._ranks or trainer.global_rank in self._ranks:
            self._action()


def in_step(action: Callable[[], object], *ranks: int) -> Fault:
    """Fail in the second step, when the first one has left gradients."""
    return Fault("on_train_batch_start", action, *ranks, earlier=1)


IN_THIRD_STEP = Fault("on_train_batch_start", announce_step, earlier=2)


def make_trainer(
    devices: int, strategy: str | ddpx.DDPExtStrategy, *callbacks: pl.Callback, **options: Any
) -> Any:
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, **options}
    return training.make_trainer(strategy, devices=devices, callbacks=list(callbacks), **options)


def by_hand(
    rank: int, world_size: int, url: str, *, grace: dict[str, float] | None = None, **options: Any
) -> ddpx.DDPExtStrategy:
    """Return the strategy of a rank that was started by hand; for ``grace`` see
    ``Timeouts``.
    """
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in variables.items()})
    strategy = ddpx.DDPExtStrategy(url, **options)
    timeouts = strategy.rendezvous.timeouts
    strategy.rendezvous.timeouts = replace(timeouts, grace={**timeouts.grace, **(grace or {})})
    return strategy


def fit(
    rank: int, world_size: int, url: str, *faults: Fault, model: Net | None = None, **options: Any
) -> None:
    """Train once on a rank that was started by hand."""
    strategy = by_hand(rank, world_size, url, **options)
    make_trainer(world_size, strategy, *faults).fit(model or Net())


def lines_of(stderr: str) -> list[str]:
    """Return the lines without torch's prefixes, warnings and addresses of errors."""
    text = re.sub(r"^\[rank\d+\]: ?", "", stderr, flags=re.MULTILINE)
    return [
        line
        for line in text.splitlines()
        if line.strip() and "LeafSpec" not in line and not line.startswith("See ")
    ]
