"""Check a cluster: ``python -m lightning_ddp_ext``, under any launcher or alone.

Each rank prints its place, host, device and versions, and then all time an all-reduce.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import platform
import time
import warnings
from importlib import metadata
from typing import Any

import torch

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.errors import DDPExtError
from lightning_ddp_ext.trees import adapter
from lightning_ddp_ext.world import read_world

# Any, since the installed package decides which of Lightning's two trees this is.
pl: Any = adapter("private.lightning_tree").pl

_MIB = 4  # in the all-reduce


def main() -> None:
    """Train one step on all ranks, describe each rank, and time an all-reduce.

    Training starts the ranks and connects them just as in the user's script.
    """
    logging.disable(logging.INFO)  # hide the log lines of Lightning and of our strategy
    warnings.simplefilter("ignore")
    trainer = _make_trainer(_parse_options())
    trainer.fit(importlib.import_module(f"{pl.__name__}.demos.boring_classes").BoringModel())
    strategy = trainer.strategy
    # In one write, since the ranks share the output.
    print(f"{_describe(strategy)}\n", end="", flush=True)
    milliseconds = _time_all_reduce(strategy)
    if trainer.is_global_zero:
        # The init method that the ranks used: the strategy's argument may be None, and
        # it has no public attribute for the method that was chosen.
        print(
            f"{strategy._rendezvous.init_method or 'env://'}: all-reduce of {_MIB} MiB in"
            f" {milliseconds:.1f} ms",
            flush=True,
        )


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m lightning_ddp_ext", description=__doc__)
    parser.add_argument(
        "--devices", type=int, default=2, help="ranks to start without a launcher (default: 2)"
    )
    parser.add_argument("--accelerator", default="auto", help="auto, cpu or gpu (default: auto)")
    parser.add_argument("--init-method", help="init_method of the strategy")
    return parser.parse_args()


def _make_trainer(options: argparse.Namespace) -> Any:
    """Return a Trainer for one step, on the ranks of a launcher if there is one."""
    world = read_world(os.environ)
    return pl.Trainer(
        strategy=DDPExtStrategy(options.init_method, stop_checkpoint=None),
        accelerator=options.accelerator,
        devices=options.devices if world is None else world.local_world_size,
        num_nodes=1 if world is None else world.num_nodes,
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _describe(strategy: Any) -> str:
    """Return this rank's place, host, device and versions."""
    world = strategy.world
    device = strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    lightning = pl.__name__.partition(".")[0].replace("_", "-")
    versions = ", ".join(
        f"{package} {metadata.version(package)}"
        for package in ("torch", lightning, "lightning-ddp-ext")
    )
    return (
        f"rank {world.rank} of {world.world_size}: local rank {world.local_rank} of node"
        f" {world.node_rank}, from {world.source}; host {platform.node()}, pid {os.getpid()},"
        f" {device} ({name}); Python {platform.python_version()}, {versions}"
    )


def _time_all_reduce(strategy: Any) -> float:
    """Return the milliseconds of one all-reduce, after a small one that connects the ranks."""
    strategy.reduce(torch.ones(1, device=strategy.root_device), reduce_op="sum")
    ones = torch.ones(_MIB * 2**18, device=strategy.root_device)  # 2**18 floats are 1 MiB
    started = time.perf_counter()
    total = strategy.reduce(ones, reduce_op="sum")[-1].item()
    if total != strategy.world_size:
        raise DDPExtError(f"an all-reduce of ones from {strategy.world_size} ranks gave {total:g}")
    return 1000 * (time.perf_counter() - started)


if __name__ == "__main__":
    main()
