"""Neuralforecast's NHITS, on sines."""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS

import lightning_ddp_ext.pytorch_lightning
from tests.programs.outcome import PytorchLightningNumbers


def main(strategy: str) -> None:
    steps = np.arange(120)
    days = pd.date_range("2026-01-01", periods=len(steps))
    frames = [
        pd.DataFrame({"unique_id": f"s{n}", "ds": days, "y": np.sin(steps / (n + 2))})
        for n in range(8)
    ]
    model = NHITS(
        h=6,
        input_size=24,
        max_steps=10,
        val_check_steps=5,
        batch_size=2,
        mlp_units=[[16, 16]] * 3,
        random_seed=1,
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        enable_progress_bar=False,
        logger=False,
        callbacks=[PytorchLightningNumbers()],
    )
    NeuralForecast(models=[model], freq="D").fit(pd.concat(frames), val_size=6)


if __name__ == "__main__":
    main(*sys.argv[1:])
