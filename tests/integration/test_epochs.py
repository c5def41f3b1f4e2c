"""Each epoch has its own order and its own random numbers, in whatever the training data are read from."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    get_worker_info,
)

from lightning_ddp_ext import SamplerEpochSeeding
from lightning_ddp_ext.errors import SamplerError
from tests.harness.training import KINDS, Kind, make_strategy, make_trainer, on_ranks

NEVER_TOLD = 99
PERSISTENT: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": True}


class Taker:
    """Knows the epoch that it was told last."""

    epoch = NEVER_TOLD

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Echo(Dataset[Tensor]):
    """Gives what it is asked for: samplers say the epoch by their indices."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Told(Taker, Echo):
    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(self.epoch)])


class ToldStream(Taker, IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(4):
            yield torch.tensor([float(self.epoch)])


class ToldSampler(Taker, Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * 4)

    def __len__(self) -> int:
        return 4


class Around(Sampler[Any]):
    """A sampler, or batch sampler, around another one, which it holds under a name of its own."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __iter__(self) -> Iterator[Any]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class ToldBatches(ToldSampler):
    """A batch sampler that knows nothing of torch's."""

    def __iter__(self) -> Iterator[Any]:
        return iter([[self.epoch, self.epoch]] * 2)

    def __len__(self) -> int:
        return 2


class OwnLoader(Taker):
    """No DataLoader."""

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(3):
            yield torch.full((2, 1), float(self.epoch))


class NumberedLoader(Taker):
    """Iterated over by number, as before Python had iterators."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> Tensor:
        if number >= 3:
            raise IndexError
        return torch.full((2, 1), float(self.epoch))


class LoaderAround:
    """No DataLoader, but has one."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.loader


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    chosen = {"batch_size": 2, **options} if options.get("batch_sampler") is None else options
    return DataLoader(Echo() if dataset is None else dataset, **chosen)


LOADERS: dict[str, Callable[[], Any]] = {
    "a sampler": lambda: loader(sampler=ToldSampler()),
    "a sampler, workers": lambda: loader(sampler=ToldSampler(), **PERSISTENT),
    "a sampler in a sampler in a sampler": lambda: loader(sampler=Around(Around(ToldSampler()))),
    "a batch sampler": lambda: loader(batch_sampler=ToldBatches()),
    "a batch sampler in another, workers": lambda: loader(batch_sampler=Around(ToldBatches()), **PERSISTENT),
    "a dataset": lambda: loader(Told()),
    "a dataset, persistent workers": lambda: loader(Told(), **PERSISTENT),
    "a Subset of a ConcatDataset": lambda: loader(Subset(ConcatDataset([Told(), Told()]), [1, 2, 5, 6])),
    "a stream": lambda: loader(ToldStream()),
    "a stream, persistent workers": lambda: loader(ToldStream(), **PERSISTENT),
    "a dict and a list of loaders": lambda: {"a": loader(Told()), "b": [loader(sampler=Around(ToldSampler()))]},
    "a CombinedLoader": lambda: CombinedLoader([loader(Told()), loader(ToldStream())], "min_size"),
    "a loader that is no DataLoader": OwnLoader,
    "a loader without __iter__": NumberedLoader,
    "a loader around a DataLoader, persistent workers": lambda: LoaderAround(loader(ToldStream(), **PERSISTENT)),
}


class Net(L.LightningModule):
    """Writes down which epochs it has been given in which."""

    def __init__(self, train: Callable[[], Any], val: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.loaders = train, val
        self.read: dict[int, set[int]] = {}
        self.validated: dict[int, set[int]] = {}

    def train_dataloader(self) -> Any:
        return self.loaders[0]()

    def val_dataloader(self) -> Any:
        return [] if self.loaders[1] is None else self.loaders[1]()

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.read.setdefault(self.trainer.current_epoch, set()).update(numbers(batch))
        return self.weight.sum()

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self.validated.setdefault(self.trainer.current_epoch, set()).update(numbers(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def numbers(batch: Any) -> list[int]:
    if isinstance(batch, Tensor):
        return [int(number) for number in batch.flatten()]
    parts = batch.values() if isinstance(batch, dict) else batch
    return [number for part in parts if part is not None for number in numbers(part)]


class SaveAfterFirstEpoch(L.Callback):
    """Saves at the end of epoch 0: after its last batch, or as the epoch ends."""

    def __init__(self, path: Path, moment: str) -> None:
        self.path = path
        self.moment = moment

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if self.moment == "last batch" and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.moment == "epoch end":
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def train(who: Kind, directory: Path, net: Net, *callbacks: L.Callback, **options: Any) -> Net:
    own = [SamplerEpochSeeding()] if who == "stock" else []
    ckpt_path = options.pop("ckpt_path", None)
    loaders = options.pop("train_dataloaders", None)
    strategy = make_strategy("ours" if who == "ours" else "stock", directory)
    chosen = {"max_epochs": 3, "use_distributed_sampler": False, "num_sanity_val_steps": 0, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(strategy, callbacks=[*own, *callbacks], **chosen).fit(net, loaders, ckpt_path=ckpt_path)
    return net


def train_and_resume(kind: Kind, directory: Path, who: Kind, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        path = directory / f"{name}.ckpt".replace(" ", "-")
        first = train(who, directory, Net(LOADERS[name]), SaveAfterFirstEpoch(path, "epoch end"))
        found[name] = first.read, train(who, directory, Net(LOADERS[name]), ckpt_path=str(path)).read
    return found


RIGHT = {0: {0}, 1: {1}, 2: {2}}
RESUMED = {1: {1}, 2: {2}}


@pytest.mark.parametrize("kind", KINDS)
def test_the_epoch_reaches_whatever_the_batches_are_made_from(kind: Kind, tmp_path: Path) -> None:
    """Each batch tells the epoch that it is read in, from the first epoch on and after a resume."""
    names = list(LOADERS)
    found = on_ranks(kind, train_and_resume, tmp_path, kind, names, time_limit=60)
    assert found == [dict.fromkeys(names, (RIGHT, RESUMED))] * 2


def train_in_other_ways(kind: Kind, directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for moment in ("last batch", "epoch end"):
        path = directory / f"{moment}.ckpt".replace(" ", "-")
        for name, options in {"plain": {}, "workers": PERSISTENT}.items():
            make = partial(loader, Told(), **options)
            train(kind, directory, Net(make), SaveAfterFirstEpoch(path, moment), max_epochs=1)
            found[f"{moment}, {name}"] = train(kind, directory, Net(make), ckpt_path=str(path)).read
    validation = Net(OwnLoader, lambda: [loader(Told(), **PERSISTENT), loader(batch_sampler=ToldBatches())])
    found["validation"] = train(kind, directory, validation).validated
    reload = {"reload_dataloaders_every_n_epochs": 1}
    found["reloaded"] = train(kind, directory, Net(LOADERS["a stream, persistent workers"]), **reload).read
    wrapped = Net(LOADERS["a sampler in a sampler in a sampler"])
    found["distributed sampler"] = train(kind, directory, wrapped, use_distributed_sampler=True).read
    same = LOADERS["a batch sampler in another, workers"]()
    found["overfit"] = train(kind, directory, Net(lambda: same), overfit_batches=2, **reload).read
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_epoch_reaches_loaders_however_training_goes(kind: Kind, tmp_path: Path) -> None:
    """Validation has training's epoch; reloading, a checkpoint of the last batch and wrapping make no difference."""
    always = ["validation", "reloaded", "distributed sampler", "overfit"]
    resumed = [f"{moment}, {name}" for moment in ("last batch", "epoch end") for name in ("plain", "workers")]
    for found in on_ranks(kind, train_in_other_ways, tmp_path):
        assert found == {**dict.fromkeys(always, RIGHT), **dict.fromkeys(resumed, RESUMED)}


class Chance(Dataset[Tensor]):
    """Random numbers, from all three generators; in main process or workers."""

    def __init__(self, length: int = 4) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        info = get_worker_info()
        worker = -1 if info is None else info.id
        return torch.tensor([worker, random.random(), np.random.rand(), float(torch.rand(()))], dtype=torch.float64)


class Gambler(Net):
    """Writes down what chance gave, by worker and epoch."""

    def __init__(self, train: Callable[[], Any]) -> None:
        super().__init__(train)
        self.drawn: dict[tuple[int, int], list[float]] = {}

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for worker, *numbers in batch.tolist():
            self.drawn.setdefault((self.trainer.current_epoch, int(worker)), []).extend(numbers)
        return self.weight.sum()


def draw(kind: Kind, directory: Path) -> list[dict[tuple[int, int], list[float]]]:
    found: list[dict[tuple[int, int], list[float]]] = []
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    for options in ({}, workers, {**workers, "persistent_workers": True}):
        for seed in (5, 5, 6):
            torch.manual_seed(len(found))  # another beginning each time
            callback = SamplerEpochSeeding(seed=seed)
            net = Gambler(partial(loader, Chance(), batch_size=1, **options))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                strategy = make_strategy(kind, directory)
                make_trainer(strategy, callbacks=[callback], max_epochs=2, use_distributed_sampler=False).fit(net)
            found.append(net.drawn)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_random_streams_belong_to_seed_epoch_rank_and_worker(kind: Kind, tmp_path: Path) -> None:
    """A run repeats another of the same seed; no two epochs, ranks, workers or seeds have a number in common."""
    by_rank = on_ranks(kind, draw, tmp_path)
    for runs in by_rank:
        assert runs[0] == runs[1]
        assert runs[3] == runs[4]
        assert runs[6] == runs[7]
    for first in (0, 3, 6):
        drawn = [numbers for runs in by_rank for run in (runs[first], runs[first + 2]) for numbers in run.values()]
        assert len(drawn) == 2 * 2 * 2 * (1 if first == 0 else 2)
        every = [number for numbers in drawn for number in numbers]
        assert len(every) == 2 * 2 * 2 * 4 * 3
        assert len(set(every)) == len(every)


def test_a_seed_that_cannot_be_is_refused_at_once() -> None:
    """A negative seed, or none that is a number, is refused where it is written."""
    for seed in (-1, "7", True):
        with pytest.raises(SamplerError, match="seed must be"):
            SamplerEpochSeeding(seed=seed)  # type: ignore[arg-type]


class Shuffling(Sampler[int]):
    """The same order in each epoch."""

    shuffle = True

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(1).sample(range(4), 4))

    def __len__(self) -> int:
        return 4


def warnings_of(kind: Kind, directory: Path, *, use_distributed_sampler: bool) -> list[str]:
    callbacks: list[L.Callback] = [SamplerEpochSeeding()] if kind == "stock" else []
    options = {"use_distributed_sampler": use_distributed_sampler, "reload_dataloaders_every_n_epochs": 1}
    trainer = make_trainer(make_strategy(kind, directory), callbacks=callbacks, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # as Python shows them
        trainer.fit(Net(partial(loader, sampler=Shuffling()), partial(loader, sampler=Shuffling())))
    return [str(each.message) for each in caught if "set_epoch" in str(each.message)]


def both_warnings(kind: Kind, directory: Path) -> list[list[str]]:
    return [warnings_of(kind, directory, use_distributed_sampler=wrapped) for wrapped in (False, True)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_that_shuffles_and_takes_no_epoch_is_named_once(kind: Kind, tmp_path: Path) -> None:
    """Rank 0 warns once in a run, also where the sampler has been put into one that shares out what it yields."""
    first, second = on_ranks(kind, both_warnings, tmp_path)
    for messages in first:
        (message,) = messages
        assert "Shuffling shuffles, and has no set_epoch" in message
        assert "give it a method set_epoch(epoch)" in message
    assert second == [[], []]


class Stopped(Exception):
    pass


class Failing(Net):
    def training_step(self, batch: Any, index: int) -> Tensor:
        if self.trainer.current_epoch == 1:
            raise Stopped
        return super().training_step(batch, index)


class Copying(L.Callback):
    """Copies and pickles the loader in the middle of training."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.copies: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not self.copies:
            self.copies = [copy.deepcopy(self.original), pickle.loads(pickle.dumps(self.original))]


def no_function(worker: int) -> None:
    pass


def parts_of(loader: Any) -> tuple[Any, ...]:
    return type(loader), getattr(loader, "worker_init_fn", None), loader.batch_sampler, loader.sampler


def use_twice(kind: Kind, directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    made = loader(Told(), worker_init_fn=no_function, **PERSISTENT)
    before = parts_of(made)
    for name, net in {"failed": Failing(OwnLoader), "first": Net(OwnLoader), "second": Net(OwnLoader)}.items():
        with suppress(Stopped):
            train(kind, directory, net, train_dataloaders=made)
        found[name] = net.read, parts_of(made) == before
    plain = loader(Told())
    copying = Copying(plain)
    net = train(kind, directory, Net(OwnLoader), copying, train_dataloaders=plain)
    types = [type(each) is DataLoader for each in (plain, *copying.copies)]
    read = [[numbers(batch) for batch in each] for each in copying.copies]
    found["copied"] = net.read, types, read
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_loaders_are_afterwards_what_they_were(kind: Kind, tmp_path: Path) -> None:
    """After a run, finished or not, class, worker_init_fn and samplers are the user's again, and another run begins."""
    for found in on_ranks(kind, use_twice, tmp_path):
        assert found["failed"] == ({0: {0}}, True)
        assert found["first"] == found["second"] == (RIGHT, True)
        assert found["copied"] == (RIGHT, [True] * 3, [[[0, 0], [0, 0]]] * 2)
