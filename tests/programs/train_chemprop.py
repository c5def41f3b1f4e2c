"""Chemprop's message passing network, on molecules and a made-up property."""

from __future__ import annotations

import sys

from chemprop import data, featurizers, models, nn
from lightning import pytorch as pl

import lightning_ddp_ext
from tests.programs.outcome import LightningNumbers

SMILES = [f"{'C' * n}{end}" for n in range(1, 25) for end in ("O", "N", "Cl", "c1ccccc1")]


def main(strategy: str) -> None:
    pl.seed_everything(1, workers=True)
    points = [data.MoleculeDatapoint.from_smi(smi, [float(len(smi))]) for smi in SMILES]
    featurizer = featurizers.SimpleMoleculeMolGraphFeaturizer()
    train = data.MoleculeDataset(points[:64], featurizer)
    valid = data.MoleculeDataset(points[64:], featurizer)
    valid.normalize_targets(train.normalize_targets())
    model = models.MPNN(
        nn.BondMessagePassing(), nn.MeanAggregation(), nn.RegressionFFN(), batch_norm=True
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        callbacks=[LightningNumbers()],
    )
    trainer.fit(
        model,
        data.build_dataloader(train, batch_size=8, num_workers=0),
        data.build_dataloader(valid, batch_size=8, num_workers=0, shuffle=False),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
