"""An Optuna study, whose first trial is pruned."""

from __future__ import annotations

import sys

import optuna
import torch
from lightning import pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from optuna_integration import PyTorchLightningPruningCallback

import lightning_ddp_ext
from tests.programs.outcome import LightningNumbers


class Model(BoringModel):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


def objective(trial: optuna.Trial, strategy: str) -> float:
    pl.seed_everything(1)
    pruning = PyTorchLightningPruningCallback(trial, monitor="val_loss")
    trainer = pl.Trainer(
        strategy=f"{strategy}_fork",
        accelerator="cpu",
        devices=2,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[pruning, LightningNumbers()],
    )
    trainer.fit(Model(trial.suggest_float("lr", 1e-4, 1e-1)))
    pruning.check_pruned()
    return trainer.callback_metrics["val_loss"].item()


def main(strategy: str) -> None:
    pruner = optuna.pruners.ThresholdPruner(upper=1.0, n_warmup_steps=1)
    study = optuna.create_study(storage="sqlite:///study.db", pruner=pruner)
    study.enqueue_trial({"lr": 0.1})
    study.enqueue_trial({"lr": 1e-4})
    study.optimize(lambda trial: objective(trial, strategy), n_trials=2)
    sys.stdout.write(f"trials {[trial.state.name for trial in study.trials]}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
