"""The user's loaders, samplers and datasets: left as they are, shown in the Trainer, and given the epoch."""

from __future__ import annotations

import copy
import os
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader

from tests.harness import training as harness
from tests.harness.ranks import by_hand_env, run_ranks
from tests.harness.training import At, Kind, data, make_strategy, make_trainer, on_both
from tests.integration.continuing import KEPT, Loaders, Numbers, Training, Turning, sampled, stream

SAMPLES = 16
POINT = "train_batch_end-2"


class InTwos(BatchSampler):
    """A batch sampler of the user's own."""


class OwnLoader(DataLoader[Any]):
    """A loader of the user's own, with arguments like those of torch_geometric's."""

    def __init__(self, dataset: Any, batch_size: int = 1, shuffle: bool = False, own: Any = None, **options: Any):
        self.own = own
        super().__init__(dataset, batch_size, shuffle, **options)

    def write(self, value: Any) -> Any:
        self.own, before = value, self.own
        return before


def own_batches(rank: int, world_size: int) -> DataLoader[Any]:
    sampler = InTwos(Turning(SAMPLES, rank, world_size), 2, drop_last=False)
    return DataLoader(Numbers(SAMPLES), batch_sampler=sampler)  # type: ignore[arg-type]


LOADERS: dict[str, tuple[Loaders, dict[str, Any]]] = {
    "shuffled": (lambda *own: OwnLoader(Numbers(SAMPLES), 2, shuffle=True), {}),
    "a sampler, workers that stay": (sampled("distributed", SAMPLES, **KEPT), {}),
    "a batch sampler": (own_batches, {"use_distributed_sampler": False}),
    "a stream": (stream(8), {}),
}


def training(directory: Path, name: str, make: Loaders, rank: int, world_size: int, **options: Any) -> Training:
    chosen = {"max_epochs": 2, "dropout": False, **options}
    return Training(lambda: make(rank, world_size), directory, world_size, chosen, name=name)


def snapshot(loader: Any) -> dict[str, Any]:
    """Return the state of a loader, its samplers and its dataset, without epochs and torch's workers."""
    parts = {"loader": loader, "dataset": loader.dataset, "sampler": loader.sampler}
    parts |= {"batch sampler": loader.batch_sampler}
    found = {}
    for name, part in parts.items():
        attributes = {key: id(value) for key, value in vars(part).items() if key not in ("epoch", "_iterator")}
        found[name] = (id(part), type(part), attributes)
    return found


def is_as_before(rank: int, world_size: int, directory: Path) -> list[str]:
    """Return the differences after a run, and after one that was resumed and failed."""
    wrong = []
    for name, (make, options) in LOADERS.items():
        loader = make(rank, world_size)
        before = snapshot(loader)
        runs = training(directory, name, lambda *_, loader=loader: loader, rank, world_size, **options)  # type: ignore[misc]
        path = runs.run(POINT).saved[POINT]
        wrong += [f"{part} of {name}" for part, was in before.items() if snapshot(loader)[part] != was]
        runs.run(ckpt_path=path, fail_at=(0, 3))
        wrong += [f"{part} of {name}, resumed" for part, was in before.items() if snapshot(loader)[part] != was]
    return wrong


def test_the_users_objects_are_as_they_were(tmp_path: Path) -> None:
    """Loader, sampler, batch sampler and dataset have the class and the attributes that they had before the run."""
    assert run_ranks(is_as_before, 2, tmp_path, env=by_hand_env(2)) == [[], []]


def made(**options: Any) -> OwnLoader:
    return OwnLoader(data(16), batch_size=2, shuffle=True, own="given", **options)


class Combined(harness.Net):
    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step(batch["own"], index)


def look(kind: Kind, directory: Path) -> list[Any]:
    """Return what callbacks see of loaders and set in them, and Lightning's later copies."""
    facts: list[Any] = []

    def use(trainer: L.Trainer) -> None:
        loader: Any = trainer.train_dataloader
        again = [loader, type(loader)(loader.dataset), copy.copy(loader), pickle.loads(pickle.dumps(loader))]
        facts.append([(type(each).__name__, isinstance(each, OwnLoader), len(each), {*vars(each)}) for each in again])
        facts.append([loader.write("set"), vars(loader)["own"], again[2].own, loader.batch_size])
        loader.batch_sampler.batch_size = 4
        facts.append([isinstance(trainer.val_dataloaders, DataLoader), isinstance(loader.batch_sampler, BatchSampler)])

    def size(trainer: L.Trainer) -> None:
        facts.append(trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def fit(module: L.LightningModule, loaders: Any, **options: Any) -> None:
        make_trainer(make_strategy(kind, directory), **{"max_epochs": 1, **options}).fit(module, loaders)

    for is_injected in (True, False):
        callbacks = [At("on_train_start", use), At("on_train_end", size)]
        fit(harness.Net(), made(), use_distributed_sampler=is_injected, callbacks=callbacks)
    combined = CombinedLoader({"own": made()}, "max_size")
    for _ in range(2):
        fit(Combined(), combined, overfit_batches=2)
    facts.append(type(combined.flattened[0].sampler).__name__ == "SequentialSampler")
    if kind == "ours":  # stock starts the workers
        is_first = os.environ["RANK"] == "0"
        with pytest.warns(UserWarning, match="persistent_workers=True") if is_first else nullcontext():
            fit(harness.Net(), made(num_workers=1, multiprocessing_context="spawn"), max_epochs=0)
    return facts


def test_users_see_loaders_as_stock_shows_them(tmp_path: Path) -> None:
    """Loaders have their class, can be changed, copied and made again, and cause Lightning's hints."""
    ours, stock = on_both(look, tmp_path)
    assert ours == stock
    assert (ours[0][3], ours[0][7]) == (2, 4)
