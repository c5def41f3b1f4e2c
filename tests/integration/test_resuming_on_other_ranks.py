"""After a resume on another number of ranks epochs have the right length, and everything that hangs on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.harness.ranks import by_hand_env, run_ranks
from tests.harness.training import make_strategy
from tests.integration.continuing import Net, Numbers, Run, fit
from tests.integration.resumed_runs import SavesAtAll

SAMPLES = 48
DONE = 4  # batches of the first epoch, on each of the two ranks that save; each has twelve of two samples
EPOCHS = 3


class Counts(Net):
    """Writes down the batches of each epoch, and after which steps it is validated or the optimiser steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.batches: dict[int, float] = {}
        self.validated_after: list[int] = []
        self.stepped_after: list[int] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.batches[self.steps[-1][0]] = self.trainer.num_training_batches
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.stepped_after.append(len(self.steps))

    def on_validation_start(self) -> None:
        self.validated_after.append(len(self.steps))


@dataclass
class Told:
    """What one rank has done after a resume."""

    run: Run
    batches: dict[int, float]
    validated_after: list[int]
    stepped_after: list[int]


@dataclass(frozen=True)
class Way:
    """How training goes after a resume, and before it where that is otherwise."""

    options: dict[str, Any]
    before: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 2
    strategy: dict[str, Any] = field(default_factory=dict)


def train(directory: Path, devices: int, way: Way, batch_size: int, **options: Any) -> Told:
    nets: list[Counts] = []

    def kind(*args: Any) -> Counts:
        nets.append(Counts(*args))
        return nets[-1]

    def loaders() -> DataLoader[Any]:
        return DataLoader(Numbers(SAMPLES), batch_size, shuffle=True)

    strategy = make_strategy("ours", directory, **way.strategy)
    chosen = {"max_epochs": EPOCHS, "limit_val_batches": 0, "devices": devices, "kind": kind, **options}
    run = fit(strategy, loaders, **chosen)
    return Told(run, nets[0].batches, nets[0].validated_after, nets[0].stepped_after)


WAYS = {
    "plain": Way({}),
    "validation twice an epoch": Way({"val_check_interval": 0.5, "limit_val_batches": 1.0}),
    "validation once an epoch": Way({"val_check_interval": 1.0, "limit_val_batches": 1.0}),
    "accumulation": Way({"accumulate_grad_batches": 2}),
    "another limit": Way({"limit_train_batches": 5}, before={"limit_train_batches": 10}),
    "a limit where there was none": Way({"limit_train_batches": 5}, before={"limit_train_batches": 1.0}),
    "no limit where there was one": Way({"limit_train_batches": 1.0}, before={"limit_train_batches": 8}),
    "half of an epoch": Way({"limit_train_batches": 0.5}, before={"limit_train_batches": 1.0}),
    "another batch size": Way({}, batch_size=3, strategy={"sampler": "scalable"}),
}


UNLIMITED = [name for name, way in WAYS.items() if "limit_train_batches" not in way.options]


def save_all(rank: int, world_size: int, directory: Path) -> dict[str, tuple[str, list[tuple[int, ...]]]]:
    """The checkpoint of each way, and what this rank has read before it."""
    found = {}
    for name, way in WAYS.items():
        saver = SavesAtAll(["train_batch_end"], directory / name)
        told = train(directory, world_size, way, 2, saver=saver, **{**way.options, **way.before, "max_epochs": 1})
        path = next(path for path, done in told.run.saved if done == DONE)
        found[name] = path, told.run.steps[:DONE]
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank, the checkpoints of two ranks, each from the midst of their first epoch."""
    return run_ranks(save_all, 2, tmp_path_factory.mktemp("saved"), env=by_hand_env(2), time_limit=60)


def resume_all(rank: int, world_size: int, directory: Path, paths: dict[str, str]) -> dict[str, Told]:
    return {
        name: train(directory, world_size, way, way.batch_size, ckpt_path=paths[name], **way.options)
        for name, way in WAYS.items()
    }


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids=["1 rank", "2 ranks", "3 ranks", "4 ranks"])
def resumed(
    request: pytest.FixtureRequest, saved: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Told]]:
    """By rank, what so many ranks have done with them."""
    paths = {name: path for name, (path, _) in saved[0].items()}
    place, size = tmp_path_factory.mktemp("resumed"), request.param
    return run_ranks(resume_all, size, place, paths, env=by_hand_env(size), time_limit=100)


def whole_epoch(world_size: int, way: Way) -> int:
    """Batches of an epoch on each rank."""
    batches = -(-SAMPLES // (way.batch_size * world_size))
    limit = way.options.get("limit_train_batches", 1.0)
    return min(limit, batches) if isinstance(limit, int) else int(batches * limit)


def of_epoch(told: Told, epoch: int) -> list[tuple[int, ...]]:
    return [step for step in told.run.steps if step[0] == epoch]


@pytest.mark.parametrize("name", [*UNLIMITED, "no limit where there was one"])
def test_what_is_left_of_an_epoch_is_read_once(
    name: str, saved: list[dict[str, Any]], resumed: list[dict[str, Told]]
) -> None:
    """What two ranks have read, and what the others read then, is each sample of the epoch, but for the padding."""
    before = [sample for rank in saved for step in rank[name][1] for sample in step[2:]]
    after = [sample for rank in resumed for step in of_epoch(rank[name], 0) for sample in step[2:]]
    assert set(before + after) == set(range(SAMPLES))
    assert len(before) + len(after) - SAMPLES < WAYS[name].batch_size * len(resumed)


@pytest.mark.parametrize("name", WAYS)
def test_later_epochs_are_whole(name: str, resumed: list[dict[str, Told]]) -> None:
    """They have as many batches as epochs of so many ranks have, with the limit that holds now."""
    batches = whole_epoch(len(resumed), WAYS[name])
    for rank in resumed:
        for epoch in range(1, EPOCHS):
            assert [step[1] for step in of_epoch(rank[name], epoch)] == list(range(batches))
            assert rank[name].batches[epoch] == batches


@pytest.mark.parametrize("name", WAYS)
def test_ranks_make_equally_many_steps(name: str, resumed: list[dict[str, Told]]) -> None:
    """In what is left of the epoch, too."""
    assert len({len(rank[name].run.steps) for rank in resumed}) == 1


@pytest.mark.parametrize("name", ["another limit", "a limit where there was none"])
def test_a_limit_counts_that_was_changed(name: str, resumed: list[dict[str, Told]]) -> None:
    """The epoch ends where one of so many ranks ends that was begun with this limit."""
    way = WAYS[name]
    whole, left = (-(-samples // (way.batch_size * len(resumed))) for samples in (SAMPLES, SAMPLES - DONE * 2 * 2))
    for rank in resumed:
        assert len(of_epoch(rank[name], 0)) == max(0, way.options["limit_train_batches"] - (whole - left))


def test_validation_comes_once_at_the_end_of_each_epoch(resumed: list[dict[str, Told]]) -> None:
    """With ``val_check_interval=1.0``, in the epoch that was resumed, too."""
    for rank in resumed:
        told = rank["validation once an epoch"]
        lengths = [len(of_epoch(told, epoch)) for epoch in range(EPOCHS)]
        assert told.validated_after == [sum(lengths[: epoch + 1]) for epoch in range(EPOCHS)]


def test_validation_comes_twice_in_each_later_epoch(resumed: list[dict[str, Told]]) -> None:
    """With ``val_check_interval=0.5``: after half of the batches of an epoch that is whole, and at its end."""
    for rank in resumed:
        told = rank["validation twice an epoch"]
        begun, batches = len(of_epoch(told, 0)), whole_epoch(len(resumed), WAYS["plain"])
        for _ in range(1, EPOCHS):
            within = [number - begun for number in told.validated_after if begun < number <= begun + batches]
            assert within == [batches // 2, batches // 2 * 2]
            begun += batches


def test_gradients_are_accumulated_over_two_batches(resumed: list[dict[str, Told]]) -> None:
    """With ``accumulate_grad_batches=2`` the optimiser steps after each second batch, and after an epoch's last one."""
    for rank in resumed:
        told = rank["accumulation"]
        lengths = [len(of_epoch(told, epoch)) for epoch in range(EPOCHS)]
        expected = []
        for epoch, length in enumerate(lengths):
            begun = sum(lengths[:epoch])
            expected += sorted({begun + done for done in (*range(2, length + 1, 2), length)})
        assert told.stepped_after == expected
        assert told.run.counts[0] == DONE // 2 + len(expected)
