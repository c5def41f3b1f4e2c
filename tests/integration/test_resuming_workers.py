"""Workers that stay from one epoch to the next read what is left after a resume, and then whole epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from tests.harness.ranks import by_hand_env, run_ranks
from tests.integration.continuing import Moment
from tests.integration.resumed_runs import (
    Order,
    Training,
    ValidatesWithWorkers,
    differences,
    ordered,
    point,
    workers,
)

BATCHES = 4  # of an epoch, on each rank; the last one is half a batch
EPOCHS = 4
ORDERS = get_args(Order)
KEPT = workers(persistent_workers=True)
MOMENTS: tuple[Moment, ...] = ("train_batch_start", "train_batch_end", "validation_end", "train_epoch_end", "train_end")
POINTS = {  # steps that were done, of epochs of four
    "train_batch_start-1": "in the midst of the first epoch",
    "train_batch_start-4": "before the second epoch's first batch",
    "train_batch_start-7": "before an epoch's last batch",
    "train_batch_end-1": "in the midst of the first epoch",
    "train_batch_end-4": "after the first epoch's last batch",
    "train_batch_end-6": "in the midst of the second epoch",
    "train_batch_end-8": "after the second epoch's last batch",
    "validation_end-2": "in the midst of an epoch",
    "validation_end-4": "at the end of an epoch",
    "validation_end-6": "in the midst of the second epoch",
    "validation_end-8": "at the end of the second epoch",
    "train_epoch_end-4": "at the end of the first epoch",
    "train_epoch_end-8": "at the end of the second epoch",
    "train_end-16": "when nothing is left",
}


def training_of(
    order: Order, rank: int, world_size: int, directory: Path, *, read_by: dict[str, Any] = KEPT, **options: Any
) -> Training:
    samples = (2 * BATCHES - 1) * (1 if order == "drawn" else world_size)  # nobody shares out what is drawn
    fitting = {"use_distributed_sampler": order in ("lightning's", "distributed"), **options}
    return Training(
        lambda: ordered(order, samples, rank, world_size, **read_by), directory, world_size, fitting, name=order
    )


def stop_anywhere(rank: int, world_size: int, directory: Path, order: Order) -> dict[str, str]:
    """What differs from a run without a stop, by the point at which it was saved."""
    options = {"limit_val_batches": 1.0, "val_check_interval": 2, "dropout": False, "kind": ValidatesWithWorkers}
    training = training_of(order, rank, world_size, directory, **options)
    whole = training.run()
    assert len(whole.steps) == BATCHES * EPOCHS
    saved = [each for each in training.saving("all", *MOMENTS).saved if point(each[0]) in POINTS]
    assert len(saved) == len(POINTS)
    found = differences(training, whole, saved)
    for number, fail_at in enumerate([(0, 1), (1, BATCHES - 1), (0, BATCHES - 1)]):
        stopped = training.saving(f"failed-{number}", "exception", fail_at=fail_at)
        found |= differences(training, whole, stopped.saved)
    ended = training.saving("ended", "train_end", max_epochs=2)
    return found | differences(training, whole, ended.saved)


@pytest.mark.parametrize("order", ["lightning's", "distributed", "plain"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_workers_that_stay_read_what_is_left_and_then_whole_epochs(
    world_size: int, order: Order, tmp_path: Path
) -> None:
    """Wherever it was stopped, a resumed run trains on the batches that were left and on whole epochs afterwards."""
    found = run_ranks(stop_anywhere, world_size, tmp_path, order, env=by_hand_env(world_size), time_limit=110)
    assert found == [{}] * world_size


def stop_with_dropout(rank: int, world_size: int, directory: Path) -> dict[str, dict[str, str]]:
    found = {}
    for order in ORDERS:
        training = training_of(order, rank, world_size, directory)
        whole = training.saving("all", "train_batch_start", "train_batch_end", "train_epoch_end")
        stops = (1, 3, 6) if order == "drawn" else (1, 3, 4, 6)
        found[order] = differences(training, whole, [each for each in whole.saved if each[1] in stops])
    return found


def test_random_numbers_go_on_beside_workers_that_stay(tmp_path: Path) -> None:
    """Dropout and a RandomSampler draw the numbers that they would have drawn, in the epoch and in all later ones."""
    found = run_ranks(stop_with_dropout, 2, tmp_path, env=by_hand_env(2), time_limit=110)
    assert found == [{order: {} for order in ORDERS}] * 2


def stop_between_epochs(rank: int, world_size: int, directory: Path) -> dict[str, dict[str, str]]:
    found = {}
    for name, read_by in {"none": {}, "new ones": workers()}.items():
        training = training_of("drawn", rank, world_size, directory, read_by=read_by)
        training.name = name
        whole = training.saving("all", "train_batch_end", "train_epoch_end")
        saved = [each for each in whole.saved if each[1] in (BATCHES, 2 * BATCHES)]
        found[name] = differences(training, whole, saved)
    return found


def test_an_epoch_whose_order_is_drawn_has_that_order_after_a_resume(tmp_path: Path) -> None:
    """Saved at the end of an epoch, a RandomSampler without a generator draws the next one's order as it would have."""
    found = run_ranks(stop_between_epochs, 2, tmp_path, env=by_hand_env(2), time_limit=110)
    assert found == [{"none": {}, "new ones": {}}] * 2


def save_and_limit(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    """An epoch that is cut short by a limit leaves its workers with batches that nobody has fetched."""
    training = training_of("lightning's", rank, world_size, directory, limit_train_batches=3, dropout=False)
    whole = training.saving("all", "train_batch_end", "train_epoch_end")
    return differences(training, whole, [each for each in whole.saved if each[1] <= 4])


def test_a_limited_epoch_with_workers_that_stay_is_limited_after_a_resume(tmp_path: Path) -> None:
    """Each epoch has as many batches as the limit says, before and after a resume, and begins with its first one."""
    assert run_ranks(save_and_limit, 2, tmp_path, env=by_hand_env(2), time_limit=110) == [{}] * 2
