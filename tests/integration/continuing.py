"""Runs that are stopped, resumed and compared with one that was not: what each rank has read, and its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.harness.training import make_trainer

Moment = Literal[
    "train_batch_start",
    "train_batch_end",
    "validation_batch_end",
    "validation_end",
    "train_epoch_start",
    "train_epoch_end",
    "train_end",
    "exception",
]
Step = tuple[int, ...]  # epoch, batch, and the samples of this rank's batch


class Numbers(Dataset[Tensor]):
    """Samples that tell which they are."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Stream(IterableDataset[Tensor]):
    """Numbers of this rank's own, in another order each epoch, without a length."""

    def __init__(self, length: int, rank: int) -> None:
        self.numbers = range(rank * 1000, rank * 1000 + length)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        shift = self.epoch % len(self.numbers)
        for number in (*self.numbers[shift:], *self.numbers[:shift]):
            yield torch.tensor([float(number)])


class Stopped(Exception):
    """What a run is stopped by."""


class Net(L.LightningModule):
    """Writes down what it is trained on. With dropout its weights tell of the random numbers, too."""

    def __init__(
        self, loaders: Callable[[], Any], fail_at: tuple[int, int] | None = None, plateau: bool = False
    ) -> None:
        super().__init__()
        self.plateau = plateau
        self.layers = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.loaders = loaders
        self.fail_at = fail_at
        self.steps: list[Step] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        epoch = self.trainer.fit_loop.epoch_progress.current.processed
        parts = [part for part in (batch if isinstance(batch, (list, tuple)) else [batch]) if part is not None]
        if self.fail_at == (epoch, index):
            raise Stopped
        self.steps.append((epoch, index, *(int(number) for part in parts for number in part.flatten())))
        loss: Tensor = torch.cat([self.layers(part / 100) for part in parts]).square().mean()
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch))

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.layers(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedulers = [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), "interval": "step"},
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.6), "interval": "epoch"},
        ]
        if self.plateau:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            schedulers.append({"scheduler": scheduler, "monitor": "epoch"})
        return [optimizer], schedulers

    def train_dataloader(self) -> Any:
        return self.loaders()

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Numbers(4), batch_size=1)


class Saver(L.Callback):
    """Saves a checkpoint each time that a moment comes."""

    def __init__(self, moment: Moment, directory: Path) -> None:
        self.moment = moment
        self.directory = directory
        self.saved: list[tuple[str, int]] = []  # the file, and the steps that had been done

    def _save(self, trainer: L.Trainer, moment: Moment) -> None:
        if moment == self.moment and not trainer.sanity_checking:
            path = f"{self.directory}/{moment}-{len(self.saved)}.ckpt"
            assert isinstance(trainer.lightning_module, Net)
            self.saved.append((path, len(trainer.lightning_module.steps)))
            trainer.save_checkpoint(path)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "train_batch_start")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "train_batch_end")

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "validation_batch_end")

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "validation_end")

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "train_epoch_start")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "train_epoch_end")

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "train_end")

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "exception")


@dataclass
class Run:
    """What one run has done on this rank."""

    steps: list[Step]
    weights: Tensor
    counts: tuple[Any, ...]
    saved: list[tuple[str, int]] = field(default_factory=list)


def fit(
    strategy: Any,
    loaders: Callable[[], Any],
    *,
    saver: Saver | None = None,
    fail_at: tuple[int, int] | None = None,
    ckpt_path: str | None = None,
    dropout: bool = True,
    plateau: bool = False,
    kind: type[Net] = Net,
    **options: Any,
) -> Run:
    """Train from the beginning, or from a checkpoint with another seed and generators that are somewhere else."""
    L.seed_everything(7 if ckpt_path is None else 8, verbose=False)
    net = kind(loaders, fail_at, plateau)
    if not dropout:
        net.layers[1] = nn.Identity()
    torch.manual_seed(7 if ckpt_path is None else 1234)
    callbacks = [] if saver is None else [saver]
    trainer = make_trainer(strategy, callbacks=callbacks, num_sanity_val_steps=0, **options)
    try:
        trainer.fit(net, ckpt_path=ckpt_path)
    except Stopped:
        assert fail_at is not None
    loop = trainer.fit_loop.epoch_loop
    counts = (trainer.global_step, loop._batches_that_stepped, loop.batch_progress.total.completed)
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    return Run(net.steps, weights, counts, [] if saver is None else saver.saved)
