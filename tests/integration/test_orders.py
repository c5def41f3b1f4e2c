"""Each rank reads the right samples in the right order, as training sees them."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
)

from tests.harness.training import Kind, on_both, on_ranks
from tests.integration.continuing import Backwards, Batches, loader, read

LOADERS: dict[str, Any] = {
    "padded": loader(11, shuffle=True),
    "in order": loader(11, batch_size=3),
    "dropping": loader(10, batch_size=4, shuffle=True, drop_last=True),
    "one sample": loader(1, batch_size=1, shuffle=True),
    "no batches": loader(5, batch_size=None),
    "two loaders": lambda: [loader(7, shuffle=True)(), loader(5, shuffle=True)()],
}


def read_as_stock(kind: Kind, directory: Path) -> dict[str, Batches]:
    """Return the batches of each loader, of one with the option ``overfit_batches``, and of
    a generator.
    """
    batches = {name: read(kind, directory, make) for name, make in LOADERS.items()}
    overfit = read(kind, directory, loader(11, shuffle=True), overfit_batches=3)
    generator = (torch.tensor([[float(number)]]) for number in range(9))
    generated = read(kind, directory, lambda: generator, limit_train_batches=3)
    return {**batches, "overfit": overfit, "generator": generated}


def test_the_default_order_is_stock_lightnings(tmp_path: Path) -> None:
    """Every batch of every epoch is stock's, for any length and batch size. A generator
    continues in the next epoch.
    """
    ours, stock = on_both(read_as_stock, tmp_path)
    assert ours == stock
    assert ours[0]["generator"] == {0: [[0], [1], [2]], 1: [[3], [4], [5]]}


# Samplers that draw, while the seed differs on each rank.

SAMPLES = 40
SOME = 36


class Even(RandomSampler):
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


EVEN_BATCHES = BatchSampler(Even(range(SAMPLES)), batch_size=2, drop_last=False)
EACH_EVEN_TWICE = sorted([*range(0, SAMPLES, 2)] * 2)
# Options of loaders, and the samples that their samplers draw, in ascending order.
KNOWN = {
    "shuffled": ({"shuffle": True}, [*range(SAMPLES)]),
    "items by index": ({"sampler": Subset(range(SAMPLES), range(SOME))}, [*range(SOME)]),
    "even": ({"sampler": Even(range(SAMPLES))}, EACH_EVEN_TWICE),
    "even, in a batch sampler": ({"batch_sampler": EVEN_BATCHES}, EACH_EVEN_TWICE),
    "own batches": ({"batch_sampler": Pairs(SAMPLES, by=2)}, [*range(SAMPLES)]),
    "a list": ({"batch_sampler": np.arange(SAMPLES).reshape(-1, 2).tolist()}, [*range(SAMPLES)]),
}
REPEATING = RandomSampler(range(SAMPLES), replacement=True, num_samples=SOME)
REPEATED = {
    "with replacement": {"sampler": REPEATING},
    "in a batch sampler": {"batch_sampler": Backwards(REPEATING, batch_size=2, drop_last=False)},
}
WITHOUT_WEIGHT = SAMPLES - 1
WEIGHTS = [1.0] * WITHOUT_WEIGHT + [0.0]
UNREPEATED = {
    "some": {"sampler": RandomSampler(range(WITHOUT_WEIGHT), num_samples=SOME)},
    "weighted": {"sampler": WeightedRandomSampler(WEIGHTS, SOME, replacement=False)},
}


def read_drawn(kind: Kind, directory: Path) -> dict[str, Batches]:
    """Return what this rank, which has its own seed, reads by each sampler."""
    options: dict[str, Any] = {name: options for name, (options, _) in KNOWN.items()}
    options |= {**REPEATED, **UNREPEATED}
    L.seed_everything(100 + int(os.environ["RANK"]), verbose=False)
    return {name: read(kind, directory, loader(SAMPLES, **each)) for name, each in options.items()}


def together(by_rank: list[Batches]) -> list[list[int]]:
    """Return the samples that the ranks together read in each of two epochs."""
    epochs = [[batches[epoch] for batches in by_rank] for epoch in (0, 1)]
    return [[*itertools.chain(*itertools.chain(*epoch))] for epoch in epochs]


def test_ranks_divide_one_draw_of_a_sampler_per_epoch(tmp_path: Path) -> None:
    """Together they read what the sampler draws, also where it is in a batch sampler, and
    as many samples.
    """
    by_rank = on_ranks("ours", read_drawn, tmp_path)
    drawn = {name: together([batches[name] for batches in by_rank]) for name in by_rank[0]}
    for name, (_, samples) in KNOWN.items():
        assert [sorted(epoch) for epoch in drawn[name]] == [samples, samples], name
    for name in REPEATED:
        assert [len(epoch) for epoch in drawn[name]] == [SOME, SOME], name
        assert len(set(drawn[name][0])) < SOME, name
    for name in UNREPEATED:
        assert [len(set(epoch)) for epoch in drawn[name]] == [SOME, SOME], name
        assert WITHOUT_WEIGHT not in drawn[name][0], name
        assert drawn[name][0] != drawn[name][1], name


# Loaders that the strategy does not divide.


class PartOfOrder(Sampler[int]):
    """Takes this rank's part of an order that every rank draws from a global generator."""

    def __len__(self) -> int:
        return SAMPLES // dist.get_world_size()

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(SAMPLES)[dist.get_rank() :: dist.get_world_size()])


def weighted() -> Any:
    return loader(SAMPLES, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))()


def read_undivided(kind: Kind, directory: Path) -> dict[str, Batches]:
    """Train with equal states of all generators but torch's."""
    L.seed_everything(7, verbose=False)
    own = torch.Generator().manual_seed(int(os.environ["RANK"]))
    loaders: dict[str, Any] = {
        "parts": loader(SAMPLES, sampler=PartOfOrder()),
        "own generator": loader(SAMPLES, shuffle=True, generator=own),
        "two loaders": lambda: [weighted(), weighted()],
    }
    return {
        name: read(kind, directory, make, use_distributed_sampler=False)
        for name, make in loaders.items()
    }


def test_loaders_that_are_not_divided_draw_by_their_generators(tmp_path: Path) -> None:
    """Ranks with equal generators draw equal orders, another one in each epoch. Other seeds
    of a loader's generator and two loaders have different orders.
    """
    by_rank = on_ranks("ours", read_undivided, tmp_path)
    epochs = together([batches["parts"] for batches in by_rank])
    assert [sorted(samples) for samples in epochs] == [[*range(SAMPLES)]] * 2
    assert epochs[0] != epochs[1]
    first, second = (batches["own generator"] for batches in by_rank)
    assert first[0] != second[0]
    assert first[0] != first[1]
    for batches in by_rank:
        steps = batches["two loaders"][0]
        assert [step[:2] for step in steps] != [step[2:] for step in steps]
