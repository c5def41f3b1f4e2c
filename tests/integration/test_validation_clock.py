"""Validation after a span of time comes on all ranks at once, whatever their clocks say."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.harness.ranks import by_hand_env, run_ranks
from tests.harness.training import make_strategy, make_trainer
from tests.integration.continuing import Net, Stream
from tests.integration.resumed_runs import SavesAtAll, Training, difference, ordered

INTERVAL = timedelta(seconds=250)
A_BATCH = 100.0  # seconds that a batch takes by rank 0's clock
OTHERS = {"the same": A_BATCH, "fast": 1000.0, "slow": 1.0}  # by that of rank 1
EPOCHS, BATCHES = 3, 8


class Clock:
    """A clock that goes on by so many seconds with each batch, for the thread that trains."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self._real = time.monotonic

    def __call__(self) -> float:
        is_training = threading.current_thread() is threading.main_thread()
        return self._real() + (self.ahead if is_training else 0.0)

    @contextmanager
    def shown(self) -> Iterator[None]:
        time.monotonic = self
        try:
            yield
        finally:
            time.monotonic = self._real


class Timed(Net):
    """Writes down after how many batches it is validated, and needs all ranks for that."""

    def __init__(self, loaders: Any, clock: Clock, a_batch: float) -> None:
        super().__init__(loaders)
        self.layers[1] = nn.Identity()
        self.clock, self.a_batch = clock, a_batch
        self.validated_after: list[int] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.clock.ahead += self.a_batch
        return super().training_step(batch, index)

    def on_validation_start(self) -> None:
        self.validated_after.append(len(self.steps))

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("steps", float(len(self.steps)), sync_dist=True)


def train(rank: int, world_size: int, directory: Path, other: str, stream: bool, **options: Any) -> list[int]:
    def loaders() -> DataLoader[Any]:
        data = Stream(2 * BATCHES, rank)
        return DataLoader(data, 2) if stream else ordered("lightning's", 4 * BATCHES, rank, world_size)

    clock = Clock()
    model = Timed(loaders, clock, A_BATCH if rank == 0 else OTHERS[other])
    chosen = {"max_epochs": EPOCHS, "val_check_interval": INTERVAL, "num_sanity_val_steps": 0, **options}
    with clock.shown():
        make_trainer(make_strategy("ours", directory), **chosen).fit(model)
    assert len(model.steps) == EPOCHS * BATCHES
    return model.validated_after


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("stream", [False, True], ids=["samples", "stream"])
def test_rank_zeros_clock_decides_when_all_validate(stream: bool, other: str, tmp_path: Path) -> None:
    """All ranks validate after the same batches, each time that so many seconds have passed on rank 0."""
    first, second = run_ranks(train, 2, tmp_path, other, stream, env=by_hand_env(2), time_limit=40)
    assert first == second
    _assert_in_time(first)


@pytest.mark.parametrize("other", OTHERS)
def test_rank_zeros_clock_goes_on_from_epoch_to_epoch(other: str, tmp_path: Path) -> None:
    """So it is with ``check_val_every_n_epoch=None``."""
    options = {"check_val_every_n_epoch": None}
    first, second = run_ranks(train, 2, tmp_path, other, False, env=by_hand_env(2), time_limit=40, **options)
    assert first == second
    _assert_in_time(first)


def _assert_in_time(validated_after: list[int]) -> None:
    """Never before the span has passed, and not much later."""
    spans = [later - earlier for earlier, later in zip([0, *validated_after], validated_after, strict=False)]
    is_last = [number == EPOCHS * BATCHES or number % BATCHES == 0 for number in validated_after]
    assert all(span >= 3 or last for span, last in zip(spans, is_last, strict=True)), validated_after
    assert max(spans) <= 5, validated_after
    assert EPOCHS * BATCHES - validated_after[-1] <= 5, validated_after


def save_and_resume(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    options = {"val_check_interval": timedelta(hours=1), "limit_val_batches": 1.0, "dropout": False, "max_epochs": 3}
    training = Training(lambda: ordered("lightning's", 16, rank, world_size), directory, 2, options)
    whole = training.run(saver=SavesAtAll(["train_batch_end", "train_epoch_end"], directory / "saved"))
    chosen = [each for each in whole.saved if each[1] in (1, 4, 6)]
    found = {Path(path).stem: difference(training, whole, done, training.run(ckpt_path=path)) for path, done in chosen}
    return {name: wrong for name, wrong in found.items() if wrong}


def test_a_run_that_validates_by_the_clock_can_be_resumed(tmp_path: Path) -> None:
    """The batches that are left are the same, and whole epochs follow."""
    assert run_ranks(save_and_resume, 2, tmp_path, env=by_hand_env(2), time_limit=40) == [{}, {}]
