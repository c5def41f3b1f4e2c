"""A Hydra application, which may run several jobs, one after another."""

import hydra
import torch
from hydra.core.config_store import ConfigStore
from lightning import pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import DictConfig

import lightning_ddp_ext
from tests.programs.train import LightningNumbers

ConfigStore.instance().store("app", {"strategy": "ddp", "lr": 0.1})


class Model(BoringModel):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


@hydra.main(version_base=None, config_name="app")
def main(config: DictConfig) -> None:
    pl.seed_everything(1)
    trainer = pl.Trainer(
        strategy=config.strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        limit_train_batches=8,
        logger=False,
        enable_progress_bar=False,
        callbacks=[LightningNumbers()],
    )
    trainer.fit(Model(config.lr))


if __name__ == "__main__":
    main()
