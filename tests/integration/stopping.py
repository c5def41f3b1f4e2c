"""Runs that get a real signal at a moment of their life, on one rank, and what they leave."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.harness.training import At, make_trainer
from tests.integration.continuing import Net, Numbers, Run


def signalled(hook: str, earlier: int = 0, signum: int = signal.SIGTERM) -> At:
    """A callback that sends its process a signal when a hook has been called so often."""
    return At(hook, lambda trainer: os.kill(os.getpid(), signum), earlier=earlier)


class Validated(Net):
    """Validates many batches, and keeps the results."""

    def __init__(self, loaders: Callable[[], Any], plateau: bool = False, samples: int = 200) -> None:
        super().__init__(loaders, plateau=plateau)
        self.samples = samples
        self.validated = 0
        self.results: list[float] = []

    def val_dataloader(self) -> Any:
        return DataLoader(Numbers(self.samples), batch_size=1)

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.validated += 1
        if self.samples > 4:  # in step, or one rank may come to the end while the other one is about to be stopped
            dist.all_reduce(torch.zeros(1))
        self.log("result", self.layers(batch).sum(), sync_dist=True)

    def on_validation_end(self) -> None:
        self.results.append(float(self.trainer.callback_metrics["result"]))


@dataclass
class Stopped(Run):
    """What a run did until it stopped."""

    status: int | None = None
    files: list[str] = field(default_factory=list)
    validated: int = 0
    results: list[float] = field(default_factory=list)

    @property
    def end(self) -> tuple[int | None, list[str], int]:
        """Status, files, and steps made."""
        return self.status, self.files, len(self.steps)


def fit(
    strategy: Any,
    directory: Path,
    loaders: Callable[[], Any],
    *,
    ckpt_path: str | None = None,
    plateau: bool = False,
    validated: int = 4,
    **options: Any,
) -> Stopped:
    """Train until the end or until all stop; resumed runs have another seed, and generators somewhere else."""
    L.seed_everything(7 if ckpt_path is None else 8, verbose=False)
    net = Validated(loaders, plateau, validated)
    torch.manual_seed(7 if ckpt_path is None else 1234)
    settings = {"num_sanity_val_steps": 0, "default_root_dir": directory, **options}
    trainer = make_trainer(strategy, **settings)
    status = None
    try:
        trainer.fit(net, ckpt_path=ckpt_path)
    except SystemExit as end:
        status = end.code
        assert isinstance(status, int)
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    loop = trainer.fit_loop.epoch_loop
    counts = (trainer.global_step, loop._batches_that_stepped, loop.batch_progress.total.completed)
    files = sorted(path.name for path in directory.glob("*.ckpt"))
    return Stopped(net.steps, weights, counts, [], status, files, net.validated, net.results)


def shuffled(samples: int = 12, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(Numbers(samples), **{"batch_size": 2, "shuffle": True, **options})
