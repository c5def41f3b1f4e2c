"""Reproduce a problem: change the model until the script fails, and report the script
with its complete output.

python examples/bug_report.py
python examples/bug_report.py ddp            # uses stock Lightning's strategy
python examples/bug_report.py --debug 1      # rank 1 waits for a debugger
"""

import argparse
from importlib import metadata

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_ddp_ext as ddpx


class Model(BoringModel):
    """Put the failing code here."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy", nargs="?", default="ddp_ext")
    parser.add_argument("--debug", type=int, metavar="RANK")
    options = parser.parse_args()
    debuggers = []
    if options.debug is not None:
        debuggers.append(ddpx.RankDebugger(options.debug))

    L.seed_everything(1)
    trainer = L.Trainer(
        strategy=options.strategy,
        accelerator="cpu",
        devices=2,
        callbacks=debuggers,
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
