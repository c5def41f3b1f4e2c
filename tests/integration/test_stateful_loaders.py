"""Loaders that keep a state of their own: each rank goes on with its own next batch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_ddp_ext.errors import ResumeError
from tests.harness.training import Kind, make_strategy, on_ranks
from tests.integration.continuing import Moment, Numbers, Run, Saver, Stream, fit


class Counting(DataLoader[Any]):
    """Behaves as torchdata's ``StatefulDataLoader``: it counts batches as they are asked for, and goes on from there.

    A state that is loaded is for the next iterator alone; one of a pass that had ended begins anew.
    """

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.rank = 0
        self._yielded = 0
        self._has_ended = False
        self._next: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        state, self._next = self._next, None
        start = 0 if state is None or state["has_ended"] else state["yielded"]
        self._yielded, self._has_ended = start, False
        return self._batches(start)

    def _batches(self, start: int) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self._yielded += 1
                yield batch
        self._has_ended = True

    def state_dict(self) -> dict[str, Any]:
        first = self.dataset.numbers[0] if isinstance(self.dataset, Stream) else None
        return {"yielded": self._yielded, "has_ended": self._has_ended, "first": first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self.dataset, Stream):  # as a reader of files goes on in the file where it was
            numbers = self.dataset.numbers
            self.dataset.numbers = range(state["first"], state["first"] + len(numbers))
        self._next = dict(state)


def make(rank: int, stream: bool) -> Any:
    if stream:
        return Counting(Stream(9, rank), batch_size=2)
    return Counting(Numbers(18), batch_size=2, shuffle=True)


MOMENTS: tuple[Moment, ...] = ("train_batch_end", "validation_end", "train_epoch_end")
CASES: dict[str, dict[str, Any]] = {
    "samples": {"stream": False},
    "stream": {"stream": True, "limit_val_batches": 1.0},
    "samples, accumulated": {"stream": False, "accumulate_grad_batches": 2},
    "stream, accumulated": {"stream": True, "accumulate_grad_batches": 2},
}


def train(kind: Kind, directory: Path, rank: int, *, stream: bool, **options: Any) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaders = partial(make, rank, stream)
        return fit(make_strategy(kind, directory), loaders, **{"limit_val_batches": 0, "dropout": False, **options})


def stop_and_go_on(kind: Kind, directory: Path, names: list[str]) -> dict[str, list[str]]:
    rank = int(os.environ["RANK"])
    found: dict[str, list[str]] = {}
    for name in names:
        for moment in MOMENTS if name == "stream" else MOMENTS[:1]:
            place = directory / f"{name}-{moment}"
            place.mkdir(exist_ok=True)
            saver = Saver(moment, place)
            whole = train(kind, directory, rank, saver=saver, **CASES[name])
            for path, done in whole.saved[::2]:
                resumed = train(kind, directory, rank, ckpt_path=path, **CASES[name])
                accumulated = CASES[name].get("accumulate_grad_batches", 1)
                again = len(resumed.steps) - len(whole.steps[done:])
                if not 0 <= again < accumulated or resumed.steps != whole.steps[done - again :]:
                    found.setdefault(name, []).append(f"{moment} {done}: {resumed.steps} not {whole.steps[done:]}")
    return found


def test_each_rank_goes_on_with_its_own_next_batch(tmp_path: Path) -> None:
    """Saved after any batch, the batches after it are the same, from the last optimiser step on."""
    assert on_ranks("ours", stop_and_go_on, tmp_path, list(CASES), time_limit=60) == [{}, {}]


def save_in_the_middle(kind: Kind, directory: Path) -> str:
    rank = int(os.environ["RANK"])
    return train(kind, directory, rank, saver=Saver("train_batch_end", directory), stream=True).saved[1][0]


def refuse_other_number(kind: Kind, directory: Path, path: str) -> str:
    with pytest.raises(ResumeError) as raised:
        train(kind, directory, 0, ckpt_path=path, stream=True, devices=1)
    return str(raised.value)


def test_states_of_two_ranks_are_not_for_one(tmp_path: Path) -> None:
    """The error says how many ranks have saved, how many there are, and what to do."""
    path, _ = on_ranks("ours", save_in_the_middle, tmp_path)
    (tmp_path / "one").mkdir()
    (message,) = on_ranks("ours", refuse_other_number, tmp_path / "one", path, world_size=1)
    assert "epoch 0 cannot go on in its middle" in message
    assert "had ranks=2 when the checkpoint was saved, and has 1; resume with" in message


def warnings_of_resume(kind: Kind, directory: Path, path: str) -> tuple[list[str], list[Any]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaders = partial(make, int(os.environ["RANK"]), True)
        strategy = make_strategy(kind, directory)
        run = fit(strategy, loaders, ckpt_path=path, limit_val_batches=0, dropout=False, max_epochs=1)
    return [str(each.message) for each in caught if "does not say which data" in str(each.message)], run.steps


def test_a_checkpoint_with_rank_zeros_state_alone_begins_the_epoch_again(tmp_path: Path) -> None:
    """A checkpoint of stock Lightning says nothing of the other ranks' data; rank 0 warns, and all read their own."""
    path, _ = on_ranks("stock", save_in_the_middle, tmp_path)
    (warned, steps), (silent, others) = on_ranks("ours", warnings_of_resume, tmp_path, path)
    assert warned == ["the checkpoint does not say which data of epoch 0 are done; it begins again"]
    assert silent == []
    assert [sample for step in steps for sample in step[2:]] == [*range(9)]
    assert [sample for step in others for sample in step[2:]] == [*range(1000, 1009)]


def save_at_the_end(kind: Kind, directory: Path) -> list[str]:
    rank = int(os.environ["RANK"])
    paths = []
    for moment in ("train_batch_end", "validation_end", "train_epoch_end"):
        options = {"max_epochs": 1, "limit_val_batches": 1.0}
        paths.append(train(kind, directory, rank, saver=Saver(moment, directory), stream=True, **options).saved[-1][0])
    return paths


def begin_next_epoch(kind: Kind, directory: Path, paths: list[str]) -> list[list[Any]]:
    rank = int(os.environ["RANK"])
    return [
        train(kind, directory, rank, ckpt_path=path, stream=True, max_epochs=2, devices=1, limit_val_batches=1.0).steps
        for path in paths
    ]


def test_after_the_end_of_an_epoch_any_number_of_ranks_goes_on(tmp_path: Path) -> None:
    """Nothing is left of the data that two ranks were in the middle of: one rank begins the next epoch."""
    paths, _ = on_ranks("ours", save_at_the_end, tmp_path)
    (tmp_path / "one").mkdir()
    (runs,) = on_ranks("ours", begin_next_epoch, tmp_path / "one", paths, world_size=1)
    assert [[step[2:] for step in steps] for steps in runs] == [[(1, 2), (3, 4), (5, 6), (7, 8), (0,)]] * 3
