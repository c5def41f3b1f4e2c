"""Each rank reads the right samples in the right order, as training sees them."""

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
)

from tests.harness import training
from tests.integration.continuing import Backwards, Batches, loader, read

LOADERS: dict[str, Any] = {
    "padded": loader(11, shuffle=True),
    "in order": loader(11, batch_size=3),
    "dropping": loader(10, batch_size=4, shuffle=True, drop_last=True),
    "one sample": loader(1, batch_size=1, shuffle=True),
    "no batches": loader(5, batch_size=None),
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


def read_generator(kind: training.Kind, directory: Path) -> Batches:
    generator = (torch.tensor([[float(number)]]) for number in range(9))
    return read(kind, directory, lambda: generator, limit_train_batches=3)


def test_a_generator_continues_in_the_next_epoch(tmp_path: Path) -> None:
    """Each epoch reads the next three batches, as with stock."""
    ours, stock = training.on_both(read_generator, tmp_path)
    assert ours == stock
    assert ours[0] == {0: [[0], [1], [2]], 1: [[3], [4], [5]]}


# Samplers that draw, while the seed differs on each rank.

SAMPLES = 40
SOME = 36


class Even(RandomSampler):
    """A user's sampler that draws each even sample twice."""

    def __iter__(self) -> Any:
        return iter([index - index % 2 for index in super().__iter__()])


def read_drawn(
    kind: training.Kind, directory: Path, options: dict[str, Any], epochs: int
) -> list[list[int]]:
    """Return the samples that this rank, which has its own seed, reads in each epoch."""
    L.seed_everything(100 + int(os.environ["RANK"]), verbose=False)
    batches = read(kind, directory, loader(SAMPLES, **options), max_epochs=epochs)
    return [[*itertools.chain(*batches[epoch])] for epoch in range(epochs)]


def read_together(directory: Path, options: dict[str, Any], epochs: int = 1) -> list[list[int]]:
    """Return the samples that two ranks together read in each epoch."""
    first, second = training.on_ranks("ours", read_drawn, directory, options, epochs)
    return [[*own, *others] for own, others in zip(first, second, strict=True)]


class Drawn(NamedTuple):
    """Options of a loader, and the samples that its sampler draws, in ascending order."""

    options: dict[str, Any]
    samples: list[int]


EACH_EVEN_TWICE = sorted([*range(0, SAMPLES, 2)] * 2)
EVEN_BATCHES = BatchSampler(Even(range(SAMPLES)), batch_size=2, drop_last=False)
DRAWN = {
    "shuffled": Drawn({"shuffle": True}, [*range(SAMPLES)]),
    "items by index": Drawn(
        {"sampler": Subset(range(SAMPLES), range(SOME))}, samples=[*range(SOME)]
    ),
    "even": Drawn({"sampler": Even(range(SAMPLES))}, EACH_EVEN_TWICE),
    "even, in a batch sampler": Drawn({"batch_sampler": EVEN_BATCHES}, EACH_EVEN_TWICE),
}


@pytest.mark.parametrize("name", DRAWN)
def test_ranks_divide_one_draw_of_a_sampler(name: str, tmp_path: Path) -> None:
    """Together they read what the sampler draws, also where it is in a batch sampler."""
    [together] = read_together(tmp_path, DRAWN[name].options)
    assert sorted(together) == DRAWN[name].samples


REPEATING = RandomSampler(range(SAMPLES), replacement=True, num_samples=SOME)
WITH_REPLACEMENT = {
    "sampler": {"sampler": REPEATING},
    "batch sampler": {"batch_sampler": Backwards(REPEATING, batch_size=2, drop_last=False)},
}


@pytest.mark.parametrize("name", WITH_REPLACEMENT)
def test_ranks_divide_a_draw_with_replacement(name: str, tmp_path: Path) -> None:
    """Together they read as many samples as the sampler draws, some of them twice."""
    [together] = read_together(tmp_path, WITH_REPLACEMENT[name])
    assert len(together) == SOME
    assert len(set(together)) < SOME


def test_ranks_divide_a_draw_of_some_samples(tmp_path: Path) -> None:
    """Together they read as many samples as the sampler draws, and none twice."""
    some = RandomSampler(range(SAMPLES), num_samples=SOME)
    [together] = read_together(tmp_path, {"sampler": some})
    assert len(together) == SOME
    assert len(set(together)) == SOME


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


# Samplers of the user's that divide the samples themselves.


class PartOfOrder(Sampler[int]):
    """Takes this rank's part of an order that every rank draws from a global generator."""

    def __init__(self, draw: Callable[[int], Sequence[int]]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return SAMPLES // dist.get_world_size()

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw(SAMPLES)[dist.get_rank() :: dist.get_world_size()])


DRAWS: dict[str, Callable[[int], Sequence[int]]] = {
    "NumPy": lambda length: np.random.permutation(length).tolist(),
    "random": lambda length: random.sample(range(length), length),
}


def read_parts(kind: training.Kind, directory: Path, name: str) -> Batches:
    """Train with equal states of all generators but torch's."""
    L.seed_everything(7, verbose=False)
    make = loader(SAMPLES, sampler=PartOfOrder(DRAWS[name]))
    return read(kind, directory, make, use_distributed_sampler=False)


@pytest.mark.parametrize("name", DRAWS)
def test_ranks_with_equal_generators_draw_equal_orders(name: str, tmp_path: Path) -> None:
    """Together they read each sample once in an epoch, in another order each, as with stock."""
    by_rank = training.on_ranks("ours", read_parts, tmp_path, name)
    epochs = [[*itertools.chain(*(rank[epoch] for rank in by_rank))] for epoch in (0, 1)]
    read_in_epochs = [[*itertools.chain(*batches)] for batches in epochs]
    assert [sorted(samples) for samples in read_in_epochs] == [[*range(SAMPLES)]] * 2
    assert read_in_epochs[0] != read_in_epochs[1]


def read_by_generator(kind: training.Kind, directory: Path) -> Batches:
    """Train with a generator for the order that has another seed on each rank."""
    L.seed_everything(7, verbose=False)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    make = loader(SAMPLES, shuffle=True, generator=generator)
    return read(kind, directory, make, use_distributed_sampler=False)


def test_the_seed_of_a_loaders_generator_chooses_its_order(tmp_path: Path) -> None:
    """With different seeds, the ranks read different orders."""
    first, second = training.on_ranks("ours", read_by_generator, tmp_path)
    assert first[0] != second[0]
    assert first[0] != first[1]


def read_two_loaders(kind: training.Kind, directory: Path, divided: bool) -> Batches:
    """Train on two loaders of the same samples, whose samplers draw."""
    L.seed_everything(7, verbose=False)
    weights = [1.0] * SAMPLES

    def make() -> Any:
        return [
            loader(SAMPLES, sampler=WeightedRandomSampler(weights, SAMPLES))() for _ in range(2)
        ]

    return read(kind, directory, make, max_epochs=1, use_distributed_sampler=divided)


@pytest.mark.parametrize("divided", [True, False])
def test_two_loaders_of_the_same_samples_draw_different_orders(
    divided: bool, tmp_path: Path
) -> None:
    """Also if both samplers are equal."""
    for batches in training.on_ranks("ours", read_two_loaders, tmp_path, divided):
        first = [step[:2] for step in batches[0]]
        second = [step[2:] for step in batches[0]]
        assert first != second
