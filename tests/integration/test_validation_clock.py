"""All ranks validate after the same batch with an interval in time, whatever their
clocks show.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils.data import DataLoader

from tests.harness.ranks import run_ranks
from tests.integration.continuing import Net, Numbers, Stream, Training

INTERVAL = timedelta(seconds=250)
A_BATCH = 100.0  # seconds that a batch takes by rank 0's clock
EPOCHS = 3
BATCHES = 8


class Clock(list[float]):
    """What the thread that trains takes for the time: the real one, and the sum of
    these seconds.
    """

    real = staticmethod(time.monotonic)

    def __call__(self) -> float:
        return self.real() + (
            sum(self) if threading.current_thread() is threading.main_thread() else 0.0
        )


def train(rank: int, world_size: int, directory: Path) -> list[list[int]]:
    """After which batches this rank has validated, with a quick and with a slow clock
    on rank 1.
    """
    validated_after: list[list[int]] = []

    class Timed(Net):
        """Needs all ranks for a validation."""

        def training_step(self, batch: Any, index: int) -> Tensor:
            ahead.append(of_rank_1 if rank else A_BATCH)
            return super().training_step(batch, index)

        def on_validation_start(self) -> None:
            validated_after[-1].append(len(self.steps))

        def validation_step(self, batch: Tensor, index: int) -> None:
            self.log("steps", float(len(self.steps)), sync_dist=True)

    common = {
        "max_epochs": EPOCHS,
        "val_check_interval": INTERVAL,
        "limit_val_batches": 1.0,
        "model": Timed,
    }
    for of_rank_1, options in ((1000.0, {}), (1.0, {"check_val_every_n_epoch": None})):
        validated_after.append([])
        data = Stream(2 * BATCHES, rank) if of_rank_1 > 1 else Numbers(4 * BATCHES)
        with mock.patch.object(time, "monotonic", ahead := Clock()):
            run = Training(
                lambda data=data: DataLoader(data, 2), directory, options={**common, **options}
            ).run()
        assert len(run.steps) == EPOCHS * BATCHES
    return validated_after


def test_rank_zeros_clock_decides_when_all_validate(tmp_path: Path) -> None:
    """All ranks validate after the same batches: when the span has passed on rank 0, or
    one batch later.
    """
    found, others = run_ranks(train, 2, tmp_path)
    assert found == others
    for validated in found:
        spans = [
            later - earlier for earlier, later in zip([0, *validated], validated, strict=False)
        ]
        assert all(
            span >= 3 or number % BATCHES == 0
            for span, number in zip(spans, validated, strict=True)
        ), validated
        assert max(spans) <= 4, validated
        assert EPOCHS * BATCHES - validated[-1] <= 4, validated
