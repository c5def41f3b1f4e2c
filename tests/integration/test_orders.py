"""Each rank reads the right samples in the right order, as training sees them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_ddp_ext.errors import ConfigurationError
from tests.harness.training import At, Kind, make_strategy, make_trainer, on_both, on_ranks
from tests.integration.continuing import KEPT, Net, Numbers, Saver

Batches = dict[int, list[list[int]]]  # by epoch


def fit(
    kind: Kind,
    directory: Path,
    make: Callable[[], Any],
    ckpt_path: str | None = None,
    **options: Any,
) -> Batches:
    module = Net(make)
    strategy = make_strategy(kind, directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(strategy, **{"max_epochs": 3, "limit_val_batches": 0, **options})
        trainer.fit(module, ckpt_path=ckpt_path)
    return {
        epoch: [batch for each, _, *batch in module.steps if each == epoch]
        for epoch, *_ in module.steps
    }


class Backwards(BatchSampler):
    """A batch sampler of which Lightning makes a new object, with a sampler for the rank."""

    def __iter__(self) -> Iterator[list[int]]:
        return (batch[::-1] for batch in super().__iter__())


def loader(length: int, **options: Any) -> Callable[[], DataLoader[Any]]:
    chosen = options if "batch_sampler" in options else {"batch_size": 2, **options}
    return lambda: DataLoader(Numbers(length), **chosen)


def orders(kind: Kind, directory: Path) -> dict[str, Any]:
    loaders: dict[str, Any] = {
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
    found: dict[str, Any] = {
        name: fit(kind, directory, each, max_epochs=2) for name, each in loaders.items()
    }
    generator = (torch.tensor([[float(number)]]) for number in range(9))
    found["generator"] = fit(
        kind, directory, lambda: generator, max_epochs=2, limit_train_batches=3
    )
    found["overfit"] = fit(kind, directory, loader(11, shuffle=True), overfit_batches=3)
    saver = Saver(directory, ["train_epoch_end-3"])
    L.seed_everything(123, verbose=False)
    found["seeded"] = fit(kind, directory, loader(11, shuffle=True), callbacks=[saver])
    found["resumed"] = fit(
        kind, directory, loader(11, shuffle=True), ckpt_path=saver.saved["train_epoch_end-3"]
    )
    return found


def test_the_default_order_is_stock_lightnings(tmp_path: Path) -> None:
    """Every batch of every epoch is stock's, also after a resume.

    This holds for any length, batch size and seed.
    """
    ours, stock = on_both(orders, tmp_path)
    assert ours == stock
    assert ours[0]["resumed"].keys() == {1, 2}
    assert ours[0]["generator"] == {0: [[0], [1], [2]], 1: [[3], [4], [5]]}
    assert ours[0]["seeded"] != ours[0]["padded"]


@dataclass
class Draws:
    """What a rank reads of each sampler, whose seed differs on each rank."""

    with_replacement: Batches  # 36 draws of 40 samples
    with_replacement_in_batches: Batches
    without_replacement: Batches  # 36 of 40 samples
    shuffled: Batches  # 40 samples
    even: Batches  # 40 draws
    even_in_batches: Batches
    weighted: Batches  # 4000 draws of 4 samples
    weighted_epochs: Batches  # 36 of 40 samples without replacement; the last one weighs nothing


class Even(RandomSampler):
    """A user's sampler that draws each even sample twice."""

    def __iter__(self) -> Iterator[int]:
        return iter([index & ~1 for index in super().__iter__()])


WEIGHTS = [1.0, 3.0, 0.0, 6.0]


def draw(kind: Kind, directory: Path) -> Draws:
    torch.manual_seed(os.getpid())

    def read(**options: Any) -> Batches:
        return fit(kind, directory, loader(40, **options), max_epochs=1)

    repeating = RandomSampler(range(40), replacement=True, num_samples=36)
    even = Even(range(40))
    weighted = WeightedRandomSampler(WEIGHTS, 4000)
    once = WeightedRandomSampler([1.0] * 39 + [0.0], 36, replacement=False)
    return Draws(
        with_replacement=read(sampler=repeating),
        with_replacement_in_batches=read(batch_sampler=Backwards(repeating, 2, False)),
        without_replacement=read(sampler=RandomSampler(range(40), num_samples=36)),
        shuffled=read(shuffle=True),
        even=read(sampler=even),
        even_in_batches=read(batch_sampler=BatchSampler(even, 2, False)),
        weighted=fit(kind, directory, loader(4, batch_size=100, sampler=weighted), max_epochs=1),
        weighted_epochs=fit(kind, directory, loader(40, sampler=once)),
    )


@pytest.fixture(scope="module")
def draws(tmp_path_factory: pytest.TempPathFactory) -> list[Draws]:
    """What two ranks read, whose seeds differ."""
    env = {"PL_GLOBAL_SEED": lambda rank: str(100 + rank)}
    return on_ranks("ours", draw, tmp_path_factory.mktemp("draws"), env=env)


def samples(runs: Iterable[Batches], epoch: int = 0) -> list[int]:
    """Return all samples that the ranks read in an epoch."""
    return [sample for run in runs for batch in run[epoch] for sample in batch]


def test_ranks_divide_one_draw_of_a_sampler(draws: list[Draws]) -> None:
    """Together they read what the sampler draws, also where it is in a batch sampler."""
    assert sorted(samples(rank.shuffled for rank in draws)) == list(range(40))

    part = samples(rank.without_replacement for rank in draws)
    assert len(part) == 36
    assert len(set(part)) == 36

    replaced = samples(rank.with_replacement for rank in draws)
    assert len(replaced) == 36
    assert len(set(replaced)) < 36

    in_batches = samples(rank.with_replacement_in_batches for rank in draws)
    assert len(in_batches) == 36
    assert len(set(in_batches)) < 36

    twice = sorted([*range(0, 40, 2)] * 2)
    assert sorted(samples(rank.even for rank in draws)) == twice
    assert sorted(samples(rank.even_in_batches for rank in draws)) == twice


def test_each_epoch_of_a_weighted_sampler_is_another_draw(draws: list[Draws]) -> None:
    """All ranks divide one draw per epoch, and read none of its samples twice."""
    epochs = [samples((rank.weighted_epochs for rank in draws), epoch) for epoch in range(3)]
    for drawn in epochs:
        assert len(drawn) == 36
        assert len(set(drawn)) == 36
        assert 39 not in drawn, "it weighs nothing"
    assert len({tuple(drawn) for drawn in epochs}) == 3


def test_weights_are_the_chances_of_samples(draws: list[Draws]) -> None:
    """The number of draws of each sample is within five standard deviations."""
    counts = np.bincount(samples(rank.weighted for rank in draws), minlength=4)
    expected = 4000 * np.array(WEIGHTS) / sum(WEIGHTS)
    assert counts.sum() == 4000
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected)).all()


class Scaled(DataLoader[Any]):
    """Keeps its argument under another name."""

    def __init__(self, dataset: Any, factor: int = 1, **options: Any) -> None:
        super().__init__(dataset, **options)
        self._by = factor

    def __iter__(self) -> Any:
        return (batch * self._by for batch in super().__iter__())


class Fixed(DataLoader[Any]):
    """Chooses all of torch's options itself."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, batch_size=2, shuffle=True)


class Repeated(BatchSampler):
    """Takes one more argument than torch's batch sampler."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool, times: int = 1) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.times = times

    def __iter__(self) -> Iterator[list[int]]:
        return (batch * self.times for batch in super().__iter__())


class Drawn(BatchSampler):
    """Draws its batches in its constructor."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.batches = list(super().__iter__())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class DrawnPairs(Drawn):
    """Draws its batches in a constructor that takes other arguments."""

    def __init__(self, samples: int) -> None:
        super().__init__(SequentialSampler(range(samples)), 2, False)


class Known(DataLoader[Any]):
    """Reads an iterator that its constructor starts."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.reader = super().__iter__()

    def __iter__(self) -> Any:
        return self.reader


def batched(batch_sampler: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(8), batch_sampler=batch_sampler)


LIKE_STOCK: dict[str, Callable[[], DataLoader[Any]]] = {
    "plain": lambda: DataLoader(Numbers(8), batch_size=2, shuffle=True),
    "drawn": lambda: batched(Drawn(RandomSampler(range(8)), 2, False)),
    "repeated": lambda: batched(Repeated(RandomSampler(range(8)), 2, False, times=2)),
    "begun": lambda: Known(Numbers(8), batch_size=2, shuffle=True),
}
# Stock refuses these, or creates them again with other arguments.
COPIED: dict[str, Callable[[], DataLoader[Any]]] = {
    "scaled": lambda: Scaled(Numbers(8), 10, batch_size=2, shuffle=True),
    "fixed": lambda: Fixed(Numbers(8)),
    "explicit": lambda: batched(BatchSampler(RandomSampler(range(8)), 2, False)),
}
ONLY_IN_A_HOOK = ("repeated",)
ONLY_BEFORE_THE_RUN = ("begun",)


def read_with_own_classes(kind: Kind, directory: Path) -> dict[str, Any]:
    """Return the batches of loaders that are created in the module's hook, and of
    loaders that exist before the run.
    """
    found: dict[str, Any] = {}
    for name, make in (LIKE_STOCK if kind == "stock" else {**LIKE_STOCK, **COPIED}).items():
        exists = make()
        if name not in ONLY_BEFORE_THE_RUN:
            found[f"{name}, in a hook"] = fit(kind, directory, make, max_epochs=2)
        if name not in ONLY_IN_A_HOOK:
            epochs = 1 if name == "begun" else 2  # its iterator ends with the first epoch
            found[name] = fit(kind, directory, lambda exists=exists: exists, max_epochs=epochs)  # type: ignore[misc]
    return found


def test_loaders_and_batch_samplers_keep_their_arguments(tmp_path: Path) -> None:
    """Each rank reads its part through the user's loader and batch sampler.

    Loaders are copied, and batch samplers are created again; else batches are stock's.
    """
    for ours, stock in zip(*on_both(read_with_own_classes, tmp_path), strict=True):
        assert {name: ours[name] for name in stock} == stock
        plain: Batches = ours["plain"]
        for name in ("fixed", "explicit"):
            assert (ours[name], ours[f"{name}, in a hook"]) == (plain, plain), name
        by_ten = {
            epoch: [[10 * each for each in batch] for batch in batches]
            for epoch, batches in plain.items()
        }
        assert (ours["scaled"], ours["scaled, in a hook"]) == (by_ten, by_ten)


@dataclass
class Shown:
    """What a callback sees of a loader."""

    has_distributed_sampler: bool
    has_one_sampler: bool  # that of its batch sampler
    length: int
    loader_type: str
    owner_type: str  # of the batch sampler, or of the loader without one
    batch_size: int | None
    drop_last: bool
    has_users_dataset: bool


@dataclass
class Copied:
    """A run with a loader that is copied."""

    shown: list[Shown]
    read: Batches
    is_users_unchanged: bool


def look_at_copies(kind: Kind, directory: Path) -> list[Copied]:
    return [
        look_at_copy(kind, directory, Scaled(Numbers(8), shuffle=True, **options))
        for options in ({}, {"batch_size": 3, "drop_last": True}, {"batch_size": None}, KEPT)
    ]


def look_at_copy(kind: Kind, directory: Path, own: Scaled) -> Copied:
    shown: list[Shown] = []

    def look(trainer: L.Trainer) -> None:
        copied: Any = trainer.train_dataloader
        owner = copied if copied.batch_sampler is None else copied.batch_sampler
        shown.append(
            Shown(
                has_distributed_sampler=isinstance(owner.sampler, DistributedSampler),
                has_one_sampler=owner.sampler is copied.sampler,
                length=len(copied),
                loader_type=type(copied).__name__,
                owner_type=type(owner).__name__,
                batch_size=copied.batch_size,
                drop_last=copied.drop_last,
                has_users_dataset=copied.dataset is own.dataset,
            )
        )

    before = dict(vars(own))
    read = fit(kind, directory, lambda: own, callbacks=[At("on_train_start", look)])
    return Copied(shown, read, is_users_unchanged=vars(own) == before)


def test_a_copied_loader_looks_as_stocks_does(tmp_path: Path) -> None:
    """A copied loader has the options and samplers of the one that stock creates.

    The user's own is unchanged.
    """
    ours, stock = on_both(look_at_copies, tmp_path)
    assert ours == stock


def refuse_batches(kind: Kind, directory: Path) -> list[str]:
    messages = []
    repeated = Repeated(SequentialSampler(range(8)), 2, False, times=2)
    for batch_sampler in (DrawnPairs(8), repeated, [[0, 1], [2, 3]]):
        made = batched(batch_sampler)
        with pytest.raises(ConfigurationError) as raised:
            fit(kind, directory, lambda made=made: made)  # type: ignore[misc]
        messages.append(str(raised.value))
    return messages


def test_batches_that_cannot_be_divided_are_refused_with_a_remedy(tmp_path: Path) -> None:
    """Every rank's error names the class and the remedies.

    The constructor takes other arguments, or another one that is unknown, or the
    batches are in a list.
    """
    for drawn, repeated, listed in on_ranks("ours", refuse_batches, tmp_path):
        assert drawn.startswith("DrawnPairs over SequentialSampler takes no distributed sampler")
        assert repeated.startswith(
            "batch_sampler Repeated must have no arguments besides torch's (got times), or be"
            " created in a hook such as train_dataloader"
        )
        assert listed.startswith("list takes no distributed sampler")
        for message in (drawn, repeated, listed):
            assert "batch_sampler=DistributedBatchSamplerWrapper(...)" in message
            assert "Trainer(use_distributed_sampler=False)" in message
