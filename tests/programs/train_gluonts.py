"""GluonTS' DeepAR, on sines."""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
from gluonts.dataset.pandas import PandasDataset
from gluonts.torch import DeepAREstimator
from lightning import pytorch as pl

import lightning_ddp_ext
from tests.programs.outcome import LightningNumbers


def main(strategy: str) -> None:
    pl.seed_everything(1)
    index = pd.period_range("2026-01-01", periods=120, freq="D")
    series = {
        str(n): pd.DataFrame({"target": np.sin(np.arange(120) / (n + 2))}, index=index)
        for n in range(8)
    }
    estimator = DeepAREstimator(
        freq="D",
        prediction_length=6,
        hidden_size=8,
        num_batches_per_epoch=6,
        batch_size=8,
        trainer_kwargs={
            "strategy": strategy,
            "accelerator": "cpu",
            "devices": 2,
            "max_epochs": 2,
            "enable_progress_bar": False,
            "callbacks": [LightningNumbers()],
        },
    )
    estimator.train(PandasDataset(series))


if __name__ == "__main__":
    main(*sys.argv[1:])
