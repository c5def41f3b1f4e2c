"""With a validation interval in time, rank 0's clock decides when all ranks validate."""

import math
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.utils.data import DataLoader, Dataset

from tests.harness import training
from tests.harness.ranks import run_ranks

EPOCHS = 3
BATCHES = 10  # of a rank in an epoch
BATCH_SIZE = 2
# By rank 0's clock; so long that the real time of a batch makes no difference.
TIME_OF_A_BATCH = timedelta(hours=10)
INTERVAL = timedelta(hours=25)
# Before each batch rank 0 decides whether all ranks validate after it. So they validate
# one batch after the interval has passed.
PERIOD = math.ceil(INTERVAL / TIME_OF_A_BATCH) + 1  # batches


class FastClock:
    """Replaces ``time.monotonic``, and shows the main thread more seconds than passed."""

    def __init__(self) -> None:
        self.seconds_ahead = 0.0
        self._real = time.monotonic

    def __call__(self) -> float:
        is_main = threading.current_thread() is threading.main_thread()
        return self._real() + (self.seconds_ahead if is_main else 0.0)


SHARED = training.data(2 * BATCHES * BATCH_SIZE)  # by two ranks


class Timed(training.Net):
    """Lets time pass in each batch, and counts the batches before each validation."""

    def __init__(self, clock: FastClock, time_of_a_batch: timedelta, dataset: Dataset[Any]) -> None:
        super().__init__()
        self.clock = clock
        self.time_of_a_batch = time_of_a_batch
        self.dataset = dataset
        self.batches = 0
        self.validated_after: list[int] = []

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, BATCH_SIZE)

    def training_step(self, batch: training.Batch, index: int) -> Any:
        self.clock.seconds_ahead += self.time_of_a_batch.total_seconds()
        self.batches += 1
        return super().training_step(batch, index)

    def on_validation_start(self) -> None:
        self.validated_after.append(self.batches)


def train(
    rank: int,
    world_size: int,
    directory: Path,
    time_on_rank_1: timedelta,
    dataset: Dataset[Any],
    check_val_every_n_epoch: int | None,
) -> list[int]:
    """Return the numbers of batches after which this rank validated.

    A batch takes ``TIME_OF_A_BATCH`` by rank 0's clock, and ``time_on_rank_1`` there.
    """
    clock = FastClock()
    model = Timed(clock, TIME_OF_A_BATCH if rank == 0 else time_on_rank_1, dataset)
    options = {
        "max_epochs": EPOCHS,
        "num_sanity_val_steps": 0,
        "val_check_interval": INTERVAL,
        "check_val_every_n_epoch": check_val_every_n_epoch,
    }
    with mock.patch.object(time, "monotonic", clock):
        training.fit("ours", directory, model, **options)
    return model.validated_after


@pytest.mark.parametrize(
    ("time_on_rank_1", "dataset", "check_val_every_n_epoch"),
    [
        pytest.param(10 * TIME_OF_A_BATCH, training.Rows(BATCHES * BATCH_SIZE), 1, id="faster"),
        pytest.param(TIME_OF_A_BATCH / 100, SHARED, None, id="slower"),
    ],
)
def test_all_ranks_validate_by_rank_zeros_clock(
    time_on_rank_1: timedelta,
    dataset: Dataset[Any],
    check_val_every_n_epoch: int | None,
    tmp_path: Path,
) -> None:
    """A rank whose clock is faster or slower validates after the same batches as rank 0,
    also in the middle of epochs.
    """
    expected = [*range(PERIOD, EPOCHS * BATCHES + 1, PERIOD)]
    case = (time_on_rank_1, dataset, check_val_every_n_epoch)
    assert run_ranks(train, 2, tmp_path, *case) == [expected] * 2
