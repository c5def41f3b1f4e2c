"""An epoch starts again if a resumed run cannot draw its order again."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext.errors import ResumeError
from tests.harness.ranks import run_ranks
from tests.harness.training import At
from tests.integration.continuing import (
    Net,
    Numbers,
    Resumed,
    Run,
    Training,
    resume,
    samples_of,
    shuffled,
)

# Orders that nothing but the run itself determines.

SAMPLES = 24  # in batches of two
CLOCK = itertools.count()  # shows another time whenever it is read


class Counting(IterableDataset[Tensor]):
    """Counts its epochs itself, and shuffles this rank's numbers by that count.

    WebDataset's ``detshuffle`` does so.
    """

    def __init__(self, rank: int) -> None:
        self.numbers = range(100 * rank, 100 * rank + SAMPLES)
        self.epoch = -1

    def __iter__(self) -> Iterator[Tensor]:
        self.epoch += 1
        return self.shuffled(random.Random(self.epoch))

    def shuffled(self, chance: random.Random) -> Iterator[Tensor]:
        return (torch.tensor([float(number)]) for number in chance.sample(self.numbers, SAMPLES))


class Clocked(Counting):
    """Shuffles by the clock, as WebDataset's ``shuffle`` does."""

    def __iter__(self) -> Iterator[Tensor]:
        return self.shuffled(random.Random(next(CLOCK)))


class Rewound(Clocked):
    """Goes on in the same order, until ``set_epoch`` is called."""

    def set_epoch(self, epoch: int) -> None:
        self.left = self.shuffled(random.Random(next(CLOCK)))

    def __iter__(self) -> Iterator[Tensor]:
        return self.left


class Buffered(Counting):
    """Shuffles by a buffer, from Python's global generator, while it is read."""

    def __iter__(self) -> Iterator[Tensor]:
        left = list(self.numbers)
        while left:
            yield torch.tensor([float(left.pop(random.randrange(min(8, len(left)))))])


class FromStream(Sampler[int]):
    """Draws the order of a stream of one of these classes."""

    def __init__(self, stream: Counting) -> None:
        self.stream = stream

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return (int(number) for number in self.stream)


class Split(IntEnum):
    TRAIN = 1


def unusual_batch(rows: list[Tensor]) -> dict[str, Any]:
    """Return a batch with Python's numbers, and with values that are hard to read."""
    return {
        "split": Split.TRAIN,
        "ragged": torch.nested.nested_tensor(rows),
        "numbers": [float(row) for row in rows],
    }


class Mixing(Net):
    """Draws from Python's global generator in each step, as mixup does."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        random.random()
        if isinstance(batch, dict):
            batch = torch.tensor(batch["numbers"]).unsqueeze(1)
        return super().training_step(batch, index)


def sampled(stream: type[Counting]) -> DataLoader[Any]:
    return DataLoader(Numbers(SAMPLES), 2, sampler=FromStream(stream(0)))


NOT_DIVIDED = {"use_distributed_sampler": False}


class Order(NamedTuple):
    """Loaders, and how a rank trains on them.

    Attributes:
        make: returns the loaders of a rank.
        is_stream: whether the rank reads its own 24 numbers.
        batches: the number of batches in an epoch.
        options: of the Trainer.
    """

    make: Callable[[int], Any]
    is_stream: bool = False
    batches: int = SAMPLES // 2
    options: Mapping[str, Any] = NOT_DIVIDED


ORDERS = {
    "counting": Order(lambda rank: DataLoader(Counting(rank), 2), is_stream=True),
    "clocked": Order(lambda rank: DataLoader(Clocked(rank), 2), is_stream=True),
    "rewound": Order(lambda rank: DataLoader(Rewound(rank), 2), is_stream=True),
    "buffered": Order(lambda rank: DataLoader(Buffered(rank), 2), is_stream=True),
    "clocked, unusual": Order(
        lambda rank: DataLoader(Clocked(rank), 2, collate_fn=unusual_batch), is_stream=True
    ),
    "sampler that counts": Order(lambda rank: sampled(Counting)),
    "sampler that draws late": Order(lambda rank: sampled(Buffered)),
    "divided sampler that counts": Order(
        lambda rank: sampled(Counting), batches=SAMPLES // 4, options={}
    ),
    "two streams": Order(
        lambda rank: [DataLoader(Numbers(SAMPLES), 2), DataLoader(Clocked(rank), 2)]
    ),
    "stateful loader": Order(
        lambda rank: StatefulDataLoader(Buffered(rank), 2),
        is_stream=True,
        options={"accumulate_grad_batches": 2},
    ),
}


class ThreeResumes(NamedTuple):
    """What each setting of ``resume_data`` makes of a checkpoint."""

    by_default: Resumed
    epoch: Run  # which repeats the epoch
    strict: str  # the error


def resume_unknown_order(rank: int, world_size: int, directory: Path, name: str) -> ThreeResumes:
    """Resume three times after five batches of the second epoch."""
    order = ORDERS[name]
    options = {"max_epochs": 2, "model": Mixing, **order.options}
    training = Training(lambda: order.make(rank), directory, world_size, options)
    point = f"train_batch_end-{order.batches + 5}"
    path = training.run(point).saved[point]
    by_default = resume(training, path)
    training.strategy = {"resume_data": "epoch"}
    epoch = training.run(ckpt_path=path)
    training.strategy = {"resume_data": "strict"}
    with pytest.raises(ResumeError) as caught:
        training.run(ckpt_path=path)
    return ThreeResumes(by_default, epoch, str(caught.value))


@pytest.mark.parametrize("name", ORDERS)
def test_an_epoch_whose_order_cannot_be_drawn_again_starts_again(name: str, tmp_path: Path) -> None:
    """The run reads each sample of that epoch once, and rank 0 warns. With
    ``resume_data="strict"``, all ranks raise instead.
    """
    order = ORDERS[name]
    by_rank = run_ranks(resume_unknown_order, 2, tmp_path, name)
    for rank, resumes in enumerate(by_rank):
        run = resumes.by_default.run
        assert [step.moment for step in run.steps] == [(1, batch) for batch in range(order.batches)]
        assert run.counts == resumes.epoch.counts
        assert run.events == resumes.epoch.events
        if order.is_stream:
            assert sorted(samples_of(run.steps)) == [*Counting(rank).numbers]
        assert "does not yield" in resumes.strict
    [warning], warned_on_rank_1 = (resumes.by_default.warned for resumes in by_rank)
    assert "does not yield" in warning
    assert warned_on_rank_1 == []


# Orders that a run has changed, and those that are drawn from numbers that are not saved.

GROWN_AFTER = 3  # batches


def resume_after_growth(rank: int, world_size: int, directory: Path) -> Resumed:
    """Resume after the fifth batch of an epoch whose batches grew after the third one."""

    def grow(trainer: L.Trainer) -> None:
        loader: Any = trainer.train_dataloader
        loader.batch_sampler.batch_size = 4

    growing = At("on_train_batch_end", grow, earlier=GROWN_AFTER - 1)
    options = {"max_epochs": 1, "callbacks": [growing]}
    training = Training(shuffled(2 * SAMPLES), directory, options=options)
    run = training.run("train_batch_end-5")
    sizes = [len(step.samples) for step in run.steps]
    grown = SAMPLES - 2 * GROWN_AFTER  # samples that this rank reads in batches of four
    assert sizes == [2] * GROWN_AFTER + [4] * (grown // 4) + [grown % 4]
    return resume(training, run.saved["train_batch_end-5"], callbacks=[])


def test_an_epoch_in_which_the_batch_size_changed_starts_again(tmp_path: Path) -> None:
    """The resumed run reads all samples of the epoch once, and rank 0 warns."""
    first, second = run_ranks(resume_after_growth, 2, tmp_path)
    assert (len(first.warned), len(second.warned)) == (1, 0)
    steps = [*first.run.steps, *second.run.steps]
    assert {len(step.samples) for step in steps} == {2}
    assert sorted(samples_of(steps)) == [*range(2 * SAMPLES)]


def resume_exception(rank: int, world_size: int, directory: Path, shuffle: bool) -> Resumed:
    """Resume an epoch of six batches whose fourth one has raised."""
    options = {"use_distributed_sampler": False, "max_epochs": 1}
    training = Training(shuffled(12, shuffle=shuffle), directory, options=options)
    path = training.run("exception-3", fail_at=(0, 3)).saved["exception-3"]
    return resume(training, path)


def test_an_order_whose_random_numbers_are_not_saved_starts_again(tmp_path: Path) -> None:
    """A checkpoint that is saved after an exception has no random numbers."""
    first, second = run_ranks(resume_exception, 2, tmp_path, True)
    [warning] = first.warned
    assert warning.startswith(
        "epoch 0 cannot be resumed in the middle: BatchSampler over RandomSampler on ranks 0, 1"
        " does not yield"
    )
    assert len(first.run.steps) == 6
    assert second.warned == []


def test_a_fixed_order_continues_after_an_exception(tmp_path: Path) -> None:
    """The run reads the three batches that are left."""
    for resumed in run_ranks(resume_exception, 2, tmp_path, False):
        assert resumed.warned == []
        assert len(resumed.run.steps) == 3
