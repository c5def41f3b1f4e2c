"""Accumulate 4 batches of 8 on 2 ranks, and compare the weights with those of one
process that uses batches of 64.

Run it: python examples/gradient_accumulation.py
"""

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp_ext  # noqa: F401 - registers the strategy's names


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(
    data: TensorDataset, *, strategy: str, devices: int, batch_size: int, accumulate: int
) -> Regression:
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        accumulate_grad_batches=accumulate,
        max_epochs=20,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    trainer.fit(model, DataLoader(data, batch_size))
    samples = devices * batch_size * accumulate
    print(
        f"{devices} ranks x {batch_size} samples x {accumulate} batches = {samples} samples in an"
        " optimiser step"
    )
    return model


if __name__ == "__main__":
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    alone = train(data, strategy="auto", devices=1, batch_size=64, accumulate=1)
    # Forked ranks return their weights to this process. Gradients are exchanged once
    # per optimiser step.
    ranks = train(data, strategy="ddp_ext_fork", devices=2, batch_size=8, accumulate=4)
    largest = max(
        (p - q).abs().max().item()
        for p, q in zip(alone.parameters(), ranks.parameters(), strict=True)
    )
    print(f"largest difference of a weight: {largest:.0e}")
