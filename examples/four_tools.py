"""Use the four tools in one script: an init method, SyncBatchNorm, checkpoints of rank 0
with `map_location`, and epoch seeding.

python examples/four_tools.py                          # starts its second rank
python examples/four_tools.py file:///tmp/run42        # the ranks connect through a file
torchrun --nproc-per-node 2 examples/four_tools.py     # uses the ranks of torchrun

Stop it with Ctrl-C, and the same command resumes.
"""

import sys

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp_ext as ddpx


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        noisy = x + 0.1 * torch.randn_like(x)  # differs between epochs and ranks
        return nn.functional.mse_loss(self.net(noisy), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    L.seed_everything(0)
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    trainer = L.Trainer(
        accelerator="cpu",  # remove this line to train on two GPUs
        devices=2,
        max_epochs=3,
        # 1. "env://" (default), "tcp://10.0.0.1:29500" or "file:///shared/run42"
        strategy=ddpx.DDPExtStrategy(sys.argv[1] if len(sys.argv) > 1 else None),
        # 3. Each rank reads the file onto its own device, the optimiser states included.
        plugins=[ddpx.RankZeroCheckpointIO(map_location="rank")],
        callbacks=[
            ddpx.SyncBatchNormConversion(),  # 2. statistics of both ranks' batches together
            ddpx.RankZeroCheckpoint("checkpoints", save_last=True),  # 3. written by rank 0
            ddpx.SamplerEpochSeeding(seed=0),  # 4. new random numbers in each epoch
        ],
        logger=False,
    )
    trainer.fit(Net(), loader, ckpt_path="last")
    if trainer.is_global_zero:
        saved = trainer.checkpoint_callback.last_model_path
        print(f"{trainer.world_size} ranks are at step {trainer.global_step}, saved to {saved}")
