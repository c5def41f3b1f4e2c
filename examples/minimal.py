"""Fit a line on two CPU ranks, as a starting point for your own script.

Run it: python examples/minimal.py
"""

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp_ext  # noqa: F401 - registers the strategy "ddp_ext"


class Line(L.LightningModule):
    """Learns the line y = 3 x - 1."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.line(x), y)
        # The mean over both ranks.
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


if __name__ == "__main__":
    L.seed_everything(1)
    x = torch.linspace(-1, 1, 256).unsqueeze(1)
    loader = DataLoader(TensorDataset(x, 3 * x - 1), batch_size=16, shuffle=True)

    # On GPUs, use accelerator="gpu" and devices=torch.cuda.device_count().
    trainer = L.Trainer(
        strategy="ddp_ext", accelerator="cpu", devices=2, max_epochs=5, logger=False
    )
    model = Line()
    trainer.fit(model, loader)

    if trainer.is_global_zero:
        found = f"y = {model.line.weight.item():.2f} x {model.line.bias.item():+.2f}"
        print(f"{trainer.world_size} ranks found {found} in {trainer.global_step} steps")
