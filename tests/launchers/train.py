"""The training script that every launcher of these tests starts: a few steps of a small model for each ``--url``.

It is an init method, or ``-`` for none; before each the ranks leave each other. Each rank prints a line at the end of
training: who it was, its weights, and the files that it saw where they met. Each process that returns from the
Trainer prints the weights that it has then, and what the Trainer has returned.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import lightning as L
from torch import nn

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.rendezvous.process_context import leave
from tests.harness.training import Net, make_trainer


class Tell(L.Callback):
    """Tells of this rank's training; kills the process of one rank in its second step."""

    def __init__(self, run: int, url: str, dies: int | None) -> None:
        self.run, self.url, self.dies = run, url, dies
        self.files: list[str] = []

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.url.startswith("file://"):
            self.files = os.listdir(os.path.dirname(self.url.removeprefix("file://")))

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: object, index: int) -> None:
        if trainer.global_rank == self.dies and index == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        place = [trainer.global_rank, trainer.world_size, trainer.local_rank, trainer.node_rank]
        say("trained", run=self.run, place=place, pid=os.getpid(), weights=fingerprint(module), files=self.files)


def say(what: str, **facts: Any) -> None:
    sys.stdout.write(f"{json.dumps({'what': what, **facts})}\n")
    sys.stdout.flush()


def fingerprint(module: nn.Module) -> str:
    """The same text for the same weights, to the last bit."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def learn(strategy: Any, calls: Sequence[str] = ("fit",), **options: Any) -> tuple[str, list[Any]]:
    """Call a Trainer's methods one after another; fingerprint of the weights, and what the methods returned."""
    L.seed_everything(5)
    model = Net()
    trainer = make_trainer(strategy, **options)
    returned = [getattr(trainer, name)(model) for name in calls]
    return fingerprint(model), returned


def main(argv: Sequence[str]) -> None:
    options = parse(argv)
    names = ("start_method", "rank", "world_size", "run_id")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    for run, url in enumerate(options.url):
        leave()
        dies = next((int(rank) for rank, *when in options.die if when == [restart, str(run)]), None)
        chosen = given if url == "-" else {**given, "init_method": url}
        weights, returned = learn(
            DDPExtStrategy(**chosen) if chosen else "ddp_ext",
            options.calls,
            devices=options.devices,
            num_nodes=options.num_nodes,
            callbacks=[Tell(run, url, dies)],
        )
        say("returned", run=run, weights=weights, results=returned[1:])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", action="append")
    parser.add_argument("--calls", nargs="+", default=["fit"], help="methods of each Trainer")
    parser.add_argument("--die", nargs=3, action="append", default=[], metavar=("RANK", "RESTART", "RUN"))
    parser.add_argument("--devices", type=int)
    parser.add_argument("--num-nodes", type=int)
    parser.add_argument("--start-method")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--run-id")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
