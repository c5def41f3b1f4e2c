"""Ranks with different numbers of training batches: they end epochs together, or are told; and ranks with the same."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ddp_ext import DDPExtStrategy, UnevenInputsError
from lightning_ddp_ext.errors import ConfigurationError, RankFailedError
from tests.integration.training import make_strategy, make_trainer
from tests.ranks import by_hand_env, launch_ranks, run_ranks

Lengths = list[int]  # of a rank's data, by epoch


def number(rank: int, epoch: int, index: int) -> Tensor:
    return torch.tensor([rank * 0.5 + epoch * 0.1 + index * 0.01])


class Stream(IterableDataset[Tensor]):
    """This rank's own numbers, as many as the epoch has."""

    def __init__(self, rank: int, lengths: Lengths) -> None:
        self.rank, self.lengths, self.epoch = rank, lengths, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.lengths[self.epoch % len(self.lengths)]):
            yield number(self.rank, self.epoch, index)


class Promising(Stream):
    """Says that it has more than it has."""

    def __len__(self) -> int:
        return max(self.lengths) + 3


class Stateful(Stream):
    """A loader that is no DataLoader, and says itself where it is."""

    def __init__(self, rank: int, lengths: Lengths) -> None:
        super().__init__(rank, lengths)
        self.given = self.start = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.given, self.start = self.start, 0
        for index in range(self.given, self.lengths[self.epoch % len(self.lengths)]):
            self.given = index + 1
            yield number(self.rank, self.epoch, index).unsqueeze(0)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["given"]


class Numbers(Dataset[Tensor]):
    """The same numbers, for samplers."""

    def __init__(self, rank: int, lengths: Lengths) -> None:
        self.rank, self.lengths, self.epoch = rank, lengths, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.lengths[self.epoch % len(self.lengths)]

    def __getitem__(self, index: int) -> Tensor:
        return number(self.rank, self.epoch, index)


def stream(rank: int, lengths: Lengths) -> DataLoader[Any]:
    return DataLoader(Stream(rank, lengths), batch_size=1)


def indexed(rank: int, lengths: Lengths) -> DataLoader[Any]:
    return DataLoader(Numbers(rank, lengths), batch_size=1)


class Listed:
    """A loader with a length that nothing can be put into, like a list of batches."""

    __slots__ = ("batches",)

    def __init__(self, rank: int, lengths: Lengths) -> None:
        self.batches = [number(rank, 0, index).unsqueeze(0) for index in range(lengths[0])]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


class Net(L.LightningModule):
    """Writes down all that happens, in order, with this rank's data."""

    def __init__(self, loaders: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.loaders = loaders
        self.events: list[tuple[Any, ...]] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        parts = [part for part in (batch if isinstance(batch, list) else [batch]) if part is not None]
        numbers = torch.cat([part.flatten() for part in parts])
        self.events.append(("step", self.current_epoch, index, progress.is_last_batch, numbers.tolist()))
        loss: Tensor = self.layer(numbers.unsqueeze(1)).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.events.append(("validation", self.global_step))

    def on_train_epoch_end(self) -> None:
        rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        self.events.append(("epoch end", self.current_epoch, self.global_step, round(rate, 8)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def train_dataloader(self) -> Any:
        return self.loaders

    def val_dataloader(self) -> list[Tensor]:
        return [torch.ones(1, 1)]


@dataclass
class Case:
    """Lengths by rank and epoch, how they are read, and how training goes."""

    lengths: list[Lengths]
    loaders: Callable[[int, Lengths], Any] = stream
    options: dict[str, Any] = field(default_factory=dict)
    like: Callable[[int, Lengths], Any] | None = None

    def run(self, rank: int, directory: Path, *, cut: bool = False, **options: Any) -> dict[str, Any]:
        """What happens; ``cut``: with stock's ways, and data that are cut to the shortest rank's beforehand."""
        lengths = [min(each) for each in zip(*self.lengths, strict=True)] if cut else self.lengths[rank]
        strategy = make_strategy("ours", directory, **({} if cut else {"uneven_inputs": "stop_at_shortest"}))
        torch.manual_seed(1)
        model = Net(((cut and self.like) or self.loaders)(rank, lengths))
        chosen = {"max_epochs": len(lengths), "use_distributed_sampler": False, **self.options}
        resume = options.pop("ckpt_path", None)
        trainer = make_trainer(strategy, **{**chosen, **options}, devices=len(self.lengths), num_sanity_val_steps=0)
        trainer.fit(model, ckpt_path=resume)
        weights = [parameter.tolist() for parameter in model.parameters()]
        return {"events": model.events, "weights": weights, "steps": trainer.global_step}


def two_loaders(mode: Any) -> Callable[[int, Lengths], Any]:
    def make(rank: int, lengths: Lengths) -> CombinedLoader:
        return CombinedLoader([stream(rank, lengths), stream(rank, [3])], mode)

    return make


def with_workers(rank: int, lengths: Lengths) -> DataLoader[Any]:
    return DataLoader(Stream(rank, lengths), batch_size=1, num_workers=1)


CASES = {
    "streams": Case([[5, 4, 0, 3], [3, 6, 2, 3]]),
    "workers": Case([[4], [2]], with_workers),
    "promising": Case([[5, 2], [3, 6]], lambda *own: DataLoader(Promising(*own), batch_size=1), like=stream),
    "lists": Case([[5, 5], [3, 3]], Listed),
    "indexed": Case([[5, 5], [3, 3]], indexed),
    "indexed, other lengths later": Case([[5, 2], [3, 6]], indexed, like=stream),
    "own loader": Case([[5, 2], [3, 6]], Stateful),
    "no data on one rank": Case([[0, 0], [3, 3]]),
    "no data in a list": Case([[0], [3]], Listed),
    "limit": Case([[5, 2, 6], [3, 6, 7]], options={"limit_train_batches": 4}),
    "limit not reached": Case([[5, 2], [3, 6]], options={"limit_train_batches": 9}, like=stream),
    "limited lists": Case([[5, 5], [9, 9]], Listed, options={"limit_train_batches": 4}),
    "validation within": Case([[5, 4], [3, 6]], options={"val_check_interval": 2}),
    "accumulation": Case([[5, 4], [3, 6]], options={"accumulate_grad_batches": 2}),
    "max_steps": Case([[5, 4], [3, 6]], options={"max_steps": 5, "max_epochs": -1}),
    "reloaded": Case([[5, 4], [3, 6]], options={"reload_dataloaders_every_n_epochs": 1}),
    **{mode: Case([[5, 1, 6], [4, 6, 2]], two_loaders(mode)) for mode in ("min_size", "max_size", "max_size_cycle")},
}


def run_cases(rank: int, world_size: int, directory: Path, names: list[str]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    cases = {name: CASES[name] for name in names}
    return {name: (case.run(rank, directory), case.run(rank, directory, cut=True)) for name, case in cases.items()}


def check(names: list[str], world_size: int, directory: Path) -> None:
    by_rank = run_ranks(run_cases, world_size, directory, names, env=by_hand_env(world_size), time_limit=40)
    for name in names:
        for found in by_rank:
            uneven, cut = found[name]
            assert uneven == cut, name
            assert uneven["weights"] == by_rank[0][name][0]["weights"], name


def test_an_epoch_ends_as_if_no_rank_had_more_data_than_the_shortest(tmp_path: Path) -> None:
    """Steps, last batches, validation, schedules, epoch ends and weights are those of data that are cut to the same."""
    check(list(CASES), 2, tmp_path)
