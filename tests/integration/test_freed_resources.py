"""Runs of one process after another free their sockets, threads and memory."""

import gc
import itertools
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPExtStrategy
from tests.harness import training
from tests.harness.ranks import RankProcesses, announce, free_port, hold, run_ranks


def resources_of_trainers(
    rank: int, world_size: int, directory: Path, is_destroyed: bool
) -> list[tuple[int, int]]:
    """Return the numbers of descriptors and threads after each of five Trainers, none of
    which has the group of the one before: the script destroys it, or the next one needs
    another interface.
    """
    resources = []
    for number in range(5):
        interface = None if is_destroyed or number % 2 else "lo"
        strategy = DDPExtStrategy(f"file://{directory}/store", interface=interface)
        training.make_trainer(strategy, max_steps=1).fit(training.Net())
        if is_destroyed:
            dist.destroy_process_group()
        gc.collect()
        descriptors = len(os.listdir("/proc/self/fd"))
        resources.append((descriptors, len(os.listdir("/proc/self/task"))))
    return resources


@pytest.mark.parametrize("is_destroyed", [True, False], ids=["destroyed", "other interface"])
def test_groups_formed_one_after_another_free_their_sockets_and_threads(
    is_destroyed: bool, tmp_path: Path
) -> None:
    """A script may destroy the group after each fit, or alternate between network
    interfaces.
    """
    for resources in run_ranks(resources_of_trainers, 2, tmp_path, is_destroyed):
        _, second, *_, last = resources
        # A thread that looks for deadlocks may be reading at that moment; a leak adds
        # some for each group.
        assert last[0] <= second[0] + 1, resources
        assert last[1] <= second[1] + 1, resources


def kept_by_late_start(rank: int, world_size: int, url: str) -> list[str]:
    """Fit, on rank 0 only after another rank has failed to connect to it; return what is
    in memory once the script has dropped it.
    """
    attempts = itertools.count(1)

    def announce_second_attempt(event: str, arguments: Any) -> None:
        if event == "socket.connect" and next(attempts) == 2:
            announce("refused")

    if rank == 0:
        hold("late")
    else:
        sys.addaudithook(announce_second_attempt)
    trainer = training.make_trainer(DDPExtStrategy(url), max_steps=1)
    model = training.Net()
    parts = [weakref.ref(part) for part in (trainer, trainer.strategy, model)]
    trainer.fit(model)
    del trainer, model
    gc.collect()
    return [type(part()).__name__ for part in parts if part() is not None]


def test_a_rank_that_was_refused_at_first_frees_its_trainer() -> None:
    """Rank 0 starts last."""
    with RankProcesses(kept_by_late_start, 2, f"tcp://127.0.0.1:{free_port()}") as ranks:
        ranks.wait_for("late", 0)
        ranks.wait_for("refused", 1)
        ranks.release(0)
        assert [outcome.result for outcome in ranks.wait()] == [[], []]


class Reloaded(training.Net):
    """Makes a new loader for each epoch; counts the datasets in memory when it starts."""

    def __init__(self) -> None:
        super().__init__()
        self.datasets: list[weakref.ref[Any]] = []
        self.alive: list[int] = []

    def train_dataloader(self) -> DataLoader[Any]:
        dataset = training.data()
        self.datasets.append(weakref.ref(dataset))
        return DataLoader(dataset, 4)

    def on_train_epoch_start(self) -> None:
        self.alive.append(sum(dataset() is not None for dataset in self.datasets))


def fit_reloaded(kind: training.Kind, directory: Path) -> list[int]:
    model = Reloaded()
    gc.disable()  # in this rank's process, so that only references keep a dataset
    training.fit(kind, directory, model, reload_dataloaders_every_n_epochs=1, max_epochs=4)
    return model.alive


def test_loaders_that_are_made_again_are_freed_at_once(tmp_path: Path) -> None:
    """As with stock, memory and workers of earlier epochs do not wait for a collection."""
    ours, stock = training.on_both(fit_reloaded, tmp_path)
    assert ours == stock == [[1, 1, 1, 1]] * 2
