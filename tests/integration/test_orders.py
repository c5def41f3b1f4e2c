"""Whose samples each rank reads, and in which order, as training sees it."""

from __future__ import annotations

import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, SequentialSampler, WeightedRandomSampler

from lightning_ddp_ext import (
    ConfigurationError,
    DDPExtStrategy,
    DistributedBatchSamplerWrapper,
    DistributedWeightedSampler,
    SamplerEpochSeeding,
    ScalableDistributedSampler,
)
from tests.integration.training import Kind, make_strategy, make_trainer, on_both, on_ranks

Batches = dict[int, list[list[int]]]  # by epoch


class Indices(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Reader(L.LightningModule):
    """Writes down each batch."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.make = make
        self.read: Batches = {}
        self.validated: list[list[int]] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.read.setdefault(self.trainer.current_epoch, []).append(batch.tolist())
        return self.weight.sum()

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.validated.append(batch.tolist())

    def predict_step(self, batch: Tensor, index: int) -> list[int]:
        found: list[int] = batch.tolist()
        return found

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return self.make()

    val_dataloader = predict_dataloader = train_dataloader


class SaveAfterFirstEpoch(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def fit(kind: Kind, directory: Path, make: Callable[[], Any], *callbacks: L.Callback, **options: Any) -> Batches:
    module = PairReader(make)
    strategy = make_strategy(kind, directory, **options.pop("strategy", {}))
    ckpt_path = options.pop("ckpt_path", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = {"max_epochs": 3, "limit_val_batches": 0, **options}
        make_trainer(strategy, callbacks=list(callbacks), **chosen).fit(module, ckpt_path=ckpt_path)
    return module.read


class Pairs(BatchSampler):
    """A class that Lightning makes anew, with its own sampler."""

    def __init__(self, sampler: Any, reverse: bool) -> None:
        super().__init__(sampler, 2, drop_last=True)
        self.reverse = reverse

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield batch[::-1] if self.reverse else batch


def loader(length: int, **options: Any) -> Callable[[], DataLoader[int]]:
    chosen = {} if "batch_sampler" in options else {"batch_size": 2}
    return lambda: DataLoader(Indices(length), **{**chosen, **options})


LOADERS: dict[str, Callable[[], Any]] = {
    **{
        f"{length} by {size}, {shuffle=}, {drop_last=}": loader(
            length, batch_size=size, shuffle=shuffle, drop_last=drop_last
        )
        for length, size, shuffle, drop_last in [
            (11, 2, True, False),
            (11, 3, False, False),
            (10, 4, True, True),
            (3, 2, True, False),
            (1, 1, True, False),
        ]
    },
    "no batches": loader(5, batch_size=None, collate_fn=lambda index: torch.tensor([index])),
    "a batch sampler of one's own": lambda: DataLoader(
        Indices(9), batch_sampler=Pairs(SequentialSampler(range(9)), reverse=True)
    ),
    "two loaders": lambda: [loader(7, shuffle=True)(), loader(5, shuffle=True)()],
}


class PairReader(Reader):
    def training_step(self, batch: Any, index: int) -> Tensor:
        together = torch.cat(batch) if isinstance(batch, (list, tuple)) else batch
        return super().training_step(together, index)


def orders(kind: Kind, directory: Path, seed: int | None) -> dict[str, Any]:
    if seed is not None:
        L.seed_everything(seed, verbose=False)
    found: dict[str, Any] = {name: fit(kind, directory, make) for name, make in LOADERS.items()}
    found["overfit"] = fit(kind, directory, loader(11, shuffle=True), overfit_batches=3)
    path = directory / "first.ckpt"
    fit(kind, directory, loader(11, shuffle=True), SaveAfterFirstEpoch(path))
    found["resumed"] = fit(kind, directory, loader(11, shuffle=True), ckpt_path=str(path))
    return found


@pytest.mark.parametrize("seed", [None, 123])
def test_the_default_order_is_stock_lightnings(seed: int | None, tmp_path: Path) -> None:
    """Batch for batch, in every epoch, whatever the length, the batches and the seed, and after a resume."""
    ours, stock = on_both(orders, tmp_path, seed)
    assert ours == stock
    assert ours[0]["resumed"].keys() == {1, 2}


def scalable(kind: Kind, directory: Path) -> list[Batches]:
    options = {"strategy": {"sampler": "scalable"}}
    return [fit(kind, directory, loader(37, shuffle=shuffle), **options) for shuffle in (True, False)]


def test_the_scalable_order_reads_each_sample_once_in_another_order_each_epoch(tmp_path: Path) -> None:
    """All ranks together read everything, and one sample twice, since 2 ranks do not divide 37."""
    by_rank = on_ranks("ours", scalable, tmp_path)
    for number in range(2):
        runs = [runs[number] for runs in by_rank]
        for epoch in range(3):
            read = samples(runs, epoch)
            assert set(read) == set(range(37))
            assert len(read) == 38
        assert len({str(batches) for batches in runs[0].values()}) == 3


def samples(runs: list[Batches], epoch: int) -> list[int]:
    """Everything that the ranks have read in an epoch."""
    return [sample for run in runs for batch in run[epoch] for sample in batch]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": "fast"}, r"sampler must be 'torch' or 'scalable' \(got 'fast'\)"),
        ({"sampler": None}, r"sampler must be 'torch' or 'scalable' \(got None\)"),
        ({"exact_evaluation": "yes"}, r"exact_evaluation must be True or False \(got 'yes'\)"),
        ({"exact_evaluation": 1}, r"exact_evaluation must be True or False \(got 1\)"),
        ({"idle_ranks": "wait"}, r"idle_ranks must be 'repeat' or 'skip' \(got 'wait'\)"),
        ({"uneven_inputs": "pad"}, r"uneven_inputs must be None or 'stop_at_shortest' or 'join' \(got 'pad'\)"),
        ({"resume_data": "all"}, r"resume_data must be 'exact' or 'epoch' or 'off' \(got 'all'\)"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    """The error names the argument, what it may be, and what it was."""
    with pytest.raises(ConfigurationError, match=message):
        DDPExtStrategy(**options)


class Careless(Sampler[int]):
    """Draws from Python's generator, which nobody has made equal on all ranks."""

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(40), 40))


class WithGenerator(Careless):
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(os.getpid())

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(40, generator=self.generator).tolist())


def share_chance(kind: Kind, directory: Path) -> dict[str, Batches]:
    torch.manual_seed(os.getpid())
    random.seed(os.getpid())
    weighted = WeightedRandomSampler([1.0] * 39 + [0.0], 40)
    samplers = {"random": Careless(), "generator": WithGenerator(), "weighted": weighted}
    found = {name: fit(kind, directory, loader(40, sampler=sampler)) for name, sampler in samplers.items()}
    found["plain"] = fit(kind, directory, loader(40, shuffle=True))
    return found


def test_samplers_with_random_numbers_of_their_own_are_shared_out_whole(tmp_path: Path) -> None:
    """Each rank reads its part of one list; with stock Lightning of a list of its own, so that samples are lost."""
    ours, stock = on_both(share_chance, tmp_path)
    for name in ("random", "generator"):
        for epoch in range(3):
            assert sorted(samples([run[name] for run in ours], epoch)) == list(range(40))
            assert len(set(samples([run[name] for run in stock], epoch))) < 40
    for run in ours:
        for batches in run.values():
            assert batches[0] != batches[1] != batches[2]
    drawn = samples([run["weighted"] for run in ours], 0)
    assert len(drawn) == 40
    assert 39 not in drawn


def test_ranks_with_other_seeds_share_one_order(tmp_path: Path) -> None:
    """Rank 0's seed is everybody's; with stock Lightning each has its own, and samples are lost."""
    env = {"PL_GLOBAL_SEED": lambda rank: str(100 + rank)}
    ours = on_ranks("ours", share_chance, tmp_path, env=env)
    stock = on_ranks("stock", share_chance, tmp_path, env=env)
    for epoch in range(3):
        assert sorted(samples([run["plain"] for run in ours], epoch)) == list(range(40))
        assert len(set(samples([run["plain"] for run in stock], epoch))) < 40


class Buckets(BatchSampler):
    """Batches of neighbours, in random order."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return -(-self.length // 4)

    def __iter__(self) -> Iterator[list[int]]:
        starts = list(range(0, self.length, 4))
        random.shuffle(starts)
        for start in starts:
            yield list(range(start, min(start + 4, self.length)))


def chosen_samplers() -> dict[str, DataLoader[int]]:
    weights = [1.0] * 20 + [0.0] * 4
    scalable = ScalableDistributedSampler(Indices(24), seed=3)
    return {
        "weighted": loader(24, sampler=DistributedWeightedSampler(weights, 24, seed=3))(),
        "scalable": loader(24, sampler=scalable)(),
        "scalable in batches": loader(24, batch_sampler=BatchSampler(scalable, 2, drop_last=False))(),
        "buckets": loader(24, batch_sampler=DistributedBatchSamplerWrapper(Buckets(24), seed=3))(),
    }


def _itself(made: DataLoader[int]) -> DataLoader[int]:
    return made


def train_with_chosen(kind: Kind, directory: Path, devices: int) -> Any:
    """With samplers that were built before there was a process group, where ours makes it."""
    found = {}
    for name, each in chosen_samplers().items():
        before = each.batch_sampler, each.sampler
        callbacks = [SamplerEpochSeeding()] if kind == "stock" else []
        read = fit(kind, directory, partial(_itself, each), *callbacks, devices=devices)
        found[name] = read, (each.batch_sampler, each.sampler) == before
    return found


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_samplers_of_this_package_that_the_user_chose_are_left_alone(kind: Kind, tmp_path: Path) -> None:
    """Built before the ranks know each other, they share out one order, another in each epoch."""
    by_world = {}
    for world_size in (1, 2, 3) if kind == "ours" else (2,):
        (tmp_path / str(world_size)).mkdir()
        place = tmp_path / str(world_size)
        found = by_world[world_size] = on_ranks(kind, train_with_chosen, place, world_size, world_size=world_size)
        for name in chosen_samplers():
            runs = [run[name][0] for run in found]
            assert all(run[name][1] for run in found)
            assert runs[0][0] != runs[0][1] != runs[0][2]
            for epoch in range(3):
                read = samples(runs, epoch)
                assert len(read) == 24
                assert max(Counter(read).values()) == 1 or name == "weighted"
                assert name != "weighted" or max(read) < 20
    batches = {
        world_size: sorted(batch for run in found for batch in run["buckets"][0][0])
        for world_size, found in by_world.items()
    }
    assert all(each == [list(range(start, start + 4)) for start in range(0, 24, 4)] for each in batches.values())


def evaluate_batches(kind: Kind, directory: Path) -> Any:
    callbacks: list[L.Callback] = [SamplerEpochSeeding()] if kind == "stock" else []
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("validate", "predict"):
            module = Reader(loader(20, batch_sampler=DistributedBatchSamplerWrapper(Buckets(20), uneven="exact")))
            trainer = make_trainer(make_strategy(kind, directory), callbacks=callbacks)
            result = getattr(trainer, name)(module, **({"verbose": False} if name == "validate" else {}))
            found[name] = module.validated if name == "validate" else result
    return found


def test_wrapped_batches_are_evaluated_and_predicted_once_each(tmp_path: Path) -> None:
    """Both keep the wrapper; 5 batches on 2 ranks leave one rank a step that does not count."""
    found = on_ranks("ours", evaluate_batches, tmp_path)
    whole = [list(range(start, start + 4)) for start in range(0, 20, 4)]
    assert sorted(batch for run in found for batch in run["predict"]) == whole
    validated = [batch for run in found for batch in run["validate"]]
    assert sorted(map(list, {tuple(batch) for batch in validated})) == whole
    assert len(validated) == 6
