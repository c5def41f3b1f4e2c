"""Test that ranks can connect, reduce, save, verify and restore.

A launcher or this command starts them.
"""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.cli.output import print_error, print_line
from lightning_ddp_ext.errors import DDPExtError
from lightning_ddp_ext.rendezvous.init_method import File, check_file
from lightning_ddp_ext.trees import adapter
from lightning_ddp_ext.world import read_world

# Any, since the installed package decides which of Lightning's two trees this is.
pl: Any = adapter("private.lightning_tree").pl

_STEPS = 4


def run_self_test(*, devices: int, accelerator: str, init_method: str | None) -> int:
    """Train, reduce, save, verify and restore, and return the exit status.

    After each part, rank 0 prints the time since the start. The status is 2 if no
    Trainer can be made with these options, or with the launcher's variables.
    """
    logging.disable(logging.INFO)  # hide the log lines of Lightning and of our strategy
    warnings.simplefilter("ignore")
    make_trainer = partial(
        _make_trainer, devices=devices, accelerator=accelerator, init_method=init_method
    )
    try:
        trainer = make_trainer(max_steps=_STEPS)
    except (ValueError, TypeError, pl.utilities.exceptions.MisconfigurationException) as unusable:
        print_error(f"lightning-ddp-ext test: error: {' '.join(str(unusable).split())}")
        return 2
    started = time.perf_counter()
    for part in _test_parts(trainer, make_trainer):
        if trainer.is_global_zero:
            print_line(f"{time.perf_counter() - started:6.2f} s  {part}")
    return 0


def _make_trainer(
    *, devices: int, accelerator: str, init_method: str | None, max_steps: int
) -> Any:
    world = read_world(os.environ)
    strategy = DDPExtStrategy(init_method, stop_checkpoint=None)
    chosen = strategy.rendezvous.init_method
    if isinstance(chosen, File):
        check_file(chosen)
    return pl.Trainer(
        strategy=strategy,
        accelerator=accelerator,
        devices=devices if world is None else world.local_world_size,
        num_nodes=1 if world is None else world.num_nodes,
        max_steps=max_steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _test_parts(trainer: Any, make_trainer: Callable[..., Any]) -> Iterator[str]:
    """Test one part after another, and yield what has passed."""
    model_class = importlib.import_module(f"{pl.__name__}.demos.boring_classes").BoringModel
    strategy = trainer.strategy
    with tempfile.TemporaryDirectory(prefix="rank-test-") as directory:
        trainer.fit(model_class())
        yield "connected and trained"
        _check_all_reduce(trainer)
        yield "reduced"
        # All ranks use rank 0's directory; those of the other ranks stay empty.
        path = strategy.broadcast(os.path.join(directory, "test.ckpt"))
        trainer.save_checkpoint(path)
        yield "saved"
        resuming = make_trainer(max_steps=2 * _STEPS)
        resuming.fit(model_class(), ckpt_path=path)
        if resuming.global_step != resuming.max_steps:
            raise DDPExtError(
                f"the resumed run stopped after step {resuming.global_step}, not"
                f" {resuming.max_steps}"
            )
        # Rank 0 keeps its file until all ranks have read it.
        resuming.strategy.barrier("the end of the test")
        yield "verified and restored"
    yield f"all tests passed (ranks: {trainer.world_size}, nodes: {trainer.num_nodes})"


def _check_all_reduce(trainer: Any) -> None:
    ones = torch.ones(1, device=trainer.strategy.root_device)
    total = trainer.strategy.reduce(ones, reduce_op="sum").item()
    if total != trainer.world_size:
        raise DDPExtError(
            f"an all-reduce of ones from all ranks gave {total}, not {trainer.world_size}"
        )
