"""Loaders that begin again within an epoch, or have a state of their own, continue."""

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.harness.ranks import run_ranks
from tests.integration import continuing
from tests.integration.continuing import Numbers, Training

# Several loaders.


def short_and_long(mode: Literal["max_size", "max_size_cycle"]) -> CombinedLoader:
    """Return loaders of 4 and 10 batches."""
    own = torch.Generator().manual_seed(20)
    short = DataLoader(Numbers(8), 2, shuffle=True)
    long = DataLoader(Numbers(20), 2, shuffle=True, generator=own)
    return CombinedLoader([short, long], mode)


def resume_two_loaders(
    rank: int, world_size: int, directory: Path, mode: Any, point: str
) -> dict[str, str]:
    """Return the differences of a run that resumes within an optimiser step."""
    options = {
        "model": continuing.WITHOUT_DROPOUT,  # random numbers within a step are not repeated
        "use_distributed_sampler": False,
        "accumulate_grad_batches": 2,
    }
    loaders = partial(short_and_long, mode)
    training = Training(loaders, directory, devices=world_size, options=options)
    return continuing.generations(training, [point])


# Each point is within an optimiser step of two batches, after the end of the shorter loader.
@pytest.mark.parametrize(
    ("mode", "point"), [("max_size", "train_batch_end-7"), ("max_size_cycle", "train_batch_end-5")]
)
def test_a_loader_that_is_longer_than_the_first_one_continues(
    mode: str, point: str, tmp_path: Path
) -> None:
    """The step that is repeated begins after the first loader's end."""
    assert run_ranks(resume_two_loaders, 1, tmp_path, mode, point) == [{}]


BATCHES_IN_STEP = 8


def continue_in_a_long_step(rank: int, world_size: int, directory: Path) -> bool:
    """Return whether a run that resumes in the second step trains on all of its batches."""

    def loaders() -> CombinedLoader:
        one_batch = continuing.shuffled(6, batch_size=6)
        return CombinedLoader([continuing.shuffled(40)(), one_batch()], "max_size_cycle")

    options = {
        "model": continuing.WITHOUT_DROPOUT,
        "max_epochs": 1,
        "use_distributed_sampler": False,
        "callbacks": [GradientAccumulationScheduler({0: BATCHES_IN_STEP})],
    }
    training = Training(loaders, directory, options=options)
    point = f"train_batch_end-{2 * BATCHES_IN_STEP - 1}"
    whole = training.run(point)
    resumed = training.run(ckpt_path=whole.saved[point])
    return resumed.steps == whole.steps[BATCHES_IN_STEP:]


def test_a_loader_that_begins_again_in_each_batch_of_a_long_step_continues(tmp_path: Path) -> None:
    """A callback sets how many batches a step has. A resumed run repeats the step, and no
    batch is lost.
    """
    assert run_ranks(continue_in_a_long_step, 2, tmp_path) == [True, True]


# Loaders that have a state. Each epoch has five batches, and a step has two of them or
# the last one.

OPTIONS = {"model": continuing.WITHOUT_DROPOUT, "accumulate_grad_batches": 2}


class ByHand(DataLoader[Any]):
    """Loads a stream, and has no more than the two methods that Lightning needs for its state.

    Like torchdata's loader, it counts a batch when it is fetched, and a restored state
    is for the next iterator only.
    """

    given = start = 0

    def __iter__(self) -> Any:
        self.given = self.start
        self.start = 0
        return self._batches(self.given)

    def _batches(self, start: int) -> Any:
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self.given += 1
                yield batch
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "first": self.dataset.numbers[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # As a reader of files continues at its place in the file.
        self.dataset.numbers = range(state["first"], state["first"] + len(self.dataset.numbers))
        self.start = state["given"]


def continue_by_hand(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    """Return the differences of runs that resume within a step, and after one."""
    loaders = partial(ByHand, continuing.Stream(9, rank), batch_size=2)
    training = Training(loaders, directory, options={"max_epochs": 2, **OPTIONS})
    return continuing.generations(
        training, ["train_batch_end-1", "train_batch_end-4"], ["train_batch_end-7"]
    )


def test_each_rank_continues_with_the_state_of_its_own_loader(tmp_path: Path) -> None:
    """No batch is lost or repeated, also where a run resumes within an optimiser step."""
    assert run_ranks(continue_by_hand, 2, tmp_path) == [{}, {}]


def continue_stateful_stream(
    rank: int, world_size: int, directory: Path, workers: int
) -> dict[str, str]:
    """Return the differences of runs that resume within an epoch, and at the end of one."""
    options = continuing.workers(workers) if workers else {}
    stream = continuing.Stream(12, rank)
    loaders = partial(StatefulDataLoader, stream, batch_size=2, **options)
    training = Training(loaders, directory, options={"model": continuing.WITHOUT_DROPOUT})
    points = ["train_batch_end-2", "train_epoch_end-6"]
    return continuing.generations(training, points, ["train_batch_end-9"])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_continues_in_a_stateful_data_loader(workers: int, tmp_path: Path) -> None:
    """Torchdata's loader reads the stream again up to its place."""
    assert run_ranks(continue_stateful_stream, 2, tmp_path, workers) == [{}, {}]


class LikeLitdata(DataLoader[Any]):
    """Forgets a restored state only when an iterator is read to its end, as litdata's
    loader does.
    """

    given = 0
    is_restored = False

    def __iter__(self) -> Any:
        start = self.given if self.is_restored else 0
        self.given = start
        for batch in islice(DataLoader.__iter__(self), start, None):
            self.given += 1
            yield batch
        self.is_restored = False

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]
        self.is_restored = True


def continue_like_litdata(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    """Return the differences of runs that resume after a step, and again within one."""
    options = {"max_epochs": 3, "use_distributed_sampler": False, **OPTIONS}
    training = Training(partial(LikeLitdata, Numbers(10), 2), directory, options=options)
    return continuing.generations(training, ["train_batch_end-2"], ["train_batch_end-8"])


def test_a_state_that_a_loader_keeps_until_the_epochs_end_is_restored_once(tmp_path: Path) -> None:
    """With a loader like litdata's no batch is lost or repeated."""
    assert run_ranks(continue_like_litdata, 2, tmp_path) == [{}, {}]
