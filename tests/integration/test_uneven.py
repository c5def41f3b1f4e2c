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

from lightning_ddp_ext import UnevenInputsError
from lightning_ddp_ext.errors import RankFailedError
from tests.integration.training import make_strategy, make_trainer
from tests.ranks import by_hand_env, run_ranks

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
        return self._rest()

    def _rest(self) -> Iterator[Tensor]:
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
    cut_to: Lengths | None = None

    def run(self, rank: int, directory: Path, *, cut: bool = False, **options: Any) -> dict[str, Any]:
        """What happens; ``cut``: with stock's ways, and data that are cut to the shortest rank's beforehand."""
        shortest = self.cut_to or [min(each) for each in zip(*self.lengths, strict=True)]
        lengths = shortest if cut else self.lengths[rank]
        strategy = make_strategy("ours", directory, **({} if cut else {"uneven_inputs": "stop_at_shortest"}))
        torch.manual_seed(1)
        model = Net(((cut and self.like) or self.loaders)(rank, lengths))
        chosen = {"max_epochs": len(lengths), "use_distributed_sampler": False, **self.options}
        if cut and self.cut_to:
            del chosen["limit_train_batches"]
        resume = options.pop("ckpt_path", None)
        trainer = make_trainer(strategy, **{**chosen, **options}, devices=len(self.lengths), num_sanity_val_steps=0)
        trainer.fit(model, ckpt_path=resume)
        weights = [parameter.tolist() for parameter in model.parameters()]
        return {"events": model.events, "weights": weights, "steps": trainer.global_step}


def two_loaders(mode: Any) -> Callable[[int, Lengths], Any]:
    def make(rank: int, lengths: Lengths) -> CombinedLoader:
        return CombinedLoader([stream(rank, lengths), stream(rank, [3])], mode)

    return make


CASES = {
    "streams": Case([[5, 4, 0, 3], [3, 6, 2, 3]]),
    "promising": Case([[5, 2], [3, 6]], lambda *own: DataLoader(Promising(*own), batch_size=1), like=stream),
    "lists": Case([[5, 5], [3, 3]], Listed),
    "indexed": Case([[5, 5], [3, 3]], indexed),
    "indexed, other lengths later": Case([[5, 2, 4], [6, 6, 5]], indexed, like=stream),
    "own loader": Case([[5, 2], [3, 6]], Stateful),
    "no data on one rank": Case([[0, 0], [3, 3]]),
    "limit": Case([[5, 2, 6], [3, 6, 7]], options={"limit_train_batches": 4}, cut_to=[3, 2, 4]),
    "validation within": Case([[5, 4], [3, 6]], options={"val_check_interval": 2}),
    "accumulation": Case([[5, 4], [3, 6]], options={"accumulate_grad_batches": 2}),
    "max_steps": Case([[5, 4], [3, 6]], options={"max_steps": 5, "max_epochs": -1}),
    "reloaded": Case([[5, 4], [3, 6]], options={"reload_dataloaders_every_n_epochs": 1}),
    **{mode: Case([[5, 4], [4, 6]], two_loaders(mode)) for mode in ("min_size", "max_size", "max_size_cycle")},
}


def run_cases(rank: int, world_size: int, directory: Path, names: list[str]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    cases = {name: CASES[name] for name in names}
    return {name: (case.run(rank, directory), case.run(rank, directory, cut=True)) for name, case in cases.items()}


def check(names: list[str], world_size: int, directory: Path) -> None:
    by_rank = run_ranks(run_cases, world_size, directory, names, env=by_hand_env(world_size), time_limit=30)
    for name in names:
        for found in by_rank:
            uneven, cut = found[name]
            assert uneven == cut, name
            assert uneven["weights"] == by_rank[0][name][0]["weights"], name


def drawn(number: random.Random) -> Case:
    """Three ranks, up to three epochs, and some way to read and to train."""
    epochs = number.randint(1, 3)
    read = number.choice([stream, Stateful, indexed])
    lengths = [[number.randint(1 if read is indexed else 0, 6) for _ in range(epochs)] for _ in range(3)]
    options = {
        "accumulate_grad_batches": number.randint(1, 3),
        "reload_dataloaders_every_n_epochs": number.randint(0, 1),
    }
    return Case(lengths, read, options, like=None if read is not indexed else stream)


CASES |= {f"drawn {seed}": drawn(random.Random(seed)) for seed in range(8)}


def test_an_epoch_ends_as_if_no_rank_had_more_data_than_the_shortest(tmp_path: Path) -> None:
    """Steps, last batches, validation, schedules, epoch ends and weights are those of data that are cut to the same."""
    check([name for name, case in CASES.items() if len(case.lengths) == 2], 2, tmp_path)


def test_three_ranks_with_any_lengths_end_epochs_together(tmp_path: Path) -> None:
    """So it is with lengths drawn at random, accumulation and reloaded data."""
    check([name for name, case in CASES.items() if len(case.lengths) == 3], 3, tmp_path)


class Saver(L.Callback):
    """Saves a checkpoint after each batch."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.paths: list[Path] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.paths.append(self.directory / f"{len(self.paths)}.ckpt")
        trainer.save_checkpoint(self.paths[-1])


def stream_and_samples(rank: int, lengths: Lengths) -> Any:
    return [stream(rank, lengths), indexed(rank, [2])]


def resume(rank: int, world_size: int, directory: Path) -> list[Any]:
    warnings.simplefilter("ignore")
    wrong: list[Any] = []
    for loaders in (stream, Listed, Stateful, stream_and_samples):
        lengths = [[4, 4], [3, 3]] if loaders is Listed else [[4, 2], [3, 3]]
        case = Case(lengths, loaders, {"accumulate_grad_batches": 2, "limit_val_batches": 0})
        place = directory / loaders.__name__
        saver = Saver(place)
        whole = case.run(rank, directory, callbacks=[saver])
        steps = [event for event in whole["events"] if event[0] == "step"]
        for done, path in enumerate(saver.paths, start=1):
            resumed = case.run(rank, directory, ckpt_path=path)
            again = [event for event in resumed["events"] if event[0] == "step"]
            # A checkpoint in the middle of an accumulation goes back to the last optimiser step.
            if again not in (steps[done:], steps[done - 1 :]) or resumed["weights"] != whole["weights"]:
                wrong.append((loaders.__name__, done, again, steps))
    return wrong


@pytest.mark.lowest
def test_an_epoch_that_will_end_early_can_be_resumed_in_its_middle(tmp_path: Path) -> None:
    """From each checkpoint on the same batches are trained on as without a stop, and epochs end where they did."""
    assert run_ranks(resume, 2, tmp_path, env=by_hand_env(2), time_limit=60) == [[], []]


class Broken(Stream):
    def __iter__(self) -> Iterator[Tensor]:
        yield from super().__iter__()
        raise OSError("the disk of this rank is gone")


def break_on_one(rank: int, world_size: int, directory: Path) -> Any:
    warnings.simplefilter("ignore")
    data = (Broken if rank == 1 else Stream)(rank, [4 if rank == 1 else 40])
    strategy = make_strategy("ours", directory, uneven_inputs="stop_at_shortest")
    with pytest.raises(OSError if rank == 1 else RankFailedError, match="the disk of this rank is gone") as caught:
        make_trainer(strategy, max_epochs=1).fit(Net(DataLoader(data, batch_size=1)))
    return getattr(caught.value, "rank", None)


def test_data_that_raise_on_one_rank_end_all(tmp_path: Path) -> None:
    """The others wait for an answer about their next batch, and get the cause instead."""
    assert run_ranks(break_on_one, 2, tmp_path, env=by_hand_env(2)) == [1, None]


def refused(rank: int, world_size: int, directory: Path) -> list[str]:
    warnings.simplefilter("ignore")
    found = []
    for loaders, option in ((indexed, None), (Listed, None), (None, "stop_at_shortest")):
        model = Net(loaders(rank, [3 + rank]) if loaders else (stream, Listed)[rank](rank, [3]))
        strategy = make_strategy("ours", directory, uneven_inputs=option)
        with pytest.raises(UnevenInputsError) as caught:
            make_trainer(strategy, use_distributed_sampler=False).fit(model)
        found.append(str(caught.value))
    return found


def fits(rank: int, world_size: int, directory: Path) -> list[int]:
    warnings.simplefilter("ignore")
    steps = []
    for options in ({"limit_train_batches": 3}, {"max_steps": 3, "max_epochs": -1}):
        trainer = make_trainer(make_strategy("ours", directory), use_distributed_sampler=False, **options)
        trainer.fit(Net(indexed(rank, [3 + rank])))
        steps.append(trainer.global_step)
    return steps


def test_lengths_that_differ_are_refused_when_training_begins(tmp_path: Path) -> None:
    """On every rank, with all numbers and what to do, instead of ranks that wait for ever at the end of the epoch."""
    first, second = run_ranks(refused, 2, tmp_path, env=by_hand_env(2))
    assert first[:2] == second[:2]
    assert first[0] == first[1]
    assert first[0] == (
        "the ranks have different numbers of training batches (3 on rank 0, 4 on rank 1), and after the first 3 "
        "some would wait for ever; pass DDPExtStrategy(uneven_inputs='join') or 'stop_at_shortest', or let a sampler "
        "or drop_last=True give all ranks equally many"
    )
    assert "must have a length on every rank or on none (got (-1, 3), by rank, where -1 is none)" in first[2]
    assert "must have a length on every rank or on none (got (-1, 3), by rank, where -1 is none)" in second[2]


def test_lengths_that_differ_are_allowed_where_nobody_would_wait(tmp_path: Path) -> None:
    """A limit that all ranks reach, in batches or in steps, makes them even."""
    assert run_ranks(fits, 2, tmp_path, env=by_hand_env(2)) == [[6, 3]] * 2


def warned(rank: int, world_size: int, directory: Path) -> list[list[str]]:
    found = []
    for loaders, seen_as in ((stream, 0), (stream, rank), (Stateful, 0), (indexed, 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = make_trainer(make_strategy("ours", directory), use_distributed_sampler=False)
            trainer.fit(Net(loaders(seen_as, [2])))
        found.append([text for each in caught if "the same on ranks" in (text := str(each.message))])
    return found


@pytest.mark.lowest
def test_ranks_that_read_the_same_are_told_once(tmp_path: Path) -> None:
    """Rank 0 names the class of data that are not shared out; others are left alone."""
    first, second = run_ranks(warned, 2, tmp_path, env=by_hand_env(2))
    assert [len(each) for each in first] == [1, 0, 1, 0]
    assert first[0][0] == (
        "the first training batch is the same on ranks 0, 1, and so may be all others: Stream is not shared out, and "
        "each sample is trained on 2 times; have __iter__ leave the other ranks' and workers' samples away, by rank, "
        "torch.distributed.get_rank() in the main process, and by torch.utils.data.get_worker_info()"
    )
    assert "Stateful" in first[2][0]
    assert second == [[], [], [], []]
