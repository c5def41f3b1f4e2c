"""scVI's variational autoencoder, on the counts that scvi-tools makes up."""

from __future__ import annotations

import sys

import scvi

import lightning_ddp_ext
from tests.programs.outcome import LightningNumbers


def main(strategy: str) -> None:
    scvi.settings.seed = 1
    adata = scvi.data.synthetic_iid(batch_size=128)
    scvi.model.SCVI.setup_anndata(adata, batch_key="batch")
    model = scvi.model.SCVI(adata, n_latent=5)
    model.train(
        max_epochs=2,
        batch_size=32,
        accelerator="cpu",
        devices=2,
        strategy=f"{strategy}_find_unused_parameters_true",
        enable_progress_bar=False,
        callbacks=[LightningNumbers()],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
