"""Predict on two ranks, and write all predictions on rank 0 in the dataset's order.

Run it: python examples/predict_and_gather.py
"""

import csv

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp_ext as ddpx


class Doubler(L.LightningModule):
    """Takes the place of a trained model; load your own with `load_from_checkpoint`."""

    def predict_step(self, batch: list[Tensor], _: int) -> dict[str, Tensor]:
        # Return one row per sample. Tuples, dicts and lists of such tensors also work.
        ids, x = batch
        return {"id": ids, "prediction": 2 * x}


if __name__ == "__main__":
    ids = torch.arange(41)
    loader = DataLoader(TensorDataset(ids, ids.float()), batch_size=8)

    trainer = L.Trainer(strategy="ddp_ext", accelerator="cpu", devices=2, logger=False)
    share = trainer.predict(Doubler(), loader)
    print(
        f"rank {trainer.global_rank} predicted {sum(len(batch['id']) for batch in share)} samples",
        flush=True,
    )

    everything = ddpx.gather_predictions(trainer)  # collective: every rank must call it
    if trainer.is_global_zero:
        rows = zip(everything["id"].tolist(), everything["prediction"].tolist(), strict=True)
        with open("predictions.csv", "w", newline="") as file:
            csv.writer(file).writerows([("id", "prediction"), *rows])
        in_order = everything["id"].equal(ids)
        print(
            f"predictions.csv has {len(everything['id'])} rows, in the dataset's order: {in_order}"
        )
