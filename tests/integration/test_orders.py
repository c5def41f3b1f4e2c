"""Each rank reads the right samples in the right order, as training sees them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from tests.data.test_samplers import p_of
from tests.harness.training import Kind, make_strategy, make_trainer, on_both, on_ranks
from tests.integration.continuing import Net, Numbers, Saver

Batches = dict[int, list[list[int]]]  # by epoch


def fit(kind: Kind, directory: Path, make: Callable[[], Any], **options: Any) -> Batches:
    module, ckpt_path = Net(make), options.pop("ckpt_path", None)
    strategy = make_strategy(kind, directory, **options.pop("strategy", {}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(strategy, **{"max_epochs": 3, "limit_val_batches": 0, **options})
        trainer.fit(module, ckpt_path=ckpt_path)
    return {epoch: [batch for each, _, *batch in module.steps if each == epoch] for epoch, *_ in module.steps}


class Backwards(BatchSampler):
    """A loader class of which Lightning makes a new object, with its own sampler."""

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
        "own batches": lambda: DataLoader(Numbers(9), batch_sampler=Backwards(SequentialSampler(range(9)), 2, True)),
        "plain batches": lambda: DataLoader(
            Numbers(9), batch_sampler=BatchSampler(SequentialSampler(range(9)), 2, True)
        ),
        "two loaders": lambda: [loader(7, shuffle=True)(), loader(5, shuffle=True)()],
    }
    found: dict[str, Any] = {name: fit(kind, directory, each, max_epochs=2) for name, each in loaders.items()}
    generator = (torch.tensor([[float(number)]]) for number in range(9))
    found["generator"] = fit(kind, directory, lambda: generator, max_epochs=2, limit_train_batches=3)
    found["overfit"] = fit(kind, directory, loader(11, shuffle=True), overfit_batches=3)
    saver = Saver(directory, ["train_epoch_end-3"])
    L.seed_everything(123, verbose=False)
    found["seeded"] = fit(kind, directory, loader(11, shuffle=True), callbacks=[saver])
    found["resumed"] = fit(kind, directory, loader(11, shuffle=True), ckpt_path=saver.saved["train_epoch_end-3"])
    return found


def test_the_default_order_is_stock_lightnings(tmp_path: Path) -> None:
    """Every batch of every epoch is the same, for any length, batch size and seed, and after a resume."""
    ours, stock = on_both(orders, tmp_path)
    assert ours == stock
    assert ours[0]["resumed"].keys() == {1, 2}
    assert ours[0]["generator"] == {0: [[0], [1], [2]], 1: [[3], [4], [5]]}
    assert ours[0]["seeded"] != ours[0]["padded"]


def samples(runs: Iterable[Batches], epoch: int) -> list[int]:
    """Return all samples that the ranks read in an epoch."""
    return [sample for run in runs for batch in run[epoch] for sample in batch]


def each_once() -> DataLoader[Any]:
    """36 draws an epoch of 39 samples, and of one that weighs nothing."""
    sampler = WeightedRandomSampler([1.0] * 39 + [0.0], 36, replacement=False)
    return DataLoader(Numbers(40), 2, sampler=sampler)


class Even(RandomSampler):
    """A user's sampler that yields as many."""

    def __iter__(self) -> Iterator[int]:
        return iter([index & ~1 for index in super().__iter__()])


def draw(kind: Kind, directory: Path) -> tuple[Batches, ...]:
    """Return the samples drawn once each, by weight, by other samplers than one over all samples, or shuffled."""
    torch.manual_seed(os.getpid())
    others = RandomSampler(range(40), True, 36), RandomSampler(range(40), num_samples=36), Even(range(40))
    own = [fit(kind, directory, loader(40, sampler=each), max_epochs=1) for each in others]
    own.append(fit(kind, directory, loader(40, shuffle=True), max_epochs=1))
    own.append(fit(kind, directory, loader(40, batch_sampler=Backwards(others[0], 2, False)), max_epochs=1))
    by_weight = loader(4, batch_size=100, sampler=WeightedRandomSampler([1.0, 3.0, 0.0, 6.0], 4000))
    return fit(kind, directory, each_once), fit(kind, directory, by_weight, max_epochs=1), *own


def test_ranks_share_out_what_a_sampler_draws(tmp_path: Path) -> None:
    """All ranks divide one weighted draw per epoch, even if their seeds differ."""
    env = {"PL_GLOBAL_SEED": lambda rank: str(100 + rank)}
    whole, by_weight, *others = zip(*on_ranks("ours", draw, tmp_path, env=env), strict=True)  # type: ignore[arg-type]
    replaced, part, even, shuffled, batched = (samples(each, 0) for each in others)
    assert sorted(shuffled) == list(range(40))
    assert len(replaced) == len(batched) == len(part) == len({*part}) == 36 > max(len({*replaced}), len({*batched}))
    assert ({*even}, len(even)) == ({*range(0, 40, 2)}, 40)
    epochs = [samples(whole, epoch) for epoch in range(3)]
    for drawn in epochs:
        assert len(drawn) == len(set(drawn)) == 36
        assert 39 not in drawn
    assert len({tuple(drawn) for drawn in epochs}) == 3
    counts = np.bincount(samples(by_weight, 0), minlength=4)
    assert (counts.sum(), counts[2]) == (4000, 0)
    assert p_of(counts[[0, 1, 3]], [400, 1200, 2400]) > 1e-4
