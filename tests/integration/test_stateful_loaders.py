"""Loaders with a state are read once, save it with a checkpoint, and resume correctly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.harness.ranks import by_hand_env, run_ranks
from tests.integration.continuing import Numbers, Stream, Training, generations


class Counted(Numbers):
    """A dataset that counts how often its samples are read."""

    reads = 0

    def __getitem__(self, index: int) -> Tensor:
        Counted.reads += 1
        return super().__getitem__(index)


class Asked(StatefulDataLoader[Any]):
    """Counts how often its state, or that of a copy, is read."""

    asked = 0

    def state_dict(self) -> dict[str, Any]:
        Asked.asked += 1
        state: dict[str, Any] = super().state_dict()
        return state


class ByHand(DataLoader[Any]):
    """The same of a stream in a loader with only the methods that Lightning needs.

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
        return {"given": self.given, "first": self.dataset.numbers[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # As a reader of files continues at its place in the file.
        self.dataset.numbers = range(state["first"], state["first"] + len(self.dataset.numbers))
        self.start = state["given"]


LOADERS: dict[str, Callable[[int], Any]] = {
    "samples": lambda rank: Asked(Counted(18), batch_size=2, shuffle=True),
    "samples without a state": lambda rank: DataLoader(Counted(18), 2, sampler=DistributedSampler(range(18), 2, rank)),
    "stream, by hand": lambda rank: ByHand(Stream(9, rank), batch_size=2),
}
Counts = list[tuple[int, int]]  # samples read, and states asked for


def read(rank: int, world_size: int, directory: Path) -> tuple[dict[str, Counts], dict[str, str]]:
    """Return counts of runs without checkpoints, with some, and resumed; and differences of resumed runs."""
    counts: dict[str, Counts] = {}
    for name, make in LOADERS.items():
        training = Training(lambda make=make: make(rank), directory, options={"max_epochs": 2}, name=name)  # type: ignore[misc]
        path = None
        for points in ((), ("train_batch_end-2", "train_batch_end-5"), ()):
            Asked.asked = Counted.reads = 0
            run = training.run(*points, ckpt_path=path)
            assert len(run.steps) == (10 if path is None else 8)
            counts.setdefault(name, []).append((Counted.reads, Asked.asked))
            path = run.saved.get("train_batch_end-2")
    training.options |= {"dropout": False, "accumulate_grad_batches": 2}
    return counts, generations(training, ["train_batch_end-1", "train_batch_end-4"], ["train_batch_end-7"])


def test_each_rank_continues_with_its_own_next_batch_and_saves_its_state(tmp_path: Path) -> None:
    """States can be large and are not read before each batch; finished batches are neither repeated nor lost."""
    for counts, wrong in run_ranks(read, 2, tmp_path, env=by_hand_env(2)):
        assert wrong == {}
        for name, ((first, without), (again, with_two), (resumed, after)) in counts.items():
            assert (without, after) == (0, 0), name
            assert with_two == 0 if "without" in name else 2 <= with_two <= 4, name
            if name != "stream, by hand":
                assert (first, again, resumed) == (18, 18, 14)
