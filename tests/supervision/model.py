"""Train a model that fails at a chosen moment, on chosen ranks, in a chosen way."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

import lightning_ddp_ext as ddpx
from lightning_ddp_ext.errors import RankFailedError
from lightning_ddp_ext.rendezvous.process_context import current
from tests.harness import training
from tests.harness.ranks import HOST, Outcome, announce
from tests.harness.training import At, Net


class BoomError(ValueError):
    """The error of these tests; no other code raises it."""


def boom(*_: object) -> None:
    raise BoomError("no such layer")


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def wait_for_ever(*_: object) -> None:
    """Block in a way that no broken connection unblocks."""
    threading.Event().wait()


def wait_for_another_ranks_end(*_: object) -> None:
    context = current()
    assert context is not None
    assert context.peers.wait(60.0) is not None


def announce_step(*_: object) -> None:
    """For rank processes of the harness, and what they fork."""
    announce("at work", (dist.get_rank(), os.getpid()))


def error_of(
    survivor: Outcome, kind: type[RankFailedError], culprit: int, pid: int
) -> RankFailedError:
    """Return a rank's error; fail unless it is of this kind and names the culprit."""
    error = survivor.failure.exception
    assert type(error) is kind, survivor.story()
    assert (error.rank, error.host, error.pid, survivor.exit_code) == (culprit, HOST, pid, 1)
    return error


def in_step(action: Callable[..., object], *ranks: int) -> At:
    """Fail in the second step, when the first one has left gradients."""
    return At("on_train_batch_start", action, earlier=1, ranks=ranks)


def make_trainer(
    devices: int, strategy: str | ddpx.DDPExtStrategy, *callbacks: pl.Callback, **options: Any
) -> Any:
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, **options}
    return training.make_trainer(strategy, devices=devices, callbacks=list(callbacks), **options)


def fit(
    rank: int,
    world_size: int,
    directory: Path,
    *callbacks: pl.Callback,
    net: Net | None = None,
    grace: float | None = None,
    **options: Any,
) -> None:
    """Train for an epoch on a rank, with these options of the strategy.

    ``grace`` is the time in seconds that the main thread has after another rank's end.
    """
    strategy = training.make_strategy("ours", directory, **options)
    if grace is not None:
        events = ("died", "failed", "absent", "hung")
        training.change_timeouts(strategy, grace=dict.fromkeys(events, grace))
    make_trainer(world_size, strategy, *callbacks).fit(net or Net())
