"""Do the ranks of this launcher find each other, reduce, save, verify and restore?"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.cli.output import Report, add_row, count_text, table
from lightning_ddp_ext.cli.verification import verify
from lightning_ddp_ext.errors import DDPExtError
from lightning_ddp_ext.trees import adapter
from lightning_ddp_ext.world import read_world

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    _pl = adapter("lightning_tree").pl
    Callback, LightningModule, Trainer = _pl.Callback, _pl.LightningModule, _pl.Trainer

_STEPS = 4


class _Line(LightningModule):
    """Learns a line."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.linspace(-1.0, 1.0, 512).view(-1, 4)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class _Run(Callback):
    """What the ranks do while they train, and how long each part takes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts: dict[str, tuple[float, str]] = {}
        self.began = time.perf_counter()

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        what = f"{count_text(trainer.world_size, 'rank')} on {count_text(trainer.num_nodes, 'node')}"
        self.parts["rendezvous"] = time.perf_counter() - self.began, what
        with self.timed("all-reduce", f"on {trainer.strategy.root_device}"):
            ranks_sum = trainer.strategy.reduce(torch.tensor(float(trainer.global_rank)), reduce_op="sum")
        expected = trainer.world_size * (trainer.world_size - 1) / 2
        if float(ranks_sum) != expected:
            raise DDPExtError(f"an all-reduce of the ranks' numbers gave {float(ranks_sum)}, and not {expected}")

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.path = Path(trainer.strategy.broadcast(str(self.path)))
        with self.timed("save", str(self.path)):
            trainer.save_checkpoint(self.path)

    @contextmanager
    def timed(self, name: str, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.parts[name] = time.perf_counter() - began, what


def run(*, devices: int, accelerator: str, init_method: str | None) -> Report | None:
    """Train, save, verify and restore on all ranks; rank 0 reports, the others return ``None``.

    Args:
        devices: ranks to start on this machine, where no launcher has started them.
        accelerator: ``"auto"``, ``"cpu"`` or ``"gpu"``, as for a Trainer.
        init_method: where the ranks meet, as for the strategy.
    """
    world = read_world(os.environ)

    def make_trainer(steps: int, *callbacks: Callback) -> Trainer:
        return Trainer(
            strategy=DDPExtStrategy(init_method, stop_checkpoint=None),
            accelerator=accelerator,
            devices=devices if world is None else world.local_world_size,
            num_nodes=1 if world is None else world.num_nodes,
            max_steps=steps,
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    with tempfile.TemporaryDirectory(prefix="rank-test-") as directory:
        testing = _Run(Path(directory) / "test.ckpt")
        trainer = make_trainer(_STEPS, testing)
        trainer.fit(_Line())
        error = None
        if trainer.is_global_zero:
            with testing.timed("verify", "every byte against its checksum"):
                error = verify(str(testing.path)).error
        with testing.timed("restore", f"and {_STEPS} more steps"):
            resumed = make_trainer(2 * _STEPS)
            resumed.fit(_Line(), ckpt_path=testing.path)
        if resumed.global_step != 2 * _STEPS:
            raise DDPExtError(f"a resumed run ended after step {resumed.global_step}, and not {2 * _STEPS}")
        resumed.strategy.barrier("the end of the test")  # rank 0 keeps its file until all have read it
    return _report(testing, error) if trainer.is_global_zero else None


def _report(testing: _Run, error: str | None) -> Report:
    shown = table("step", "seconds", "", numbers=["seconds"])
    for name, (seconds, what) in testing.parts.items():
        add_row(shown, name, f"{seconds:.2f}", what)
    facts = {"steps": {name: {"seconds": seconds, "what": what} for name, (seconds, what) in testing.parts.items()}}
    return Report({**facts, "passed": error is None}, error, [shown, "all is well" if error is None else ""])
