"""Do once, in the server of rank processes, what each rank would otherwise repeat:
imports, look-ups, and the work of a first run.

The server imports this module before any other. Garbage collection is off meanwhile: it
would take a tenth of the time and free nothing.
"""

import functools
import gc
import importlib
import importlib.metadata
import logging
import warnings
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
    import torch

    from tests.harness.training import Net, make_trainer

    class Module(Net):
        automatic_optimization = False

    # After a query of CUDA, forked processes count as unable to use it.
    no_query = patch.multiple(torch.cuda, device_count=lambda: 0, is_available=lambda: False)
    with torch.random.fork_rng([]), no_query:
        make_trainer("auto", devices=1, max_epochs=1).fit(Module())


gc.disable()
# Each Trainer reads the metadata of all installed packages, which takes longer than the
# rest of its constructor.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
for _name in _MODULES:
    importlib.import_module(_name)
logging.disable()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    warm_up()
logging.disable(logging.NOTSET)
gc.enable()
