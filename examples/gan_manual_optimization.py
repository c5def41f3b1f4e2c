"""Train a GAN on two ranks with two optimisers and manual optimisation.

Run it: python examples/gan_manual_optimization.py
"""

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_ddp_ext  # noqa: F401 - registers the strategy's names


class GAN(L.LightningModule):
    """Learns to sample from a normal distribution with mean 4 and standard deviation
    0.5.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
        self.critic = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, real: Tensor, _: int) -> None:
        for_generator, for_critic = self.optimizers()
        fake = self.generator(torch.randn(len(real), 4))

        # toggle_optimizer freezes the other network, so each step has parameters
        # without gradients. Therefore the strategy's name ends with
        # find_unused_parameters_true.
        self.toggle_optimizer(for_generator)
        scores = self.critic(fake)
        self.minimize(for_generator, scores, wanted=torch.ones_like(scores))
        self.untoggle_optimizer(for_generator)

        self.toggle_optimizer(for_critic)
        scores = torch.cat([self.critic(real), self.critic(fake.detach())])
        self.minimize(
            for_critic, scores, wanted=torch.cat([torch.ones_like(real), torch.zeros_like(real)])
        )
        self.untoggle_optimizer(for_critic)

    def minimize(self, optimizer: torch.optim.Optimizer, scores: Tensor, *, wanted: Tensor) -> None:
        loss = nn.functional.binary_cross_entropy_with_logits(scores, wanted)
        optimizer.zero_grad()
        self.manual_backward(loss)  # averages the gradients over all ranks
        optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        networks = (self.generator, self.critic)
        return [
            torch.optim.Adam(network.parameters(), lr=0.003, betas=(0.5, 0.9))
            for network in networks
        ]


if __name__ == "__main__":
    L.seed_everything(1)
    loader = DataLoader(4 + 0.5 * torch.randn(4096, 1), batch_size=64, shuffle=True)
    strategy = "ddp_ext_find_unused_parameters_true"
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=10, logger=False
    )
    model = GAN()
    trainer.fit(model, loader)
    if trainer.is_global_zero:
        drawn = model.generator(torch.randn(10_000, 4))
        print(f"generated mean {drawn.mean():.2f}, of the data 4.00")
