"""Validate on all ranks after the same batch with ``Trainer(val_check_interval=timedelta(...))``.

Lightning has each rank ask its own clock, so that one validates while another trains. Here rank 0's clock decides for
all, by a broadcast before each batch, where stock Lightning has one for signals.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist

from .compat import last_validation_of, set_last_validation, validation_interval_of


class TimedValidation:
    """When the next validation is due, by rank 0's clock."""

    def __init__(self) -> None:
        self._last = math.inf

    def before_batch(self, trainer: Any) -> None:
        """Find out whether a validation is due after the next batch. Collective, if validation goes by the clock."""
        interval, last = validation_interval_of(trainer), last_validation_of(trainer)
        if interval is None or last is None or trainer.world_size == 1:
            return
        if math.isfinite(last):  # there has been one since, or training has just begun
            self._last = last
        due = torch.tensor(time.monotonic() - self._last >= interval, device=trainer.strategy.root_device)
        dist.broadcast(due, src=0)
        # Lightning compares this time with the clock after the batch.
        set_last_validation(trainer, -math.inf if due else math.inf)
