"""The programs, each on data that it makes up: ``train.py PROGRAM STRATEGY``.

Each training prints its outcome as a line that the test reads.
"""

import json
import sys
from typing import Any

import numpy as np
import pytorch_lightning
import torch
from lightning import pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_ddp_ext.pytorch_lightning

ON_TWO_RANKS: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 2,
    "enable_progress_bar": False,
}


class _Numbers:
    """At the end of the training, rank 0 prints the parameters' mean size, the numbers of
    steps and ranks, and the metrics.
    """

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            parameters = [parameter.detach() for parameter in pl_module.parameters()]
            size = sum(float(parameter.abs().sum()) for parameter in parameters)
            count = sum(parameter.numel() for parameter in parameters)
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            numbers = {
                "parameters": size / count,
                "steps": trainer.global_step,
                "ranks": trainer.world_size,
                **metrics,
            }
            sys.stdout.write(f"numbers {json.dumps(numbers)}\n")
            sys.stdout.flush()


class LightningNumbers(_Numbers, pl.Callback):
    """For programs that import ``lightning``."""


class PytorchLightningNumbers(_Numbers, pytorch_lightning.Callback):
    """For programs that import ``pytorch_lightning``."""


def chemprop(strategy: str) -> None:
    """Train Chemprop's message passing network, on molecules and a made-up property."""
    from chemprop import data, featurizers, models, nn

    pl.seed_everything(1, workers=True)
    smiles = [f"{'C' * n}{end}" for n in range(1, 25) for end in ("O", "N", "Cl", "c1ccccc1")]
    points = [data.MoleculeDatapoint.from_smi(smi, [float(len(smi))]) for smi in smiles]
    featurizer = featurizers.SimpleMoleculeMolGraphFeaturizer()
    train = data.MoleculeDataset(points[:64], featurizer)
    valid = data.MoleculeDataset(points[64:], featurizer)
    valid.normalize_targets(train.normalize_targets())
    model = models.MPNN(
        nn.BondMessagePassing(), nn.MeanAggregation(), nn.RegressionFFN(), batch_norm=True
    )
    trainer = pl.Trainer(
        strategy=strategy,
        max_epochs=3,
        logger=False,
        callbacks=[LightningNumbers()],
        **ON_TWO_RANKS,
    )
    trainer.fit(
        model,
        data.build_dataloader(train, batch_size=8, num_workers=0),
        data.build_dataloader(valid, batch_size=8, num_workers=0, shuffle=False),
    )


def darts(strategy: str) -> None:
    """Train Darts' N-BEATS, on a sine with a trend."""
    from darts.models import NBEATSModel
    from darts.utils.timeseries_generation import linear_timeseries, sine_timeseries

    series = (sine_timeseries(length=300) + linear_timeseries(length=300)).astype(np.float32)
    trainer = {"strategy": strategy, "callbacks": [PytorchLightningNumbers()], **ON_TWO_RANKS}
    model = NBEATSModel(
        input_chunk_length=24,
        output_chunk_length=12,
        num_stacks=2,
        num_blocks=1,
        num_layers=2,
        layer_widths=16,
        batch_size=16,
        n_epochs=2,
        random_state=1,
        pl_trainer_kwargs=trainer,
    )
    model.fit(series[:201], val_series=series[201:])


def lightning_cli(strategy: str) -> None:
    """Run LightningCLI, with a model of Lightning's."""
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel

    words = [
        "fit",
        f"--trainer.strategy={strategy}",
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
        "--trainer.max_epochs=1",
        "--trainer.logger=false",
        "--trainer.callbacks=tests.programs.train.LightningNumbers",
        "--seed_everything=1",
    ]
    LightningCLI(DemoModel, BoringDataModule, args=words)


class Tuned(BoringModel):
    """A model with a learning rate to find."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


def optuna(strategy: str) -> None:
    """Run an Optuna study, whose first trial is pruned."""
    import optuna
    from optuna_integration import PyTorchLightningPruningCallback

    def objective(trial: optuna.Trial) -> float:
        pl.seed_everything(1)
        pruning = PyTorchLightningPruningCallback(trial, monitor="val_loss")
        trainer = pl.Trainer(
            strategy=f"{strategy}_fork",
            max_epochs=3,
            logger=False,
            enable_checkpointing=False,
            callbacks=[pruning, LightningNumbers()],
            **ON_TWO_RANKS,
        )
        trainer.fit(Tuned(trial.suggest_float("lr", 1e-4, 1e-1)))
        pruning.check_pruned()
        return trainer.callback_metrics["val_loss"].item()

    pruner = optuna.pruners.ThresholdPruner(upper=1.0, n_warmup_steps=1)
    study = optuna.create_study(storage="sqlite:///study.db", pruner=pruner)
    study.enqueue_trial({"lr": 0.1})
    study.enqueue_trial({"lr": 1e-4})
    study.optimize(objective, n_trials=2)
    sys.stdout.write(f"trials {[trial.state.name for trial in study.trials]}\n")


def scvi(strategy: str) -> None:
    """Train scVI's variational autoencoder, on the counts that scvi-tools makes up."""
    import scvi

    scvi.settings.seed = 1
    adata = scvi.data.synthetic_iid(batch_size=128)
    scvi.model.SCVI.setup_anndata(adata, batch_key="batch")
    model = scvi.model.SCVI(adata, n_latent=5)
    model.train(
        max_epochs=2,
        batch_size=32,
        strategy=f"{strategy}_find_unused_parameters_true",
        callbacks=[LightningNumbers()],
        **ON_TWO_RANKS,
    )


if __name__ == "__main__":
    program, strategy = sys.argv[1:]
    globals()[program](strategy)
