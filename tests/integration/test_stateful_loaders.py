"""Loaders with a state of their own are read once, asked for it when a checkpoint is saved, and resumed right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.harness.ranks import by_hand_env, run_ranks
from tests.integration.continuing import Numbers, Stream, Training, generations


class Counted(Numbers):
    """Counts how often its samples are read."""

    reads = 0

    def __getitem__(self, index: int) -> Tensor:
        Counted.reads += 1
        return super().__getitem__(index)


class Asked(StatefulDataLoader[Any]):
    """Counts how often it, or a copy of it, is asked for its state."""

    asked = 0

    def state_dict(self) -> dict[str, Any]:
        Asked.asked += 1
        state: dict[str, Any] = super().state_dict()
        return state


class ByHand(DataLoader[Any]):
    """The same of a loader that has no more than what Lightning asks for.

    As torchdata's it counts batches as they are asked for, and its state is for the next iterator alone.
    """

    given = start = 0

    def __iter__(self) -> Any:
        self.given, self.start = self.start, 0
        return self._batches(self.given)

    def _batches(self, start: int) -> Any:
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self.given += 1
                yield batch
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        Asked.asked += 1
        first = self.dataset.numbers[0] if isinstance(self.dataset, Stream) else None
        return {"given": self.given, "first": first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self.dataset, Stream):  # as a reader of files goes on in the file where it was
            self.dataset.numbers = range(state["first"], state["first"] + len(self.dataset.numbers))
        self.start = state["given"]


LOADERS: dict[str, Callable[[int], Any]] = {
    "samples": lambda rank: Asked(Counted(18), batch_size=2, shuffle=True),
    "stream": lambda rank: Asked(Stream(9, rank), batch_size=2),
    "samples, by hand": lambda rank: ByHand(Counted(18), batch_size=2, shuffle=True),
    "stream, by hand": lambda rank: ByHand(Stream(9, rank), batch_size=2),
}


def resume(rank: int, world_size: int, directory: Path) -> list[dict[str, str]]:
    found = []
    for name in ("samples, by hand", "stream, by hand"):
        training = Training(lambda name=name: LOADERS[name](rank), directory, name=name)  # type: ignore[misc]
        training.options = {"dropout": False, "max_epochs": 3, "accumulate_grad_batches": 2}
        points = ["train_batch_end-1", "train_batch_end-4", "train_epoch_end-5"]
        found.append(generations(training, ["train_batch_end", "train_epoch_end"], points, ["train_batch_end-7"]))
    return found


def test_each_rank_goes_on_with_its_own_next_batch(tmp_path: Path) -> None:
    """From the last optimiser step on, and after a second resume, a loader with ``state_dict`` gives the same."""
    assert run_ranks(resume, 2, tmp_path, env=by_hand_env(2), time_limit=60) == [[{}, {}]] * 2


def count(rank: int, world_size: int, directory: Path) -> dict[str, list[tuple[int, int]]]:
    """Samples read, and states asked for, in runs without checkpoints, with one at each step, and resumed."""
    found: dict[str, list[tuple[int, int]]] = {}
    for name, make in LOADERS.items():
        training = Training(lambda make=make: make(rank), directory, options={"max_epochs": 2}, name=name)  # type: ignore[misc]
        path = None
        for moments in ((), ("train_batch_end",), ()):
            Asked.asked = Counted.reads = 0
            run = training.saving("saved", *moments, ckpt_path=path)
            assert len(run.steps) == (10 if path is None else 8)
            found.setdefault(name, []).append((Counted.reads, Asked.asked))
            path = run.saved[1][0] if run.saved else None
    return found


def test_a_loader_is_read_once_and_asked_for_its_state_where_a_checkpoint_is_saved(tmp_path: Path) -> None:
    """Not before each batch, for states can be large: never without a checkpoint, and at most twice for each.

    What is done is not read again after a resume.
    """
    for found in run_ranks(count, 2, tmp_path, env=by_hand_env(2), time_limit=60):
        assert found.keys() == LOADERS.keys()
        for name, ((first, without), (again, with_ten), (resumed, after)) in found.items():
            assert (without, after) == (0, 0), name
            assert 10 <= with_ten <= 20, name
            if name == "samples":
                assert (first, again, resumed) == (18, 18, 14)
