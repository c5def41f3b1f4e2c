"""Loaders with a state of their own are read once, asked for it when a checkpoint is saved, and resumed right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.harness.ranks import by_hand_env, run_ranks
from tests.integration.continuing import Numbers, Stream
from tests.integration.resumed_runs import Points, SavesAtAll, Training, generations

Loaders = Callable[[int], Any]  # of a rank


class Counted(Numbers):
    """Counts how often it is read."""

    reads = 0

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        return super().__getitem__(index)


class Asked(StatefulDataLoader[Any]):
    """Counts how often it, or a copy of it, is asked for its state."""

    asked = 0

    def state_dict(self) -> dict[str, Any]:
        Asked.asked += 1
        state: dict[str, Any] = super().state_dict()
        return state


class AskedByHand(DataLoader[Any]):
    """The same of a loader that counts its batches, and has no more than what Lightning asks for."""

    given = start = 0

    def __iter__(self) -> Any:
        self.given, self.start = self.start, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= self.given:
                self.given += 1
                yield batch
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        Asked.asked += 1
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["given"]


def stateful(samples: int) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(Numbers(samples), batch_size=2, shuffle=True)


def stateful_stream(samples: int, rank: int) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(Stream(samples, rank), batch_size=2)


def stream(samples: int, rank: int) -> DataLoader[Any]:
    return DataLoader(Stream(samples, rank + 5), batch_size=2)


def beside(mode: Any, first: Loaders, second: Loaders) -> Loaders:
    return lambda rank: CombinedLoader([first(rank), second(rank)], mode)


POINTS: tuple[Points, ...] = (
    ("train_batch_end-1", "train_batch_end-3", "train_epoch_end-5"),
    ("train_batch_end-6", "train_batch_end-8", "train_epoch_end-10"),
)
CASES: dict[str, Loaders] = {  # five batches an epoch, whichever ends it
    "max_size": beside("max_size", lambda _: stateful(20), lambda rank: stream(5, rank)),
    "max_size, the other first": beside("max_size", lambda rank: stream(5, rank), lambda _: stateful(20)),
    "max_size, the stream is longer": beside("max_size", lambda _: stateful(12), lambda rank: stream(9, rank)),
    "min_size": beside("min_size", lambda _: stateful(28), lambda rank: stream(9, rank)),
    "streams": beside("max_size", lambda rank: stateful_stream(9, rank), lambda rank: stream(5, rank)),
    "a loader with samplers": beside(
        "max_size", lambda _: stateful(20), lambda _: DataLoader(Numbers(12), 2, shuffle=True)
    ),
}


# The stream with a state has three of five batches; it was asked for a fourth one when the first of these are saved.
ENDED: tuple[Points, ...] = (("train_batch_end-3", "train_batch_end-4"), ("train_batch_end-5", "train_batch_end-9"))


def resume_after_the_end(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    loaders = beside("max_size", lambda rank: stateful_stream(5, rank), lambda rank: stream(9, rank))
    training = Training(lambda: loaders(rank), directory, world_size, {"dropout": False, "max_epochs": 3})
    return generations(training, ("train_batch_end",), *ENDED)


def test_a_loader_with_a_state_that_ends_before_the_others_stays_ended(tmp_path: Path) -> None:
    """Beside a longer one it has nothing left in the rest of the epoch, and begins again in the next one."""
    assert run_ranks(resume_after_the_end, 2, tmp_path, env=by_hand_env(2), time_limit=60) == [{}, {}]


def resume_cases(rank: int, world_size: int, directory: Path, names: list[str]) -> dict[str, dict[str, str]]:
    found = {}
    for name in names:
        options = {"dropout": False, "max_epochs": 3}
        training = Training(lambda name=name: CASES[name](rank), directory, world_size, options, name=name)  # type: ignore[misc]
        found[name] = generations(training, ("train_batch_end", "train_epoch_end"), *POINTS)
    return found


@pytest.mark.parametrize("names", [list(CASES)[::2], list(CASES)[1::2]], ids=["one half", "other half"])
def test_a_loader_with_a_state_beside_one_without_is_resumed(names: list[str], tmp_path: Path) -> None:
    """Both go on with their next batches, in the rest of the epoch and in whole ones, after each resume."""
    found = run_ranks(resume_cases, 2, tmp_path, names, env=by_hand_env(2), time_limit=110)
    assert found == [{name: {} for name in names}] * 2


def count_reads(rank: int, world_size: int, directory: Path) -> dict[str, tuple[int, int]]:
    """Reads, and samples that were trained on, of a run and of one that was resumed."""
    found = {}
    path = None
    for name in ("whole", "resumed"):
        data = Counted(20)
        loader = StatefulDataLoader(data, batch_size=2, shuffle=True)
        both = CombinedLoader([loader, stream(5, rank)], "max_size")
        training = Training(lambda both=both: both, directory, world_size, {"max_epochs": 3}, name=name)  # type: ignore[misc]
        run = training.saving("saved", "train_batch_end", ckpt_path=path)
        trained = [sample for step in run.steps for sample in step[2:] if sample < 1000]
        found[name] = data.reads, len(trained)
        path = run.saved[1][0]
    return found


def test_a_loader_with_a_state_is_read_once(tmp_path: Path) -> None:
    """Each of its samples is read when it is trained on, and those that are done are not read again after a resume."""
    for found in run_ranks(count_reads, 2, tmp_path, env=by_hand_env(2), time_limit=60):
        assert found == {"whole": (30, 30), "resumed": (26, 26)}


KINDS: dict[str, Callable[[int], Any]] = {
    "samples": lambda _: Asked(Numbers(20), batch_size=2, shuffle=True),
    "stream": lambda rank: Asked(Stream(9, rank), batch_size=2),
    "samples, by hand": lambda _: AskedByHand(Numbers(20), batch_size=2, shuffle=True),
    "stream, by hand": lambda rank: AskedByHand(Stream(9, rank), batch_size=2),
}


def count_states(rank: int, world_size: int, directory: Path) -> dict[str, list[int]]:
    """How often each loader has been asked for its state, in runs with 0, 1 and 3 checkpoints of ten steps."""
    found: dict[str, list[int]] = {}
    for name, make in KINDS.items():
        for saves in (0, 1, 3):
            Asked.asked = 0
            saver = Sometimes(saves, directory / f"{name}-{saves}")
            options = {"max_epochs": 2}
            run = Training(lambda make=make: make(rank), directory, world_size, options).run(saver=saver)  # type: ignore[misc]
            assert len(run.steps) == 10
            assert len(run.saved) == saves
            found.setdefault(name, []).append(Asked.asked)
    return found


class Sometimes(SavesAtAll):
    """Saves after the first batches only."""

    def __init__(self, saves: int, directory: Path) -> None:
        super().__init__(["train_batch_end"], directory)
        self.saves = saves

    def _save(self, trainer: Any, moment: Any) -> None:
        if len(self.saved) < self.saves:
            super()._save(trainer, moment)


def test_a_loader_is_asked_for_its_state_where_a_checkpoint_is_saved(tmp_path: Path) -> None:
    """Not before each batch, for states can be large: never without a checkpoint, and at most twice for each."""
    for found in run_ranks(count_states, 2, tmp_path, env=by_hand_env(2), time_limit=60):
        for name, (without, with_one, with_three) in found.items():
            assert without == 0, name
            assert 1 <= with_one <= 2, name
            assert 3 <= with_three <= 6, name
