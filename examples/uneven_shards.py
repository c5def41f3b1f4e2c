"""Train on shards of 40 and 24 samples on two ranks, and count how many of the 64 samples are used.

Run it: python examples/uneven_shards.py

With "stop_at_shortest", the epoch ends when the shorter shard ends. With "join", the rank with the shorter shard takes
part in the remaining steps without affecting the gradients, so every sample is used exactly once.
"""

from collections.abc import Iterator

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import SumMetric

import lightning_ddp_ext as ddpx

SHARDS = [40, 24]


class Shard(IterableDataset[Tensor]):
    """The samples on one rank's disk."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.linspace(-1, 1, self.samples).unsqueeze(1)


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.samples = SumMetric()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.samples(len(batch))
        self.log("samples", self.samples, on_step=False, on_epoch=True)
        return nn.functional.mse_loss(self.layers(batch), batch.sin())

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Shard(SHARDS[self.trainer.global_rank]), batch_size=4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(mode: str) -> None:
    trainer = L.Trainer(
        strategy=ddpx.DDPExtStrategy(uneven_inputs=mode),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        sync_batchnorm=True,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net())
    if trainer.is_global_zero:
        samples = int(trainer.callback_metrics["samples"])
        print(f"{mode}: {trainer.global_step} steps, {samples} of {sum(SHARDS)} samples", flush=True)


if __name__ == "__main__":
    train("stop_at_shortest")
    train("join")
