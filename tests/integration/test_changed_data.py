"""A resume in the middle of an epoch whose data have changed since the checkpoint."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext import ScalableDistributedSampler
from lightning_ddp_ext.errors import ResumeError
from tests.harness.ranks import by_hand_env, run_ranks
from tests.integration import continuing
from tests.integration.continuing import Loaders, Numbers, Run, samples_of

# The training data: batches of two samples, four in an epoch on each of two ranks, unless
# a loader says otherwise.

SAMPLES = 16
MORE_SAMPLES = 28


def divided_by_strategy(samples: int) -> Loaders:
    """Return loaders whose samples the strategy divides among the ranks."""
    return lambda rank, world_size: DataLoader(Numbers(samples), 2, shuffle=True)


def divided_by_user(samples: int) -> Loaders:
    """Return loaders whose samples the user's sampler divides among the ranks."""

    def make(rank: int, world_size: int) -> DataLoader[Any]:
        sampler = continuing.Turning(samples, rank, world_size)
        return DataLoader(Numbers(samples), 2, sampler=sampler)

    return make


def read_by_all(**options: Any) -> Loaders:
    """Return loaders of eight samples, all of which each rank reads."""
    return lambda rank, world_size: DataLoader(Numbers(8), **options)


def in_batches_of(size: int, *, drop_last: bool = False) -> Loaders:
    return read_by_all(batch_sampler=BatchSampler(SequentialSampler(range(8)), size, drop_last))


def dropping_on_rank_one(rank: int, world_size: int) -> Any:
    return in_batches_of(2, drop_last=rank == 1)(rank, world_size)


def weighted(*, replacement: bool) -> Loaders:
    sampler = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement)
    return lambda rank, world_size: DataLoader(Numbers(SAMPLES), 2, sampler=sampler)


def stateful(samples: int = SAMPLES, **options: Any) -> Loaders:
    return lambda rank, world_size: StatefulDataLoader(
        Numbers(samples), batch_size=2, shuffle=True, **options
    )


def two_loaders(rank: int, world_size: int) -> CombinedLoader:
    loaders = [divided_by_strategy(samples)(rank, world_size) for samples in (SAMPLES, 24)]
    return CombinedLoader(loaders, "max_size_cycle")


# Changes that no epoch can be continued with.


class Change(NamedTuple):
    """The data of two ranks that save, and those of the ranks that resume.

    Attributes:
        message: a part of the error.
        ranks: the number of ranks that resume.
        batches: the number of batches in an epoch before.
        options: of the Trainer.
    """

    before: Loaders
    after: Loaders
    message: str = "cannot be resumed in the middle"
    ranks: int = 2
    batches: int = 4
    options: Mapping[str, Any] = {}


# The strategy does not divide the samples.
UNDIVIDED: dict[str, Any] = {"use_distributed_sampler": False}
CHANGES = {
    "more samples": Change(divided_by_strategy(SAMPLES), divided_by_strategy(MORE_SAMPLES)),
    "more samples that the user divides": Change(
        divided_by_user(SAMPLES), divided_by_user(MORE_SAMPLES), options=UNDIVIDED
    ),
    "more samples of a loader with a state": Change(stateful(), stateful(MORE_SAMPLES)),
    "a shorter stream": Change(continuing.stream(9), continuing.stream(2), batches=5),
    "more workers of a stream": Change(
        continuing.stream(8, **continuing.workers(1)),
        continuing.stream(8, **continuing.workers(2)),
        "had num_workers=1 when the checkpoint was saved, and now has 2; resume with",
    ),
    "workers of a loader with a state": Change(stateful(), stateful(**continuing.workers())),
    "another order on each rank": Change(
        read_by_all(batch_size=2, shuffle=True),
        read_by_all(batch_size=2),
        options=UNDIVIDED,
    ),
    "other batches on each rank": Change(in_batches_of(2), in_batches_of(3), options=UNDIVIDED),
    "another sampler on rank 1": Change(in_batches_of(2), dropping_on_rank_one, options=UNDIVIDED),
    "another draw by weight": Change(weighted(replacement=True), weighted(replacement=False)),
    "two loaders for one": Change(divided_by_strategy(SAMPLES), two_loaders),
    "another number of ranks": Change(
        stateful(),
        stateful(),
        "had ranks=2 when the checkpoint was saved, and now has 1; resume with",
        ranks=1,
    ),
}
REPEATED = (
    "more samples",
    "a shorter stream",
    "workers of a loader with a state",
    "two loaders for one",
    "another number of ranks",
)


def training_on(
    rank: int, world_size: int, directory: Path, loaders: Loaders, **options: Any
) -> continuing.Training:
    """Return two epochs of training, whose weights draw no random numbers."""
    options = {"max_epochs": 2, "model": continuing.WITHOUT_DROPOUT, **options}
    return continuing.Training(lambda: loaders(rank, world_size), directory, world_size, options)


def save_in_second_epoch(rank: int, world_size: int, directory: Path, name: str) -> str:
    """Return the checkpoint after two steps of epoch 1."""
    change = CHANGES[name]
    training = training_on(rank, world_size, directory, change.before, **change.options)
    point = f"train_batch_end-{change.batches + 2}"
    return training.run(point).saved[point]


def save_and_resume(function: Callable[..., Any], directory: Path, name: str) -> list[Any]:
    """Save on two ranks, and call the function on the ranks that resume."""
    path, _ = run_ranks(save_in_second_epoch, 2, directory, name)
    ranks = CHANGES[name].ranks
    (directory / "resumed").mkdir()
    env = by_hand_env(ranks)
    return run_ranks(function, ranks, directory / "resumed", name, path, env=env)


def resume_changed(rank: int, world_size: int, directory: Path, name: str, path: str) -> str:
    """Return the error of a resume with changed data."""
    change = CHANGES[name]
    training = training_on(rank, world_size, directory, change.after, **change.options)
    with pytest.raises(ResumeError) as refused:
        training.run(ckpt_path=path)
    return str(refused.value)


@pytest.mark.parametrize("name", CHANGES)
def test_an_epoch_of_changed_data_is_refused(name: str, tmp_path: Path) -> None:
    """Every rank's error names the change and ``resume_data="epoch"``."""
    for message in save_and_resume(resume_changed, tmp_path, name):
        assert 'resume_data="epoch"' in message
        assert CHANGES[name].message in message


class Watched(continuing.Stream):
    """A stream that records each sample when it is read."""

    def __init__(self, length: int, rank: int) -> None:
        super().__init__(length, rank)
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        for sample in super().__iter__():
            self.read.append(int(sample))
            yield sample


def resume_with_other_batches_on_rank_one(
    rank: int, world_size: int, directory: Path, name: str, path: str
) -> list[int]:
    """Return what this rank has read when the resume is refused."""
    stream = Watched(9, rank)
    batch_size = 2 if rank == 0 else 3
    loader = DataLoader(stream, batch_size)
    training = training_on(rank, world_size, directory, lambda *_: loader)
    with pytest.raises(ResumeError, match="had batch_size=2"):
        training.run(ckpt_path=path)
    return stream.read


def test_no_rank_reads_before_a_refusal(tmp_path: Path) -> None:
    """If one rank's loader has changed, the other rank does not read its own again."""
    read = save_and_resume(resume_with_other_batches_on_rank_one, tmp_path, "a shorter stream")
    assert read == [[], []]


def repeat_epoch(
    rank: int, world_size: int, directory: Path, name: str, path: str
) -> tuple[Run, Run]:
    """Return a run from the beginning, and one that repeats the checkpoint's epoch."""
    training = training_on(rank, world_size, directory, CHANGES[name].after)
    whole = training.run()
    training.strategy = {"resume_data": "epoch"}
    return whole, training.run(ckpt_path=path)


@pytest.mark.parametrize("name", REPEATED)
def test_an_epoch_of_changed_data_can_be_repeated(name: str, tmp_path: Path) -> None:
    """With ``resume_data="epoch"`` a run trains on the whole epoch again."""
    steps_when_saved = CHANGES[name].batches + 2
    for whole, resumed in save_and_resume(repeat_epoch, tmp_path, name):
        second_epoch = [step for step in whole.steps if step.epoch == 1]
        assert resumed.steps == second_epoch
        assert resumed.counts.optimiser_steps == steps_when_saved + len(second_epoch)


# Changes that are not refused.


def resume_in_threes(
    rank: int, world_size: int, directory: Path
) -> tuple[list[int], list[list[int]]]:
    """Resume after two batches of two samples, with batches of three.

    Return the samples of the whole epoch, and those of each batch of the resumed run.
    """
    loaders = divided_by_strategy(SAMPLES)
    training = training_on(rank, world_size, directory, loaders, max_epochs=1)
    whole = training.run("train_batch_end-2")
    training.loaders = lambda: DataLoader(Numbers(SAMPLES), 3, shuffle=True)
    resumed = training.run(ckpt_path=whole.saved["train_batch_end-2"])
    return samples_of(whole.steps), [list(step.samples) for step in resumed.steps]


def test_the_rest_of_an_epoch_can_be_read_in_other_batches(tmp_path: Path) -> None:
    """The samples that the strategy divides are the remaining ones, in the same order."""
    for whole, batches in run_ranks(resume_in_threes, 2, tmp_path):
        assert batches == [whole[4:7], whole[7:]]


def save_at(
    rank: int, world_size: int, directory: Path, loaders: Loaders, point: str, **options: Any
) -> str:
    """Return the checkpoint of a run at a point."""
    return training_on(rank, world_size, directory, loaders, **options).run(point).saved[point]


def resume_from(
    rank: int, world_size: int, directory: Path, loaders: Loaders, path: str, **options: Any
) -> continuing.Resumed:
    return continuing.resume(training_on(rank, world_size, directory, loaders, **options), path)


def twenty_four(rank: int, world_size: int) -> Any:
    """Return a loader of 24 samples, which the strategy divides among the ranks."""
    return divided_by_strategy(24)(rank, world_size)


IN_PAIRS = {"max_epochs": 1, "accumulate_grad_batches": 2, "limit_val_batches": 1.0}


def test_the_last_batch_of_an_epoch_is_a_step_on_fewer_ranks(tmp_path: Path) -> None:
    """Its gradients are not left over for the next epoch, and the epoch is validated."""
    # After the first optimiser step, 12 of 24 samples are read.
    path, *_ = run_ranks(
        save_at, 3, tmp_path, twenty_four, "train_batch_end-2", env=by_hand_env(3), **IN_PAIRS
    )
    for run, _ in run_ranks(resume_from, 2, tmp_path, twenty_four, path, **IN_PAIRS):
        # Three batches are left: two of one optimiser step, and the last one alone.
        assert len(run.steps) == 3
        assert run.counts.optimiser_steps == 1 + 2
        names = [event.what for event in run.events]
        assert names == ["step", "step", "step", "validation", "epoch end"]


def exact(rank: int, world_size: int) -> DataLoader[Any]:
    """Return a loader that repeats and drops none of 15 samples."""
    numbers = Numbers(15)
    return DataLoader(numbers, 2, sampler=ScalableDistributedSampler(numbers, uneven="exact"))


def test_an_epoch_that_would_be_uneven_on_more_ranks_starts_again(tmp_path: Path) -> None:
    """All ranks train on all its batches, and rank 0 warns."""
    # After two of four steps of epoch 1, 8 samples are read.
    path, _ = run_ranks(save_at, 2, tmp_path, exact, "train_batch_end-6")
    first, *others = run_ranks(resume_from, 3, tmp_path, exact, path, env=by_hand_env(3))
    [warning] = first.warned
    # Each of three ranks has three batches in the epoch. Of the 7 samples that are left,
    # rank 0 has 3 in two batches, and the others 2 in one batch: one, two and two are done.
    assert "continue after different numbers of batches: [1, 2, 2]" in warning
    assert [len(resumed.run.steps) for resumed in (first, *others)] == [3, 3, 3]
