"""Loaders with a state of their own are read once, asked for it when a checkpoint is saved, and resumed right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.harness.ranks import by_hand_env, run_ranks
from tests.integration.continuing import Numbers, Stream, Training, generations


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
    "samples": lambda rank: Asked(Numbers(18), batch_size=2, shuffle=True),
    "stream": lambda rank: Asked(Stream(9, rank), batch_size=2),
    "samples, by hand": lambda rank: ByHand(Numbers(18), batch_size=2, shuffle=True),
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


def count_reads(rank: int, world_size: int, directory: Path) -> dict[str, tuple[int, int]]:
    """Reads, and samples that were trained on, of a run and of one that was resumed."""
    found, path = {}, None
    for name in ("whole", "resumed"):
        data = Counted(20)
        loaders = [StatefulDataLoader(data, batch_size=2, shuffle=True), DataLoader(Stream(5, rank + 5), 2)]
        both = CombinedLoader(loaders, "max_size")
        training = Training(lambda both=both: both, directory, options={"max_epochs": 3}, name=name)  # type: ignore[misc]
        run = training.saving("saved", "train_batch_end", ckpt_path=path)
        found[name] = data.reads, sum(sample < 1000 for step in run.steps for sample in step[2:])
        path = run.saved[1][0]
    return found


def test_a_loader_with_a_state_is_read_once(tmp_path: Path) -> None:
    """Each of its samples is read when it is trained on, and those that are done are not read again after a resume."""
    for found in run_ranks(count_reads, 2, tmp_path, env=by_hand_env(2), time_limit=60):
        assert found == {"whole": (30, 30), "resumed": (26, 26)}


def count_states(rank: int, world_size: int, directory: Path) -> dict[str, list[int]]:
    """How often each loader has been asked for its state, in runs without checkpoints and with one at each step."""
    found: dict[str, list[int]] = {}
    for name, make in LOADERS.items():
        training = Training(lambda make=make: make(rank), directory, options={"max_epochs": 2}, name=name)  # type: ignore[misc]
        for moments in ((), ("train_batch_end",)):
            Asked.asked = 0
            assert len(training.saving("saved", *moments).steps) == 10
            found.setdefault(name, []).append(Asked.asked)
    return found


def test_a_loader_is_asked_for_its_state_where_a_checkpoint_is_saved(tmp_path: Path) -> None:
    """Not before each batch, for states can be large: never without a checkpoint, and at most twice for each."""
    for found in run_ranks(count_states, 2, tmp_path, env=by_hand_env(2), time_limit=60):
        assert found.keys() == LOADERS.keys()
        for without, with_ten in found.values():
            assert without == 0
            assert 10 <= with_ten <= 20
