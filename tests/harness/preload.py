"""Import and look up, once in the server of rank processes, all that they need; import this before any of Lightning.

Garbage collection is off meanwhile: it would take a tenth of the time and find nothing.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.metadata

_IMPORTED = (
    *("torch.distributed", "lightning.pytorch", "torchmetrics", "pytest", "hypothesis", "tests.harness.ranks"),
    # Imported by each first run and first save.
    *("torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook", "torch.utils.serialization.config"),
    *("fsspec.implementations.chained", "encodings.idna"),
)

gc.disable()
# Each Trainer reads the metadata of all installed packages, which takes longer than all else that its constructor does.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
for _name in _IMPORTED:
    importlib.import_module(_name)
gc.enable()
