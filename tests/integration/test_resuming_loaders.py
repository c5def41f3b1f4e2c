"""Loaders that are read in parts, or record a state, continue there in a resumed run."""

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from tests.harness.ranks import run_ranks
from tests.integration.continuing import (
    WITHOUT_DROPOUT,
    Numbers,
    Stream,
    Training,
    generations,
    shuffled,
)


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


# Each epoch has five batches of two samples, and a step two batches: steps end with
# batches 1, 3 and 4 of an epoch.
OPTIONS = {"model": WITHOUT_DROPOUT, "accumulate_grad_batches": 2}


def continue_by_hand(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    """Return the differences of resumed runs."""
    loaders = partial(ByHand, Stream(9, rank), batch_size=2)
    training = Training(loaders, directory, options={"max_epochs": 2, **OPTIONS})
    return generations(training, ["train_batch_end-1", "train_batch_end-4"], ["train_batch_end-7"])


def test_each_rank_continues_with_the_state_of_its_own_loader(tmp_path: Path) -> None:
    """No batch is lost or repeated, also where a run resumes within an optimiser step."""
    assert run_ranks(continue_by_hand, 2, tmp_path) == [{}, {}]


def continue_like_litdata(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    """Return the differences of resumed runs."""
    options = {"max_epochs": 3, "use_distributed_sampler": False, **OPTIONS}
    training = Training(partial(LikeLitdata, Numbers(10), 2), directory, options=options)
    return generations(training, ["train_batch_end-2"], ["train_batch_end-8"])


def test_a_state_that_a_loader_keeps_until_the_epochs_end_is_restored_once(tmp_path: Path) -> None:
    """With a loader like litdata's no batch is lost or repeated."""
    assert run_ranks(continue_like_litdata, 2, tmp_path) == [{}, {}]


def continue_in_a_long_step(rank: int, world_size: int, directory: Path) -> bool:
    """Return whether a run that resumes in the middle of a step repeats it."""

    def loaders() -> CombinedLoader:
        return CombinedLoader([shuffled(40)(), shuffled(6, batch_size=6)()], "max_size_cycle")

    options = {"model": WITHOUT_DROPOUT, "max_epochs": 1, "use_distributed_sampler": False}
    training = Training(loaders, directory, options=options)
    callbacks = [GradientAccumulationScheduler({0: 8})]
    whole = training.run("train_batch_end-15", callbacks=callbacks)
    resumed = training.run(ckpt_path=whole.saved["train_batch_end-15"], callbacks=callbacks)
    return resumed.steps == whole.steps[8:]


def test_a_loader_that_begins_again_in_each_batch_of_a_long_step(tmp_path: Path) -> None:
    """A callback sets how many batches a step has, and none is lost or repeated."""
    assert run_ranks(continue_in_a_long_step, 2, tmp_path) == [True, True]
