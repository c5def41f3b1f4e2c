"""Synchronise BatchNorm in the encoder, which then uses the statistics of both ranks,
but not in the head.

Run it: python examples/partial_sync_batchnorm.py
"""

import logging

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp_ext as ddpx


class Network(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.head(self.encoder(x)), y)

    def on_train_end(self) -> None:
        for name, layer in [("encoder", self.encoder[1]), ("head", self.head[1])]:
            first, second = self.all_gather(layer.running_mean)
            same = "the same" if torch.allclose(first, second) else "different"
            if self.trainer.is_global_zero:
                print(f"{name}: running means of the two ranks are {same}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    L.seed_everything(1)
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    trainer = L.Trainer(
        # Otherwise DDP sends rank 0's statistics to all ranks.
        strategy=ddpx.DDPExtStrategy(broadcast_buffers=False),
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        callbacks=[ddpx.SyncBatchNormConversion(include="encoder.*")],
        logger=False,
    )
    trainer.fit(Network(), loader)
