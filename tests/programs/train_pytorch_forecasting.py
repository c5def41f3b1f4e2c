"""PyTorch Forecasting's temporal fusion transformer, on the series that it makes up."""

from __future__ import annotations

import sys
import warnings

import lightning.pytorch as pl
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data.examples import generate_ar_data

import lightning_ddp_ext
from tests.programs.outcome import LightningNumbers


def main(strategy: str) -> None:
    pl.seed_everything(1)
    data = generate_ar_data(seasonality=10.0, timesteps=60, n_series=16, seed=1)
    data["series"] = data["series"].astype(str)
    training = TimeSeriesDataSet(
        data[lambda x: x.time_idx < 50],
        time_idx="time_idx",
        target="value",
        group_ids=["series"],
        max_encoder_length=20,
        max_prediction_length=10,
        time_varying_unknown_reals=["value"],
    )
    validation = TimeSeriesDataSet.from_dataset(
        training, data, predict=True, stop_randomization=True
    )
    model = TemporalFusionTransformer.from_dataset(training, hidden_size=8, attention_head_size=1)
    trainer = pl.Trainer(
        strategy=f"{strategy}_find_unused_parameters_true",
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        limit_train_batches=6,
        gradient_clip_val=0.1,
        logger=False,
        enable_progress_bar=False,
        callbacks=[LightningNumbers()],
    )
    trainer.fit(
        model,
        training.to_dataloader(train=True, batch_size=16, num_workers=0),
        validation.to_dataloader(train=False, batch_size=4, num_workers=0),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
