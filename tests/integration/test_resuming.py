"""A resumed run continues as if it had not been stopped: cases that
``test_resume_sweep`` lacks.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext import SamplerEpochSeeding
from tests.harness.ranks import run_ranks
from tests.harness.training import (
    At,
    Kind,
    assert_same,
    make_strategy,
    make_trainer,
    on_both,
    on_ranks,
)
from tests.integration.continuing import (
    KEPT,
    Net,
    Numbers,
    Points,
    Run,
    Step,
    Stream,
    Training,
    difference,
    generations,
    shuffled,
    workers,
)


class Plans(Net):
    """Makes Lightning create the loaders before anything is restored."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


class Case(NamedTuple):
    """Loaders, and the points that are resumed from: of a whole run, of the run resumed
    there, and so on.

    "train_batch_end-3" is the end of the third training step of the whole run.
    """

    loaders: Callable[[], Any]
    points: list[Points]
    options: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "limit of samples": Case(
        shuffled(10, batch_size=None),
        [["train_batch_end-3"], ["train_epoch_end-4"], ["train_batch_end-6"]],
        {"limit_train_batches": 4},
    ),
    "last batch dropped": Case(
        shuffled(18, drop_last=True), [["train_batch_end-3"], ["train_batch_end-6"]]
    ),
    "plan": Case(
        shuffled(16),
        [["train_batch_end-1", "train_batch_end-4"], ["train_batch_end-7"]],
        {"model": Plans, "accumulate_grad_batches": 2},
    ),
}


def run_cases(rank: int, world_size: int, directory: Path) -> dict[str, dict[str, str]]:
    found = {}
    for name, case in CASES.items():
        training = Training(case.loaders, directory, options=dict(case.options), name=name)
        found[name] = generations(training, *case.points)
    return found


@pytest.mark.lowest
def test_a_resumed_run_can_be_resumed(tmp_path: Path) -> None:
    """Batches and weights are those of an unbroken run after any number of stops."""
    found = run_ranks(run_cases, 2, tmp_path)
    assert found == [{name: {} for name in CASES}] * 2


def fail_again_and_again(rank: int, world_size: int, directory: Path) -> list[str]:
    """Return the differences of runs that fail in an epoch's second, last and first
    batch, and within a step.
    """
    training = Training(shuffled(16, **KEPT), directory, options={"dropout": False})
    whole = training.run()
    done = 0
    path = None
    wrong: list[str] = []
    for fail_at in ((0, 1), (0, 3), (1, 0)):
        point = f"exception-{4 * fail_at[0] + fail_at[1]}"
        run = training.run(point, ckpt_path=path, fail_at=fail_at)
        if run.steps != whole.steps[done : done + len(run.steps)]:
            wrong.append(f"{fail_at}: {run.steps}")
        path = run.saved[point]
        done += len(run.steps)
    wrong.append(difference(training, whole, done, training.run(ckpt_path=path)))
    training.options["accumulate_grad_batches"] = 2
    path = training.run("exception-7", fail_at=(1, 3)).saved["exception-7"]
    return [*wrong, difference(training, training.run(), 7, training.run(ckpt_path=path))]


def test_a_run_that_fails_again_and_again_trains_on_each_batch_once(tmp_path: Path) -> None:
    """A run continues with the batch that raised, or with its step.

    The batch is the first, the last or another one of an epoch.
    """
    assert run_ranks(fail_again_and_again, 2, tmp_path) == [["", ""]] * 2


def resume_ended_runs(rank: int, world_size: int, directory: Path) -> list[str]:
    """Return the differences of runs that resume from checkpoints saved after
    ``validate``.
    """
    found = []
    for name, ends in {
        "epoch": {"max_epochs": 1},
        "step": {"max_epochs": 2, "max_steps": 3},
    }.items():
        training = Training(shuffled(20), directory, options={"max_epochs": 2}, name=name)
        path = str(directory / f"{name}.ckpt")
        L.seed_everything(7, verbose=False)
        net = Net(training.loaders)
        trainer = make_trainer(
            make_strategy("ours", directory), num_sanity_val_steps=0, limit_val_batches=0, **ends
        )
        trainer.fit(net)
        trainer.validate(net, verbose=False)
        trainer.save_checkpoint(path)
        found.append(
            difference(training, training.run(), len(net.steps), training.run(ckpt_path=path))
        )
    return found


def test_a_finished_run_continues_where_training_was(tmp_path: Path) -> None:
    """A checkpoint that is saved after ``validate`` continues the training.

    The validation followed an epoch, or a step in the middle of one. The random states
    are those of the end of the training.
    """
    assert run_ranks(resume_ended_runs, 2, tmp_path) == [["", ""]] * 2


def change_batch_size(
    rank: int, world_size: int, directory: Path
) -> tuple[list[Step], list[Step], list[str]]:
    """Return the steps of an epoch with batches that grow after the third one, those of
    a run that resumes after the fifth, and its warnings that an epoch starts again.
    """

    def grow(trainer: L.Trainer) -> None:
        trainer.train_dataloader.batch_sampler.batch_size = 4

    options = {"max_epochs": 1, "callbacks": [At("on_train_batch_end", grow, earlier=2)]}
    training = Training(shuffled(48), directory, options=options)
    run = training.run("train_batch_end-5")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = training.run(ckpt_path=run.saved["train_batch_end-5"], callbacks=[])
    texts = [str(each.message) for each in caught]
    return run.steps, resumed.steps, [text for text in texts if "that epoch starts again" in text]


def test_an_epoch_in_which_the_batch_size_changed_starts_again(tmp_path: Path) -> None:
    """The resumed run reads all samples of the epoch once, and rank 0 warns."""
    by_rank = run_ranks(change_batch_size, 2, tmp_path)
    read = []
    for rank, (steps, resumed, warned) in enumerate(by_rank):
        assert [len(samples) for _, _, *samples in steps] == [2, 2, 2, 4, 4, 4, 4, 2]
        assert [len(samples) for _, _, *samples in resumed] == [2] * 12
        assert len(warned) == (1 if rank == 0 else 0)
        read += [sample for _, _, *samples in resumed for sample in samples]
    assert sorted(read) == [*range(48)]


SAMPLES = 48
# batches of the first epoch, on each of the two ranks that save; each has twelve of two
# samples
DONE = 4
POINT = f"train_batch_end-{DONE}"


def train(directory: Path, devices: int, batch_size: int, *points: str, **options: Any) -> Run:
    def loaders() -> DataLoader[Any]:
        return DataLoader(Numbers(SAMPLES), batch_size, shuffle=True)

    training = Training(loaders, directory, devices, {"max_epochs": 2}, {"sampler": "scalable"})
    return training.run(*points, **options)


def save(rank: int, world_size: int, directory: Path) -> Run:
    # Its epoch is limited to eight batches; the resumed run, without a limit, reads all
    # that are left of the twelve.
    return train(directory, world_size, 2, POINT, limit_train_batches=8, max_epochs=1)


def resume(rank: int, world_size: int, directory: Path, path: str) -> list[Step]:
    return train(directory, world_size, 3, ckpt_path=path).steps


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_rest_of_an_epoch_is_read_once_in_other_batches(ranks: int, tmp_path: Path) -> None:
    """The next epoch is a full epoch on the new ranks."""
    saved = run_ranks(save, 2, tmp_path)
    path = saved[0].saved[POINT]
    (tmp_path / "resumed").mkdir()
    resumed = run_ranks(resume, ranks, tmp_path / "resumed", path)
    read = [sample for run in saved for step in run.steps[:DONE] for sample in step[2:]]
    read += [
        sample
        for steps in resumed
        for epoch, _, *samples in steps
        if epoch == 0
        for sample in samples
    ]
    assert set(read) == set(range(SAMPLES))
    assert len(read) - SAMPLES < 3 * ranks, "more than what fills the last batches"
    for steps in resumed:
        batches = [batch for epoch, batch, *_ in steps if epoch == 1]
        assert batches == list(range(math.ceil(SAMPLES / (3 * ranks))))


class Counted(Numbers):
    """A dataset that counts how often its samples are read."""

    reads = 0

    def __getitem__(self, index: int) -> Tensor:
        Counted.reads += 1
        return super().__getitem__(index)


class Asked(StatefulDataLoader[Any]):
    """Counts the calls of ``state_dict``, also of copies."""

    asked = 0

    def state_dict(self) -> dict[str, Any]:
        Asked.asked += 1
        state: dict[str, Any] = super().state_dict()
        return state


class ByHand(DataLoader[Any]):
    """Loads a stream, and has no more than the two methods that Lightning needs for its state.

    Like torchdata's loader, it counts a batch when it is fetched, and a restored state
    is for the next iterator only.
    """

    given = start = 0

    def __iter__(self) -> Any:
        self.given = self.start
        self.start = 0
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


class LikeLitdata(DataLoader[Any]):
    """Forgets a restored state only when an iterator is read to its end, as litdata's
    loader does.
    """

    given = 0
    is_restored = False

    def __iter__(self) -> Any:
        start = self.given if self.is_restored else 0
        self.given = start
        for batch in islice(DataLoader.__iter__(self), start, None):
            self.given += 1
            yield batch
        self.is_restored = False

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]
        self.is_restored = True


LOADERS: dict[str, Callable[[int], Any]] = {
    "with a state": lambda rank: Asked(Counted(18), batch_size=2, shuffle=True),
    "without a state": lambda rank: DataLoader(
        Counted(18), 2, sampler=DistributedSampler(range(18), 2, rank)
    ),
    "by hand": lambda rank: ByHand(Stream(9, rank), batch_size=2),
}


class Calls(NamedTuple):
    """How many samples, and how many states of a loader, a run reads."""

    samples: int
    states: int


def count_calls(rank: int, world_size: int, directory: Path, name: str) -> list[Calls]:
    """Return what runs read: without checkpoints, with two, and resumed from the first."""
    training = Training(partial(LOADERS[name], rank), directory, options={"max_epochs": 2})
    found = []
    path = None
    for points in ((), ("train_batch_end-2", "train_batch_end-5"), ()):
        Asked.asked = 0
        Counted.reads = 0
        run = training.run(*points, ckpt_path=path)
        assert len(run.steps) == (10 if path is None else 8)
        found.append(Calls(Counted.reads, Asked.asked))
        path = run.saved.get("train_batch_end-2")
    return found


EACH_BATCH_ONCE = (18, 18, 14)  # samples of nine batches, and of the seven after the second


def test_a_loaders_state_is_read_for_a_checkpoint_only(tmp_path: Path) -> None:
    """A loader's state, which can be large, is not read before each batch.

    Finished batches are not read again.
    """
    for calls in run_ranks(count_calls, 2, tmp_path, "with a state"):
        plain, saved, resumed = calls
        assert plain.states == 0
        assert 2 <= saved.states <= 4
        assert resumed.states == 0
        assert tuple(each.samples for each in calls) == EACH_BATCH_ONCE


def test_a_loader_without_a_state_reads_no_batch_twice(tmp_path: Path) -> None:
    """A resumed run does not read the samples of finished batches."""
    for calls in run_ranks(count_calls, 2, tmp_path, "without a state"):
        assert tuple(each.samples for each in calls) == EACH_BATCH_ONCE


def continue_by_hand(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    """Return the differences of resumed runs with a user's own stateful loader."""
    options = {"max_epochs": 2, "dropout": False, "accumulate_grad_batches": 2}
    training = Training(partial(LOADERS["by hand"], rank), directory, options=options)
    return generations(training, ["train_batch_end-1", "train_batch_end-4"], ["train_batch_end-7"])


def test_each_rank_continues_with_the_state_of_its_own_loader(tmp_path: Path) -> None:
    """A user's own loader loses and repeats no batch.

    Its state is read for a checkpoint only.
    """
    for plain, saved, resumed in run_ranks(count_calls, 2, tmp_path, "by hand"):
        assert plain.states == 0
        assert 2 <= saved.states <= 4
        assert resumed.states == 0
    (tmp_path / "resumed").mkdir()
    assert run_ranks(continue_by_hand, 2, tmp_path / "resumed") == [{}, {}]


def continue_like_litdata(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    options = {
        "max_epochs": 3,
        "dropout": False,
        "accumulate_grad_batches": 2,
        "use_distributed_sampler": False,
    }
    training = Training(lambda: LikeLitdata(Numbers(10), 2), directory, options=options)
    return generations(training, ["train_batch_end-2"], ["train_batch_end-8"])


def test_a_state_that_a_loader_keeps_until_the_epochs_end_is_restored_once(tmp_path: Path) -> None:
    """With a loader like litdata's no batch is lost or repeated."""
    assert run_ranks(continue_like_litdata, 2, tmp_path) == [{}, {}]


def load_a_teacher(side: Kind, directory: Path, teacher: Path, plain: Path) -> list[Any]:
    """Return runs in which hooks read files: on all ranks a checkpoint, and on rank 0
    only a file of weights.
    """
    found: list[Any] = []

    def load(trainer: L.Trainer) -> None:
        content = [trainer.strategy.load_checkpoint(teacher)]
        if trainer.is_global_zero:
            content.append(trainer.strategy.load_checkpoint(plain))
        found.append([len(each) for each in content])

    training = Training(shuffled(12), directory, side=side, options={"max_epochs": 1})
    for hook in ("setup", "on_fit_start", "on_train_start", "on_train_batch_start"):
        run = training.run(callbacks=[At(hook, load)])
        found.append([run.steps, run.counts, run.weights])
    return found


def save_early(side: Kind, directory: Path, model: type[Net]) -> str:
    training = Training(shuffled(12), directory, options={"max_epochs": 1, "model": model})
    return training.run("train_batch_end-1").saved["train_batch_end-1"]


def test_a_file_that_a_hook_reads_moves_no_run(tmp_path: Path) -> None:
    """Training starts at the first batch, as with stock.

    A rank gets the file's content even if it reads alone.
    """
    teacher, _ = on_ranks("ours", save_early, tmp_path, Net)
    torch.save({"layers.0.weight": torch.ones(4, 1)}, tmp_path / "plain.pt")
    ours, stock = on_both(load_a_teacher, tmp_path, Path(teacher), tmp_path / "plain.pt")
    assert_same(ours, stock)


class Taught(Net):
    """Reads a teacher while it is restored: another file, or the one that it is
    restored from.
    """

    teachers: Sequence[str] = ()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for path in self.teachers:
            self.trainer.strategy.load_checkpoint(path)


def resume_with_a_teacher(rank: int, world_size: int, directory: Path) -> str:
    training = Training(shuffled(12), directory, options={"max_epochs": 2})
    whole = training.run("train_batch_end-1", "train_batch_end-4")
    Taught.teachers = [whole.saved[point] for point in ("train_batch_end-4", "train_batch_end-1")]
    resumed = training.run(model=Taught, ckpt_path=whole.saved["train_batch_end-4"])
    return difference(training, whole, 4, resumed)


def test_a_resume_ignores_files_that_hooks_read(tmp_path: Path) -> None:
    """Training continues where the file given as ``ckpt_path`` was saved."""
    assert run_ranks(resume_with_a_teacher, 2, tmp_path) == ["", ""]


class Tuned(Net):
    """Has the one optimiser that a finder of learning rates needs."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def find_a_rate(side: Kind, directory: Path, path: str) -> list[int]:
    """Return the steps of a run that resumes and then looks for a learning rate, which
    needs four more steps.
    """
    finder = LearningRateFinder(num_training_steps=4, update_attr=False)
    options = {"max_epochs": 2, "default_root_dir": directory}
    training = Training(shuffled(12), directory, side=side, options=options)
    run = training.run(model=Tuned, callbacks=[finder], ckpt_path=path)
    return [len(run.steps), *run.counts]


def test_a_finder_of_learning_rates_restores_its_own_file(tmp_path: Path) -> None:
    """As with stock, Lightning's loops then start from there, and so does the data."""
    path, _ = on_ranks("ours", save_early, tmp_path, Tuned)
    ours, stock = on_both(find_a_rate, tmp_path, path)
    assert ours == stock


class Augmented(Numbers):
    """Samples with a part that all three global generators draw."""

    def __getitem__(self, index: int) -> Tensor:
        drawn = random.random() + np.random.random() + torch.rand(())
        return torch.tensor([float(index) + 0.1 * float(drawn)])


class AugmentedTogether(Augmented):
    """The same, if the loader asks for all samples of a batch together."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [super(AugmentedTogether, self).__getitem__(index) for index in indices]


def resume_augmented(rank: int, world_size: int, directory: Path) -> list[dict[str, str]]:
    """Return the differences of runs that resume, and of one with fewer workers."""
    found = []
    for dataset in (Augmented, AugmentedTogether):
        two = partial(DataLoader, dataset(24), 2, shuffle=True, **workers(2))
        seeding = SamplerEpochSeeding(seed=3, each_sample=True)
        training = Training(two, directory, options={"callbacks": [seeding]}, name=dataset.__name__)
        wrong = generations(training, ["train_batch_end-3"], ["train_batch_end-7"])
        whole = training.run()
        training.loaders = partial(two, num_workers=1)
        found.append({**wrong, "one worker": difference(training, whole, 0, training.run())})
    return found


def test_augmentation_in_workers_is_that_of_an_uninterrupted_run(tmp_path: Path) -> None:
    """A run that resumes within an epoch learns the same with ``each_sample=True``.

    It is the same bit for bit, as is one with another number of workers.
    """
    found = run_ranks(resume_augmented, 2, tmp_path)
    assert found == [[{"one worker": ""}, {"one worker": ""}]] * 2
