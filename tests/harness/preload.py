"""Import, look up and run, once in the server of rank processes, what all of them need.

The server imports this module before any other. Garbage collection is off meanwhile: it
would take a tenth of the time and find nothing.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.metadata
import logging
import warnings
from typing import Any
from unittest.mock import patch

_MODULES = (
    "torch.distributed",
    "lightning.pytorch",
    "torchmetrics",
    "pytest",
    "hypothesis",
    "tests.harness.ranks",
    # Imported by each first run and first save.
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
    "torch.utils.serialization.config",
    "fsspec.implementations.chained",
    "encodings.idna",
)


def warm_up() -> None:
    """Fill the caches of a first run, which takes twice as long as a later one.

    Without a backward pass, which would start threads.
    """
    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    class Module(L.LightningModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch: torch.Tensor, index: int) -> None:
            self.log("loss", self.layer(batch).mean(), on_step=True, on_epoch=True, sync_dist=True)

        validation_step = training_step

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    data: Any = torch.ones(4, 4)
    # After a query of CUDA, forked processes count as unable to use it.
    no_query = patch.multiple(torch.cuda, device_count=lambda: 0, is_available=lambda: False)
    with torch.random.fork_rng([]), no_query:
        trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, **quiet)
        trainer.fit(Module(), DataLoader(data), DataLoader(data))


gc.disable()
# Each Trainer reads the metadata of all installed packages, which takes longer than all
# else that its constructor does.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
for _name in _MODULES:
    importlib.import_module(_name)
logging.disable()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    warm_up()
logging.disable(logging.NOTSET)
gc.enable()
