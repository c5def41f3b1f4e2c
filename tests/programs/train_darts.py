"""Darts' N-BEATS, on a sine with a trend."""

from __future__ import annotations

import sys

import numpy as np
from darts.models import NBEATSModel
from darts.utils.timeseries_generation import linear_timeseries, sine_timeseries

import lightning_ddp_ext.pytorch_lightning
from tests.programs.outcome import PytorchLightningNumbers


def main(strategy: str) -> None:
    series = (sine_timeseries(length=300) + linear_timeseries(length=300)).astype(np.float32)
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
        pl_trainer_kwargs={
            "strategy": strategy,
            "accelerator": "cpu",
            "devices": 2,
            "enable_progress_bar": False,
            "callbacks": [PytorchLightningNumbers()],
        },
    )
    model.fit(series[:201], val_series=series[201:])


if __name__ == "__main__":
    main(*sys.argv[1:])
