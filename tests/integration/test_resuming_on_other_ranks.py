"""After a resume on another number of ranks epochs have the right length, and everything that hangs on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from tests.harness.ranks import by_hand_env, run_ranks
from tests.integration.continuing import Numbers, Run, Saver, Step, Training

SAMPLES = 48
DONE = 4  # batches of the first epoch, on each of the two ranks that save; each has twelve of two samples
EPOCHS = 3


@dataclass(frozen=True)
class Way:
    """How training goes after a resume, and before it where that is otherwise."""

    options: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 2
    strategy: dict[str, Any] = field(default_factory=dict)

    @property
    def limit(self) -> Any:
        return self.options.get("limit_train_batches", 1.0)

    def whole_epoch(self, world_size: int) -> int:
        """Batches of an epoch on each rank."""
        batches = -(-SAMPLES // (self.batch_size * world_size))
        return min(self.limit, batches) if isinstance(self.limit, int) else int(batches * self.limit)


WAYS = {
    "plain": Way(),
    "twice": Way({"val_check_interval": 0.5, "limit_val_batches": 1.0}),
    "once": Way({"val_check_interval": 1.0, "limit_val_batches": 1.0}),
    "accumulation": Way({"accumulate_grad_batches": 2}),
    "another limit": Way({"limit_train_batches": 5}, before={"limit_train_batches": 10}),
    "no limit where there was one": Way({"limit_train_batches": 1.0}, before={"limit_train_batches": 8}),
    "half of an epoch": Way({"limit_train_batches": 0.5}, before={"limit_train_batches": 1.0}),
    "another batch size": Way(batch_size=3, strategy={"sampler": "scalable"}),
}


def train(directory: Path, devices: int, way: Way, batch_size: int, **options: Any) -> Run:
    def loaders() -> DataLoader[Any]:
        return DataLoader(Numbers(SAMPLES), batch_size, shuffle=True)

    return Training(loaders, directory, devices, {"max_epochs": EPOCHS}, way.strategy).run(**options)


def of_epoch(run: Run, epoch: int) -> list[Step]:
    return [step for step in run.steps if step[0] == epoch]


def save_all(rank: int, world_size: int, directory: Path) -> dict[str, tuple[str, list[tuple[int, ...]]]]:
    """The checkpoint of each way, and what this rank has read before it."""
    found = {}
    for name, way in WAYS.items():
        saver = Saver(directory / name, "train_batch_end")
        run = train(directory, world_size, way, 2, saver=saver, **{**way.options, **way.before, "max_epochs": 1})
        found[name] = next(path for path, done in run.saved if done == DONE), run.steps[:DONE]
    return found


def resume_all(rank: int, world_size: int, directory: Path, paths: dict[str, str]) -> dict[str, Run]:
    return {
        name: train(directory, world_size, way, way.batch_size, ckpt_path=paths[name], **way.options)
        for name, way in WAYS.items()
    }


def test_epochs_are_what_they_are_on_the_ranks_that_resume(tmp_path: Path) -> None:
    """What is left of an epoch is read once, and its length, limits, validations and steps are those of these ranks."""
    saved = run_ranks(save_all, 2, tmp_path, env=by_hand_env(2), time_limit=60)
    paths = {name: path for name, (path, _) in saved[0].items()}
    for size in (1, 2, 3):
        place = tmp_path / str(size)
        place.mkdir()
        resumed = run_ranks(resume_all, size, place, paths, env=by_hand_env(size), time_limit=100)
        for name, way in WAYS.items():
            runs = [rank[name] for rank in resumed]
            expect_whole_epochs(way, runs)
            if way.limit == 1.0:
                expect_each_sample_once(way, [rank[name][1] for rank in saved], runs)
        for rank in resumed:
            expect_validations_and_steps(rank, WAYS["plain"].whole_epoch(size))


def expect_each_sample_once(way: Way, before: list[list[Step]], runs: list[Run]) -> None:
    """What two ranks have read, and what the others read then, is each sample of the epoch, but for the padding."""
    samples = [sample for steps in before for step in steps for sample in step[2:]]
    samples += [sample for run in runs for step in of_epoch(run, 0) for sample in step[2:]]
    assert set(samples) == set(range(SAMPLES)), way
    assert len(samples) - SAMPLES < way.batch_size * len(runs), way


def expect_whole_epochs(way: Way, runs: list[Run]) -> None:
    """Later ones have as many batches as those of so many ranks, and the first one ends where theirs would."""
    for run in runs:
        for epoch in range(1, EPOCHS):
            assert [step[1] for step in of_epoch(run, epoch)] == list(range(way.whole_epoch(len(runs)))), way
        if isinstance(way.limit, int):
            whole, left = (-(-samples // (2 * len(runs))) for samples in (SAMPLES, SAMPLES - DONE * 2 * 2))
            assert len(of_epoch(run, 0)) == max(0, way.limit - (whole - left)), way
    assert len({len(run.steps) for run in runs}) == 1


def expect_validations_and_steps(runs: dict[str, Run], batches: int) -> None:
    """One validation at each epoch's end or two in each later epoch, and a step for every second or last batch."""
    once, twice, accumulated = (runs[name] for name in ("once", "twice", "accumulation"))
    assert validated_after(once) == [len([step for step in once.steps if step[0] <= epoch]) for epoch in range(EPOCHS)]
    begun = len(of_epoch(twice, 0))
    later = [number - begun for number in validated_after(twice) if number > begun]
    assert later == [epoch * batches + half * (batches // 2) for epoch in range(EPOCHS - 1) for half in (1, 2)]
    lengths = [len(of_epoch(accumulated, epoch)) for epoch in range(EPOCHS)]
    assert accumulated.counts[0] == DONE // 2 + sum(-(-length // 2) for length in lengths)


def validated_after(run: Run) -> list[int]:
    """The numbers of steps after which a run has validated."""
    names = [name for name, _ in run.events]
    return [names[:place].count("step") for place, name in enumerate(names) if name == "validation"]
