"""Train on streams of different lengths, without padding and without hanging.

Run it: python examples/iterable_uneven.py
"""

from collections.abc import Iterator

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_ddp_ext import DDPExtStrategy

FILES = [40, 24, 40, 16]  # the number of samples in each file


class Files(IterableDataset[Tensor]):
    """Reads each file on exactly one rank, in one of its workers."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.files = range(rank, len(FILES), world_size)

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        mine = self.files[worker.id :: worker.num_workers] if worker else self.files
        for file in mine:
            yield from torch.randn(FILES[file], 32)


class Stream(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Tensor]:
        # The rank is known, because the process group already exists.
        dataset = Files(self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(dataset, batch_size=4)


class Count(L.Callback):
    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        stream = Files(trainer.global_rank, trainer.world_size)
        batches = sum(FILES[file] for file in stream.files) // 4
        print(
            f"rank {trainer.global_rank} has {batches} batches and made {trainer.global_step}"
            " steps",
            flush=True,
        )


if __name__ == "__main__":
    trainer = L.Trainer(
        strategy=DDPExtStrategy(uneven_inputs="stop_at_shortest"),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        callbacks=[Count()],
        logger=False,
        limit_val_batches=0,
    )
    trainer.fit(BoringModel(), Stream())
