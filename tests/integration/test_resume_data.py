"""A checkpoint from the middle of an epoch: ``resume_data`` goes on exactly, from the epoch's start, or as stock."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext.errors import ResumeError
from tests.harness.ranks import by_hand_env, run_ranks
from tests.harness.training import Kind, assert_same, make_strategy, on_ranks
from tests.integration.continuing import Numbers, Run, Saver, Stream, fit
from tests.integration.resumed_runs import SavesAtAll, ordered

SAVED_AT = 2  # steps of epoch 1 that were done
Loaders = Callable[[int, int], Any]  # of a rank among so many


def samples(number: int) -> Loaders:
    return lambda rank, world_size: ordered("lightning's", number, rank, world_size)


def dealt(number: int) -> Loaders:
    return lambda rank, world_size: ordered("plain", number, rank, world_size)


def own(number: int) -> Loaders:
    return lambda rank, world_size: ordered("distributed", number, rank, world_size)


def two(mode: Any = "max_size_cycle") -> Loaders:
    return lambda *own: CombinedLoader([samples(16)(*own), samples(24)(*own)], mode)


def stream(rank: int, world_size: int) -> DataLoader[Any]:
    return DataLoader(Stream(9, rank), batch_size=2)


def stateful(rank: int, world_size: int) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(Numbers(16), batch_size=2, shuffle=True)


@dataclass(frozen=True)
class Change:
    """The data of a run, and those of the run that goes on from its checkpoint."""

    before: Loaders
    after: Loaders
    options: dict[str, Any]


CHANGES = {
    "more samples": Change(samples(16), samples(28), {}),
    "one sample more, as many batches": Change(samples(15), samples(16), {}),
    "fewer samples": Change(samples(28), samples(16), {}),
    "more samples, a sampler of the user's own": Change(own(16), own(28), {}),
    "fewer than were read": Change(samples(28), samples(4), {}),
    "two loaders for one": Change(samples(16), two(), {}),
    "one loader for two": Change(two(), samples(16), {}),
}
FEWER_RANKS = {
    "a stream": Change(stream, stream, {}),
    "samples that each rank deals out to itself": Change(dealt(16), dealt(16), {"use_distributed_sampler": False}),
    "a loader with a state": Change(stateful, stateful, {}),
}


class Weighs(Saver):
    """Keeps the weights that training begins with."""

    def __init__(self) -> None:
        super().__init__("train_end", Path())
        self.weights: Tensor | None = None

    def _save(self, trainer: L.Trainer, moment: Any) -> None:
        pass

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def train(directory: Path, devices: int, loaders: Loaders, options: dict[str, Any], **more: Any) -> Run:
    strategy = make_strategy("ours", directory, **more.pop("strategy", {}))
    chosen = {"limit_val_batches": 0, "dropout": False, "max_epochs": 3, "devices": devices, **options, **more}
    return fit(strategy, lambda: loaders(int(os.environ["RANK"]), devices), **chosen)


def save(directory: Path, name: str, world_size: int, change: Change) -> str:
    """A checkpoint from the middle of epoch 1."""
    saver = SavesAtAll(["train_batch_end"], directory / name)
    run = train(directory, world_size, change.before, change.options, saver=saver)
    done = next(number for number, step in enumerate(run.steps) if step[0] == 1) + SAVED_AT
    return next(path for path, steps in run.saved if steps == done)


def refuse(directory: Path, world_size: int, path: str, change: Change, **strategy: Any) -> str:
    with pytest.raises(ResumeError) as raised:
        train(directory, world_size, change.after, change.options, ckpt_path=path, strategy=strategy)
    return str(raised.value)


def begin_epoch(directory: Path, world_size: int, path: str, change: Change) -> list[str]:
    """What is wrong with a run that goes on from the start of the checkpoint's epoch."""
    weighs = Weighs()
    strategy = {"resume_data": "epoch"}
    args = (directory, world_size, change.after, change.options)
    resumed = train(*args, ckpt_path=path, saver=weighs, strategy=strategy)
    expected = [step for step in train(*args).steps if step[0] >= 1]
    saved = torch.load(path, weights_only=False)
    wrong = [] if resumed.steps == expected else [f"reads {resumed.steps} instead of {expected}"]
    weights = torch.cat([tensor.flatten() for tensor in saved["state_dict"].values()])
    if weighs.weights is None or not torch.equal(weighs.weights, weights):
        wrong.append("begins with other weights")
    if resumed.counts[0] != saved["global_step"] + len(expected):
        wrong.append(f"is at step {resumed.counts[0]}, after {saved['global_step']} and {len(expected)}")
    return wrong


def save_all(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    changes = {**CHANGES, **FEWER_RANKS}
    return {name: save(directory, name, world_size, change) for name, change in changes.items()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Saved by two ranks."""
    found: dict[str, str] = run_ranks(save_all, 2, tmp_path_factory.mktemp("saved"), env=by_hand_env(2), time_limit=60)[
        0
    ]
    return found


def refuse_all(rank: int, world_size: int, directory: Path, paths: dict[str, str], default: bool) -> dict[str, str]:
    changes = CHANGES if world_size == 2 else FEWER_RANKS
    strategy = {} if default else {"resume_data": "exact"}
    return {name: refuse(directory, world_size, paths[name], change, **strategy) for name, change in changes.items()}


@pytest.mark.parametrize("default", [True, False], ids=["default", "exact"])
@pytest.mark.parametrize("world_size", [2, 1])
def test_an_epoch_that_cannot_be_continued_is_refused(
    world_size: int, default: bool, checkpoints: dict[str, str], tmp_path: Path
) -> None:
    """With other data, loaders or ranks, every rank raises, and says how to go on from the start of the epoch."""
    for found in run_ranks(
        refuse_all, world_size, tmp_path, checkpoints, default, env=by_hand_env(world_size), time_limit=60
    ):
        assert found.keys() == (CHANGES if world_size == 2 else FEWER_RANKS).keys()
        for message in found.values():
            assert 'resume_data="epoch"' in message


def begin_all(rank: int, world_size: int, directory: Path, paths: dict[str, str]) -> dict[str, list[str]]:
    changes = CHANGES if world_size == 2 else FEWER_RANKS
    return {name: begin_epoch(directory, world_size, paths[name], change) for name, change in changes.items()}


@pytest.mark.parametrize("world_size", [2, 1])
def test_the_epoch_can_be_begun_anew(world_size: int, checkpoints: dict[str, str], tmp_path: Path) -> None:
    """With ``resume_data="epoch"`` the checkpoint's weights are trained on all of its epoch, and on later ones."""
    found = run_ranks(begin_all, world_size, tmp_path, checkpoints, env=by_hand_env(world_size), time_limit=60)
    assert found == [{name: [] for name in (CHANGES if world_size == 2 else FEWER_RANKS)}] * world_size


def begin_same(rank: int, world_size: int, directory: Path) -> list[str]:
    same = Change(samples(16), samples(16), {})
    return begin_epoch(directory, world_size, save(directory, "same", world_size, same), same)


def test_the_epoch_is_begun_anew_with_the_same_data_too(tmp_path: Path) -> None:
    """What ``resume_data="epoch"`` does is the same for a checkpoint that could be continued exactly."""
    assert run_ranks(begin_same, 2, tmp_path, env=by_hand_env(2), time_limit=60) == [[], []]


def go_on_after_the_end(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    saver = SavesAtAll(["train_batch_end", "validation_end", "train_epoch_end"], directory / "end")
    whole = train(directory, world_size, samples(16), {"limit_val_batches": 1.0}, saver=saver)
    expected = [step for step in train(directory, world_size, samples(28), {}).steps if step[0] >= 1]
    found = {}
    for path, done in whole.saved:
        if done == 4:
            resumed = train(directory, world_size, samples(28), {"limit_val_batches": 1.0}, ckpt_path=path)
            found[Path(path).stem] = resumed.steps == expected or resumed.steps
    return found


def test_after_the_end_of_an_epoch_other_data_can_follow(tmp_path: Path) -> None:
    """A checkpoint of an epoch's last batch, validation or end has nothing left of that epoch, and is never refused."""
    names = ("train_batch_end-4", "validation_end-4", "train_epoch_end-4")
    assert (
        run_ranks(go_on_after_the_end, 2, tmp_path, env=by_hand_env(2), time_limit=60)
        == [dict.fromkeys(names, True)] * 2
    )


def save_for_stock(rank: int, world_size: int, directory: Path) -> list[str]:
    saver = SavesAtAll(["train_batch_end", "train_epoch_end"], directory / "both")
    options = {"dropout": True}
    run = train(directory, world_size, samples(16), options, saver=saver)
    return [path for path, _ in run.saved if Path(path).stem in ("train_batch_end-2", "train_epoch_end-4")]


def go_on_as_stock(kind: Kind, directory: Path, paths: list[str]) -> list[Run]:
    rank, chosen = int(os.environ["RANK"]), {"resume_data": "off"} if kind == "ours" else {}
    options: dict[str, Any] = {"limit_val_batches": 0, "max_epochs": 3}
    return [
        fit(make_strategy(kind, directory, **chosen), lambda: samples(16)(rank, 2), ckpt_path=path, **options)
        for path in paths
    ]


def test_data_and_random_numbers_can_be_left_to_stock(tmp_path: Path) -> None:
    """With ``resume_data="off"`` a resumed run reads what it reads with stock, and draws the same random numbers."""
    paths = run_ranks(save_for_stock, 2, tmp_path, env=by_hand_env(2), time_limit=60)[0]
    ours = on_ranks("ours", go_on_as_stock, tmp_path, paths)
    stock = on_ranks("stock", go_on_as_stock, tmp_path, paths)
    for mine, expected in zip(ours, stock, strict=True):
        assert [run.steps for run in mine] == [run.steps for run in expected]
        assert_same([run.weights for run in mine], [run.weights for run in expected])
