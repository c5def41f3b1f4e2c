"""Each rank reads the right samples in the right order, as training sees them."""

from __future__ import annotations

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
    WeightedRandomSampler,
)

from tests.harness import training
from tests.integration.continuing import Numbers, Saver
from tests.integration.reading import Backwards, Batches, loader, read

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
    return {name: read(kind, directory, make) for name, make in LOADERS.items()}


def test_the_default_order_is_stock_lightnings(tmp_path: Path) -> None:
    """Every batch of every epoch is stock's, for any length and batch size."""
    ours, stock = training.on_both(orders, tmp_path)
    assert ours == stock


def seeded_orders(kind: training.Kind, directory: Path) -> list[Batches]:
    """Return the batches of a run, of one with another seed, and of that one resumed."""
    make = loader(11, shuffle=True)
    first = read(kind, directory, make, max_epochs=3)
    saver = Saver(directory, ["train_epoch_end-3"])
    L.seed_everything(123, verbose=False)
    seeded = read(kind, directory, make, max_epochs=3, callbacks=[saver])
    path = saver.saved["train_epoch_end-3"]
    return [first, seeded, read(kind, directory, make, max_epochs=3, ckpt_path=path)]


def test_the_order_of_a_seed_is_stock_lightnings(tmp_path: Path) -> None:
    """Also after a resume at the end of the first epoch."""
    ours, stock = training.on_both(seeded_orders, tmp_path)
    assert ours == stock
    first, seeded, resumed = ours[0]
    assert seeded != first
    assert resumed.keys() == {1, 2}


def unusual_orders(kind: training.Kind, directory: Path) -> list[Batches]:
    """Return the batches of a generator, and of the Trainer's option to overfit."""
    generator = (torch.tensor([[float(number)]]) for number in range(9))
    return [
        read(kind, directory, lambda: generator, limit_train_batches=3),
        read(kind, directory, loader(11, shuffle=True), overfit_batches=3),
    ]


def test_a_generator_and_overfitting_are_as_with_stock(tmp_path: Path) -> None:
    """A generator continues in the next epoch."""
    ours, stock = training.on_both(unusual_orders, tmp_path)
    assert ours == stock
    generated, _ = ours[0]
    assert generated == {0: [[0], [1], [2]], 1: [[3], [4], [5]]}


# Samplers that draw, while the seed differs on each rank.


class Even(RandomSampler):
    """A user's sampler that draws each even sample twice."""

    def __iter__(self) -> Any:
        return iter([index & ~1 for index in super().__iter__()])


class SamplerCase(NamedTuple):
    """Options of a loader of 40 samples, and what the ranks read of it together."""

    options: dict[str, Any]
    samples: int
    repeats: bool


REPEATING = RandomSampler(range(40), replacement=True, num_samples=36)
EVEN = Even(range(40))
SAMPLERS = {
    "shuffled": SamplerCase({"shuffle": True}, 40, repeats=False),
    "some": SamplerCase({"sampler": RandomSampler(range(40), num_samples=36)}, 36, repeats=False),
    "with replacement": SamplerCase({"sampler": REPEATING}, 36, repeats=True),
    "with replacement, in a batch sampler": SamplerCase(
        {"batch_sampler": Backwards(REPEATING, 2, False)}, 36, repeats=True
    ),
    "even": SamplerCase({"sampler": EVEN}, 40, repeats=True),
    "even, in a batch sampler": SamplerCase(
        {"batch_sampler": BatchSampler(EVEN, 2, False)}, 40, repeats=True
    ),
}


def read_drawn(
    kind: training.Kind, directory: Path, options: dict[str, Any], epochs: int
) -> list[Any]:
    """Return the samples that this rank reads in each epoch."""
    torch.manual_seed(os.getpid())
    batches = read(kind, directory, loader(40, **options), max_epochs=epochs)
    return [[sample for batch in batches[epoch] for sample in batch] for epoch in range(epochs)]


def read_together(directory: Path, options: dict[str, Any], epochs: int = 1) -> list[list[int]]:
    """Return the samples that two ranks with different seeds read in each epoch."""
    env = {"PL_GLOBAL_SEED": lambda rank: str(100 + rank)}
    first, second = training.on_ranks("ours", read_drawn, directory, options, epochs, env=env)
    return [[*mine, *others] for mine, others in zip(first, second, strict=True)]


@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_divide_one_draw_of_a_sampler(name: str, tmp_path: Path) -> None:
    """Together they read what the sampler draws, also where it is in a batch sampler."""
    case = SAMPLERS[name]
    [together] = read_together(tmp_path, case.options)
    assert len(together) == case.samples
    assert (len(set(together)) < case.samples) is case.repeats
    if name.startswith("even"):
        assert sorted(together) == sorted([*range(0, 40, 2)] * 2)


def test_each_epoch_of_a_weighted_sampler_is_another_draw(tmp_path: Path) -> None:
    """All ranks divide one draw per epoch, and read none of its samples twice."""
    weights = [1.0] * 39 + [0.0]
    sampler = WeightedRandomSampler(weights, 36, replacement=False)
    epochs = read_together(tmp_path, {"sampler": sampler}, epochs=3)
    for drawn in epochs:
        assert len(drawn) == 36
        assert len(set(drawn)) == 36
        assert 39 not in drawn, "it weighs nothing"
    assert len({tuple(drawn) for drawn in epochs}) == 3
