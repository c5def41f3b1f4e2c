"""Each rank reads the right samples in the right order: stock's by default, and its part of
one draw of a user's sampler.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
)

from tests.harness import training
from tests.integration import continuing

# The default order.

# Functions that make loaders, and options of the Trainer.
ORDERS: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
    "padded": (continuing.loader(11, shuffle=True), {}),
    "in order": (continuing.loader(11, batch_size=3), {}),
    "dropping": (continuing.loader(10, batch_size=4, shuffle=True, drop_last=True), {}),
    "one sample": (continuing.loader(1, batch_size=1, shuffle=True), {}),
    "no batches": (continuing.loader(5, batch_size=None), {}),
    "two loaders": (lambda: [continuing.shuffled(7)(), continuing.shuffled(5)()], {}),
    "overfit": (continuing.loader(11, shuffle=True), {"overfit_batches": 3}),
    "generator": (
        lambda: (torch.tensor([[float(number)]]) for number in range(9)),
        {"limit_train_batches": 3},
    ),
}


def read_in_order(kind: training.Kind, directory: Path) -> dict[str, continuing.Batches]:
    """Return the batches of each loader."""
    return {
        name: continuing.read(kind, directory, make, **options)
        for name, (make, options) in ORDERS.items()
    }


def test_the_default_order_is_stock_lightnings(tmp_path: Path) -> None:
    """Every batch of every epoch is stock's, for any length and batch size. A generator
    continues in the next epoch.
    """
    # One start of the ranks reads all of them.
    ours, stock = training.on_both(read_in_order, tmp_path)
    assert ours == stock
    assert ours[0]["generator"] == {0: [[0], [1], [2]], 1: [[3], [4], [5]]}


# Samplers that draw, while the seed differs on each rank.

DRAWN = 40
SOME = 36


class EvenTwice(RandomSampler):
    """A user's sampler that draws each even sample twice."""

    def __iter__(self) -> Any:
        return iter([index - index % 2 for index in super().__iter__()])


class Pairs(BatchSampler):
    """Takes other arguments than torch's batch sampler, and draws batches of pairs."""

    def __init__(self, samples: int, *, by: int) -> None:
        super().__init__(RandomSampler(range(samples // by)), 1, drop_last=False)
        self.by = by

    def __iter__(self) -> Iterator[list[int]]:
        return ([by * self.by, by * self.by + 1] for [by] in super().__iter__())


def together(by_rank: list[continuing.Batches]) -> list[list[int]]:
    """Return the samples that all ranks together read in each of two epochs."""
    return [
        [sample for rank in by_rank for batch in rank[epoch] for sample in batch]
        for epoch in (0, 1)
    ]


def read_drawn(
    kind: training.Kind, directory: Path, loaders: Mapping[str, Mapping[str, Any]]
) -> dict[str, continuing.Batches]:
    """Return what this rank, which has its own seed, reads with each loader's options."""
    L.seed_everything(100 + int(os.environ["RANK"]), verbose=False)
    return {
        name: continuing.read(kind, directory, continuing.loader(DRAWN, **options))
        for name, options in loaders.items()
    }


def drawn_together(
    loaders: Mapping[str, Mapping[str, Any]], directory: Path
) -> dict[str, list[list[int]]]:
    """Return what two ranks together read with each loader's options."""
    by_rank = training.on_ranks("ours", read_drawn, directory, loaders)
    return {name: together([batches[name] for batches in by_rank]) for name in loaders}


ALL = [*range(DRAWN)]
EACH_EVEN_TWICE = sorted([*range(0, DRAWN, 2)] * 2)
# Options of a loader, and the samples that it draws in an epoch, in ascending order.
EXACT = {
    "shuffled": ({"shuffle": True}, ALL),
    "items by index": ({"sampler": Subset(range(DRAWN), range(SOME))}, [*range(SOME)]),
    "even": ({"sampler": EvenTwice(range(DRAWN))}, EACH_EVEN_TWICE),
    "even, in a batch sampler": (
        {"batch_sampler": BatchSampler(EvenTwice(range(DRAWN)), 2, drop_last=False)},
        EACH_EVEN_TWICE,
    ),
    "own batches": ({"batch_sampler": Pairs(DRAWN, by=2)}, ALL),
    "a list": ({"batch_sampler": np.arange(DRAWN).reshape(-1, 2).tolist()}, ALL),
}


def test_ranks_divide_one_draw_of_a_sampler_per_epoch(tmp_path: Path) -> None:
    """Together they read exactly what the sampler draws, also where it is in a batch
    sampler.
    """
    drawn = drawn_together({name: options for name, (options, _) in EXACT.items()}, tmp_path)
    for name, (_, samples) in EXACT.items():
        assert [sorted(epoch) for epoch in drawn[name]] == [samples, samples], name


def test_ranks_divide_a_draw_with_replacement(tmp_path: Path) -> None:
    """Together they read as many samples as the sampler draws, some of them twice."""
    repeating = RandomSampler(range(DRAWN), replacement=True, num_samples=SOME)
    loaders = {
        "alone": {"sampler": repeating},
        "batched": {
            "batch_sampler": continuing.Backwards(repeating, batch_size=2, drop_last=False)
        },
    }
    for name, epochs in drawn_together(loaders, tmp_path).items():
        assert [len(epoch) for epoch in epochs] == [SOME, SOME], name
        assert len(set(epochs[0])) < SOME, name


def test_ranks_divide_a_draw_of_some_samples(tmp_path: Path) -> None:
    """Together they read as many samples as the sampler draws, none of them twice, and
    others in the next epoch.
    """
    last = DRAWN - 1  # is never drawn
    weights = [1.0] * last + [0.0]
    loaders = {
        "some": {"sampler": RandomSampler(range(last), num_samples=SOME)},
        "weighted": {"sampler": WeightedRandomSampler(weights, SOME, replacement=False)},
    }
    for name, epochs in drawn_together(loaders, tmp_path).items():
        assert [len(set(epoch)) for epoch in epochs] == [SOME, SOME], name
        assert last not in epochs[0], name
        assert epochs[0] != epochs[1], name


# Loaders that the strategy does not divide.


class PartOfOrder(Sampler[int]):
    """Takes this rank's part of an order that every rank draws from a global generator."""

    def __len__(self) -> int:
        return DRAWN // dist.get_world_size()

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(DRAWN)[dist.get_rank() :: dist.get_world_size()])


def in_parts() -> DataLoader[Any]:
    return DataLoader(continuing.Numbers(DRAWN), 2, sampler=PartOfOrder())


def by_own_generator() -> DataLoader[Any]:
    """Return a loader whose generator has another seed on each rank."""
    return DataLoader(
        continuing.Numbers(DRAWN),
        2,
        shuffle=True,
        generator=torch.Generator().manual_seed(dist.get_rank()),
    )


def two_loaders() -> list[DataLoader[Any]]:
    """Return two loaders, of which each step gets a batch of two samples each."""
    samplers = [WeightedRandomSampler([1.0] * DRAWN, DRAWN) for _ in range(2)]
    return [DataLoader(continuing.Numbers(DRAWN), 2, sampler=sampler) for sampler in samplers]


def read_undivided(kind: training.Kind, directory: Path, make: Any) -> continuing.Batches:
    """Train with the same seed on all ranks. The generators of Python and NumPy are then in
    the same state; the model seeds torch's differently.
    """
    L.seed_everything(7, verbose=False)
    return continuing.read(kind, directory, make, use_distributed_sampler=False)


def test_ranks_with_equal_generators_draw_equal_orders(tmp_path: Path) -> None:
    """Their parts of the order are all samples, in another order in each epoch."""
    epochs = together(training.on_ranks("ours", read_undivided, tmp_path, in_parts))
    assert [sorted(samples) for samples in epochs] == [ALL, ALL]
    assert epochs[0] != epochs[1]


def test_a_loaders_own_generator_decides_its_order(tmp_path: Path) -> None:
    """Ranks with other seeds read in other orders, and another one in each epoch."""
    first, second = training.on_ranks("ours", read_undivided, tmp_path, by_own_generator)
    assert first[0] != second[0]
    assert first[0] != first[1]


def test_two_loaders_have_different_orders(tmp_path: Path) -> None:
    """The samples of two loaders without seeds are not drawn in pairs."""
    for batches in training.on_ranks("ours", read_undivided, tmp_path, two_loaders):
        of_first_loader = [step[:2] for step in batches[0]]
        of_second_loader = [step[2:] for step in batches[0]]
        assert of_first_loader != of_second_loader
