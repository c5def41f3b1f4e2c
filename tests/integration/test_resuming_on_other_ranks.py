"""After a resume on other ranks epochs have the right length, also with other limits and batches than before.

That each sample of the epoch is read once, and the rest of the run is as it should be, ``test_resume_sweep`` tries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from tests.harness.ranks import by_hand_env, run_ranks
from tests.integration.continuing import Numbers, Point, Run, Step, Training

SAMPLES = 48
DONE = 4  # batches of the first epoch, on each of the two ranks that save; each has twelve of two samples
EPOCHS = 2


@dataclass(frozen=True)
class Way:
    """On how many ranks and how training goes after a resume, and before it where that is otherwise."""

    ranks: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 2
    strategy: dict[str, Any] = field(default_factory=dict)

    @property
    def limit(self) -> int:
        return int(self.options.get("limit_train_batches", SAMPLES))

    def whole_epoch(self, world_size: int) -> int:
        """Return batches of an epoch on each rank."""
        return min(self.limit, -(-SAMPLES // (self.batch_size * world_size)))


WAYS = {
    "another limit": Way((2, 3), {"limit_train_batches": 5}, before={"limit_train_batches": 10}),
    "no limit where there was one": Way((1,), before={"limit_train_batches": 8}),
    "another batch size": Way((2,), batch_size=3, strategy={"sampler": "scalable"}),
}
POINT = f"train_batch_end-{DONE}"


def train(directory: Path, devices: int, way: Way, batch_size: int, *points: Point, **options: Any) -> Run:
    def loaders() -> DataLoader[Any]:
        return DataLoader(Numbers(SAMPLES), batch_size, shuffle=True)

    return Training(loaders, directory, devices, {"max_epochs": EPOCHS}, way.strategy).run(*points, **options)


def of_epoch(run: Run, epoch: int) -> list[Step]:
    return [step for step in run.steps if step[0] == epoch]


def save_all(rank: int, world_size: int, directory: Path) -> dict[str, Run]:
    """Return runs that saved the checkpoints to resume, each in its own way."""
    return {
        name: train(directory, world_size, way, 2, POINT, into=name, **{**way.options, **way.before, "max_epochs": 1})
        for name, way in WAYS.items()
    }


def resume_all(rank: int, world_size: int, directory: Path, saved: dict[str, Run]) -> dict[str, Run]:
    return {
        name: train(directory, world_size, way, way.batch_size, ckpt_path=saved[name].saved[POINT], **way.options)
        for name, way in WAYS.items()
        if world_size in way.ranks
    }


def test_epochs_are_what_they_are_on_the_ranks_that_resume(tmp_path: Path) -> None:
    """The rest of an epoch is read once; its length and its limits are those of these ranks."""
    saved = run_ranks(save_all, 2, tmp_path, env=by_hand_env(2))
    for size in (1, 2, 3):
        place = tmp_path / str(size)
        place.mkdir()
        resumed = run_ranks(resume_all, size, place, saved[0], env=by_hand_env(size))
        for name in resumed[0]:
            way, runs = WAYS[name], [rank[name] for rank in resumed]
            expect_whole_epochs(way, runs)
            if way.limit == SAMPLES:
                expect_each_sample_once(way, [rank[name].steps[:DONE] for rank in saved], runs)


def expect_each_sample_once(way: Way, before: list[list[Step]], runs: list[Run]) -> None:
    """Assert that two ranks and then the others read each sample of the epoch once, except for padding."""
    samples = [sample for steps in before for step in steps for sample in step[2:]]
    samples += [sample for run in runs for step in of_epoch(run, 0) for sample in step[2:]]
    assert set(samples) == set(range(SAMPLES)), way
    assert len(samples) - SAMPLES < way.batch_size * len(runs), way


def expect_whole_epochs(way: Way, runs: list[Run]) -> None:
    """Assert that each epoch, also the first one, ends where one of as many ranks from the start would."""
    for run in runs:
        for epoch in range(1, EPOCHS):
            assert [step[1] for step in of_epoch(run, epoch)] == list(range(way.whole_epoch(len(runs)))), way
        if way.limit < SAMPLES:
            whole, left = (-(-samples // (2 * len(runs))) for samples in (SAMPLES, SAMPLES - DONE * 2 * 2))
            assert len(of_epoch(run, 0)) == max(0, way.limit - (whole - left)), way
    assert len({len(run.steps) for run in runs}) == 1
