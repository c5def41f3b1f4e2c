"""Give the ranks of stock `ddp` samplers of this package, which have a new order in each
epoch, and check that the ranks' weights stay the same.

Run it: python examples/samplers.py
"""

from collections.abc import Iterator

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lightning_ddp_ext as ddpx


class Samples(Dataset[Tensor]):
    """As many samples as you like, which are computed when they are read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((32,), index / self.length)


class Neighbours:
    """Batches of neighbouring samples, for example texts of similar length. The order of
    the batches is new in each epoch.
    """

    def __init__(self, samples: int, batch_size: int) -> None:
        self.batches = torch.arange(samples).split(batch_size)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.epoch)
        for index in torch.randperm(len(self.batches), generator=generator):
            yield self.batches[index].tolist()


class Model(BoringModel):
    def train_dataloader(self) -> CombinedLoader:
        # The samplers take the rank from the process group, which exists in this hook.
        huge = Samples(10**12)  # torch's DistributedSampler would need 8 TB for its order
        shuffled = DataLoader(huge, 4, sampler=ddpx.ScalableDistributedSampler(huge))
        batches = ddpx.DistributedBatchSamplerWrapper(Neighbours(64, batch_size=4))
        in_batches = DataLoader(Samples(64), batch_sampler=batches)
        return CombinedLoader([shuffled, in_batches], "min_size")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        shuffled, in_batches = batch
        if batch_idx == 0:
            indices = [round(64 * value) for value in in_batches[:, 0].tolist()]
            print(f"epoch {self.current_epoch}, rank {self.global_rank}: {indices}", flush=True)
        return self.step(torch.cat([shuffled, in_batches]))


if __name__ == "__main__":
    trainer = L.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        # `ddp_ext` needs neither callback for new orders.
        callbacks=[ddpx.SamplerEpochSeeding(), ddpx.RankConsistency(every_n_steps=1)],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Model())
