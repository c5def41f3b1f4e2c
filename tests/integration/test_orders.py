"""Each rank reads the right samples in the right order, as training sees them."""

import itertools
import os
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from tests.harness import training
from tests.integration.continuing import Backwards, Batches, Numbers, Saver, loader, read

POINT = "train_epoch_end-3"
LOADERS: dict[str, Any] = {
    "padded": loader(11, shuffle=True),
    "in order": loader(11, batch_size=3),
    "dropping": loader(10, batch_size=4, shuffle=True, drop_last=True),
    "one sample": loader(1, batch_size=1, shuffle=True),
    "no batches": loader(5, batch_size=None),
    "own batches": lambda: DataLoader(
        Numbers(9), batch_sampler=Backwards(SequentialSampler(range(9)), 2, True)
    ),
    "two loaders": lambda: [loader(7, shuffle=True)(), loader(5, shuffle=True)()],
}


def orders(kind: training.Kind, directory: Path) -> dict[str, Batches]:
    """Return the batches of each loader, and of one with the option ``overfit_batches``."""
    batches = {name: read(kind, directory, make) for name, make in LOADERS.items()}
    overfit = read(kind, directory, loader(11, shuffle=True), overfit_batches=3)
    return {**batches, "overfit": overfit}


def test_the_default_order_is_stock_lightnings(tmp_path: Path) -> None:
    """Every batch of every epoch is stock's, for any length and batch size."""
    ours, stock = training.on_both(orders, tmp_path)
    assert ours == stock


def seeded_orders(kind: training.Kind, directory: Path) -> list[Batches]:
    """Return the batches of a run, of one with another seed, and of that one resumed at
    the end of the first epoch, which has three steps.
    """
    make = loader(11, shuffle=True)
    saver = Saver(directory, [POINT])
    first = read(kind, directory, make, max_epochs=3)
    L.seed_everything(123, verbose=False)
    other_seed = read(kind, directory, make, max_epochs=3, callbacks=[saver])
    if kind == "ours":
        L.seed_everything(7, verbose=False)  # the resumed run keeps its own
    loads_early = training.At("setup", lambda trainer: trainer.estimated_stepping_batches)
    options: dict[str, Any] = {"max_epochs": 3, "callbacks": [loads_early]}
    resumed = read(kind, directory, make, ckpt_path=saver.saved[POINT], **options)
    return [first, other_seed, resumed]


def test_the_order_of_a_seed_is_stock_lightnings(tmp_path: Path) -> None:
    """Each seed has another order, which a resumed run continues, whatever its own seed
    and even if a hook loads the data before the checkpoint.
    """
    ours, stock = training.on_both(seeded_orders, tmp_path)
    assert ours == stock
    for first, other_seed, resumed in ours:
        assert other_seed != first
        assert resumed == {epoch: other_seed[epoch] for epoch in (1, 2)}


def read_generator(kind: training.Kind, directory: Path) -> Batches:
    generator = (torch.tensor([[float(number)]]) for number in range(9))
    return read(kind, directory, lambda: generator, limit_train_batches=3)


def test_a_generator_continues_in_the_next_epoch(tmp_path: Path) -> None:
    """Each epoch reads three batches of it, as with stock."""
    ours, stock = training.on_both(read_generator, tmp_path)
    assert ours == stock
    assert ours[0] == {0: [[0], [1], [2]], 1: [[3], [4], [5]]}


# Samplers that draw, while the seed differs on each rank.


class Even(RandomSampler):
    """A user's sampler that draws each even sample twice."""

    def __iter__(self) -> Any:
        return iter([index & ~1 for index in super().__iter__()])


SAMPLES = 40
SOME = 36


class SamplerCase(NamedTuple):
    """Options of a loader of 40 samples, and what the ranks read of it together.

    Attributes:
        exactly: the samples in ascending order, if they are known.
    """

    options: dict[str, Any]
    samples: int
    repeats: bool
    exactly: list[int] | None = None


REPEATING = RandomSampler(range(SAMPLES), replacement=True, num_samples=SOME)
EVEN = Even(range(SAMPLES))
EVEN_TWICE = sorted([*range(0, SAMPLES, 2)] * 2)
SAMPLERS = {
    "shuffled": SamplerCase({"shuffle": True}, SAMPLES, repeats=False),
    "some": SamplerCase(
        {"sampler": RandomSampler(range(SAMPLES), num_samples=SOME)}, SOME, repeats=False
    ),
    "with replacement": SamplerCase({"sampler": REPEATING}, SOME, repeats=True),
    "with replacement, in a batch sampler": SamplerCase(
        {"batch_sampler": Backwards(REPEATING, 2, False)}, SOME, repeats=True
    ),
    "items by index": SamplerCase(
        {"sampler": Subset(range(SAMPLES), range(SOME))}, SOME, repeats=False
    ),
    "even": SamplerCase({"sampler": EVEN}, SAMPLES, repeats=True, exactly=EVEN_TWICE),
    "even, in a batch sampler": SamplerCase(
        {"batch_sampler": BatchSampler(EVEN, 2, False)}, SAMPLES, repeats=True, exactly=EVEN_TWICE
    ),
}


def read_drawn(
    kind: training.Kind, directory: Path, options: dict[str, Any], epochs: int
) -> list[list[int]]:
    """Return the samples that this rank reads in each epoch."""
    torch.manual_seed(os.getpid())
    batches = read(kind, directory, loader(SAMPLES, **options), max_epochs=epochs)
    return [[*itertools.chain(*batches[epoch])] for epoch in range(epochs)]


def read_together(directory: Path, options: dict[str, Any], epochs: int = 1) -> list[list[int]]:
    """Return the samples that two ranks with different seeds read in each epoch."""
    env = {"PL_GLOBAL_SEED": lambda rank: str(100 + rank)}
    first, second = training.on_ranks("ours", read_drawn, directory, options, epochs, env=env)
    return [[*own, *others] for own, others in zip(first, second, strict=True)]


@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_divide_one_draw_of_a_sampler(name: str, tmp_path: Path) -> None:
    """Together they read what the sampler draws, also where it is in a batch sampler."""
    case = SAMPLERS[name]
    [together] = read_together(tmp_path, case.options)
    assert len(together) == case.samples
    assert (len(set(together)) < case.samples) is case.repeats
    if case.exactly is not None:
        assert sorted(together) == case.exactly


def test_each_epoch_of_a_weighted_sampler_is_another_draw(tmp_path: Path) -> None:
    """All ranks divide one draw per epoch, and read none of its samples twice."""
    without_weight = SAMPLES - 1
    weights = [1.0] * without_weight + [0.0]
    sampler = WeightedRandomSampler(weights, SOME, replacement=False)
    epochs = read_together(tmp_path, {"sampler": sampler}, epochs=3)
    for drawn in epochs:
        assert len(drawn) == SOME
        assert len(set(drawn)) == SOME
        assert without_weight not in drawn
    assert len({tuple(drawn) for drawn in epochs}) == 3
