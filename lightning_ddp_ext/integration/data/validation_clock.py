"""Let rank 0's clock decide when the ranks validate."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist

from ..private.compat import set_last_validation, validation_interval_of


def schedule_timed_validation(trainer: Any, validated_at: float) -> None:
    """Make either all ranks or none validate after the next batch.

    This is for ``val_check_interval=timedelta(...)``. In Lightning each rank reads its
    own clock, so one rank may validate while another trains. Here rank 0's clock
    decides. Collective if such an interval is set.

    Args:
        trainer: the Trainer.
        validated_at: the value of ``time.monotonic()`` at the last validation, or at
            the start of training.
    """
    interval = validation_interval_of(trainer)
    if interval is None or trainer.world_size == 1:
        return
    is_due_here = time.monotonic() - validated_at >= interval
    is_due = torch.tensor(int(is_due_here), device=trainer.strategy.root_device)
    dist.broadcast(is_due, src=0)
    # After the batch, Lightning subtracts this from its clock and compares the interval.
    set_last_validation(trainer, -math.inf if is_due else math.inf)
