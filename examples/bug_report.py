"""Reproduce a problem: change the model until the script fails, and report the script
with its complete output.

Run python examples/bug_report.py. To use stock Lightning's strategy, append the
argument "ddp".
"""

import sys
from importlib import metadata

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_ddp_ext  # noqa: F401 - registers the strategy "ddp_ext"


class Model(BoringModel):
    """Put the failing code here."""


if __name__ == "__main__":
    L.seed_everything(1)
    trainer = L.Trainer(
        strategy=sys.argv[1] if len(sys.argv) > 1 else "ddp_ext",
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        limit_train_batches=10,
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model)
    if trainer.is_global_zero:
        print(
            f"after {trainer.global_step} steps the weights sum to"
            f" {model.layer.weight.sum().item():.6f}",
            flush=True,
        )
        for package in ("torch", "lightning", "lightning-ddp-ext"):
            print(package, metadata.version(package), flush=True)
