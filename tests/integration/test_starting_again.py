"""A run that is resumed in the middle of an epoch continues there, or starts the epoch
again with one warning: if its data changed, or if their order cannot be drawn again.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext import ScalableDistributedSampler
from tests.harness.ranks import by_hand_env, launch_ranks, run_ranks
from tests.harness.training import At
from tests.integration import continuing
from tests.integration.continuing import Loaders, Numbers, Resumed, samples_of
from tests.integration.early_ends import Kill

# The training data: batches of two samples, four in an epoch on each of two ranks, unless
# a loader says otherwise.

SAMPLES = 16
MORE_SAMPLES = 28
CLOCK = itertools.count()  # shows another time whenever it is read


def divided_by_strategy(samples: int = SAMPLES, **options: Any) -> Loaders:
    """Return loaders whose samples the strategy divides among the ranks."""
    return lambda rank, world_size: DataLoader(Numbers(samples), 2, shuffle=True, **options)


def divided_by_user(samples: int) -> Loaders:
    """Return loaders whose samples the user's sampler divides among the ranks."""

    def make(rank: int, world_size: int) -> DataLoader[Any]:
        sampler = continuing.Turning(samples, rank, world_size)
        return DataLoader(Numbers(samples), 2, sampler=sampler)

    return make


def read_by_all(**options: Any) -> Loaders:
    """Return loaders of eight samples, all of which each rank reads."""
    return lambda rank, world_size: DataLoader(Numbers(8), **options)


def in_batches_of(size: int) -> Loaders:
    return read_by_all(batch_sampler=BatchSampler(SequentialSampler(range(8)), size, False))


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


class Drawing:
    """A sampler that draws an order of its samples.

    Args:
        draw: returns an index below its argument.
    """

    def __init__(self, draw: Callable[[int], int]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        left = list(range(SAMPLES))
        while left:
            yield left.pop(self.draw(len(left)))


def sampled_by(draw: Callable[[int], int]) -> Loaders:
    return lambda rank, world_size: DataLoader(Numbers(SAMPLES), 2, sampler=Drawing(draw))


class WithoutLength:
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


def sampled_without_length(rank: int, world_size: int) -> DataLoader[Any]:
    sampler: Any = WithoutLength()
    return DataLoader(Numbers(SAMPLES), 2, sampler=sampler)


def by_the_clock(count: int) -> int:
    return next(CLOCK) % count


# An epoch that starts again.


class Change(NamedTuple):
    """The data of two ranks that save, and those of the ranks that resume.

    Attributes:
        reason: a part of the warning.
        ranks: the number of ranks that resume.
        batches: the number of batches in an epoch before.
        options: of the Trainer.
    """

    before: Loaders
    after: Loaders
    reason: str
    ranks: int = 2
    batches: int = 4
    options: Mapping[str, Any] = {}


def same(loaders: Loaders, reason: str, **options: Any) -> Change:
    return Change(loaders, loaders, reason, **options)


# The strategy does not divide the samples.
UNDIVIDED: dict[str, Any] = {"use_distributed_sampler": False}
REMEDIES = ("map-style dataset", "resume with the same")
OTHER_ORDER = "draws another order"
UNKNOWN_ORDER = "yields batches in an order that cannot be drawn again"
CHANGES = {
    "a stream": same(continuing.stream(8), UNKNOWN_ORDER),
    "a stream beside samples": same(
        lambda rank, world_size: [
            divided_by_strategy()(rank, world_size),
            continuing.stream(4)(rank, world_size),
        ],
        UNKNOWN_ORDER,
    ),
    "a stream beside the user's sampler": same(
        lambda rank, world_size: [
            divided_by_user(SAMPLES)(rank, world_size),
            continuing.stream(4)(rank, world_size),
        ],
        UNKNOWN_ORDER,
        options=UNDIVIDED,
    ),
    "a stream beside a loader with a state": same(
        lambda rank, world_size: [
            stateful()(rank, world_size),
            continuing.stream(4)(rank, world_size),
        ],
        "was not at a known place",
    ),
    "workers that yield the first batch that is ready": same(
        divided_by_strategy(in_order=False, **continuing.workers(2)), UNKNOWN_ORDER
    ),
    "a sampler by the clock": same(
        sampled_by(by_the_clock), OTHER_ORDER, batches=8, options=UNDIVIDED
    ),
    "a sampler without a length": same(
        sampled_without_length, UNKNOWN_ORDER, batches=8, options=UNDIVIDED
    ),
    "a divided sampler by the clock": same(sampled_by(by_the_clock), OTHER_ORDER),
    "more samples": Change(
        divided_by_strategy(),
        divided_by_strategy(MORE_SAMPLES),
        "another length than when the checkpoint was saved (16, now 28)",
    ),
    "fewer samples than were read": Change(
        divided_by_strategy(),
        divided_by_strategy(6),
        "another length than when the checkpoint was saved (16, now 6)",
    ),
    "more samples that the user divides": Change(
        divided_by_user(SAMPLES), divided_by_user(MORE_SAMPLES), "another length", options=UNDIVIDED
    ),
    "more samples of a loader with a state": Change(
        stateful(), stateful(MORE_SAMPLES), "another number of samples"
    ),
    "workers of a loader with a state": Change(
        stateful(), stateful(**continuing.workers()), "another number of workers"
    ),
    "another order on each rank": Change(
        read_by_all(batch_size=2, shuffle=True),
        read_by_all(batch_size=2),
        OTHER_ORDER,
        options=UNDIVIDED,
    ),
    "other batches on each rank": Change(
        in_batches_of(2), in_batches_of(3), "another length", options=UNDIVIDED
    ),
    "another draw by weight": Change(
        weighted(replacement=True), weighted(replacement=False), OTHER_ORDER
    ),
    "a state for a sampler": Change(divided_by_strategy(), stateful(), "another kind"),
    "two loaders for one": Change(
        divided_by_strategy(), two_loaders, "began with 1 training loaders, and there are 2 now"
    ),
    "another number of ranks for a loader with a state": Change(
        stateful(), stateful(), "another number of ranks", ranks=1
    ),
    "another number of ranks for the user's sampler": Change(
        divided_by_user(SAMPLES),
        divided_by_user(SAMPLES),
        "another number of ranks",
        ranks=1,
        options=UNDIVIDED,
    ),
}


def training_on(
    rank: int, world_size: int, directory: Path, loaders: Loaders, **options: Any
) -> continuing.Training:
    """Return two epochs of training, whose weights draw no random numbers."""
    options = {"max_epochs": 2, "model": continuing.WITHOUT_DROPOUT, **options}
    return continuing.Training(lambda: loaders(rank, world_size), directory, world_size, options)


def save_at(
    rank: int, world_size: int, directory: Path, loaders: Loaders, point: str, **options: Any
) -> str:
    """Return the checkpoint of a run at a point."""
    return training_on(rank, world_size, directory, loaders, **options).run(point).saved[point]


def resume_from(
    rank: int, world_size: int, directory: Path, loaders: Loaders, path: str, **options: Any
) -> Resumed:
    return continuing.resume(training_on(rank, world_size, directory, loaders, **options), path)


def save_in_second_epoch(rank: int, world_size: int, directory: Path, name: str) -> str:
    """Return the checkpoint after two steps of epoch 1."""
    change = CHANGES[name]
    point = f"train_batch_end-{change.batches + 2}"
    return save_at(rank, world_size, directory, change.before, point, **change.options)


def resume_changed(
    rank: int, world_size: int, directory: Path, name: str, path: str
) -> tuple[continuing.Run, Resumed]:
    """Return a run from the beginning, and a resumed one."""
    change = CHANGES[name]
    training = training_on(rank, world_size, directory, change.after, **change.options)
    return training.run(), continuing.resume(training, path)


@pytest.mark.parametrize("name", CHANGES)
def test_an_epoch_that_cannot_continue_starts_again(name: str, tmp_path: Path) -> None:
    """Each rank trains on the whole epoch, and rank 0 warns once, with reason and remedy."""
    change = CHANGES[name]
    path, _ = run_ranks(save_in_second_epoch, 2, tmp_path, name)
    (tmp_path / "resumed").mkdir()
    env = by_hand_env(change.ranks)
    by_rank = run_ranks(resume_changed, change.ranks, tmp_path / "resumed", name, path, env=env)
    warned = [warning for _, resumed in by_rank for warning in resumed.warned]
    assert by_rank[0][1].warned == warned
    [warning] = warned
    begin, _, cause = warning.partition(": ")
    assert begin == "epoch 1 cannot be resumed in the middle, so that epoch starts again"
    reason, _, remedy = cause.partition("; ")
    assert change.reason in reason
    assert any(words in remedy for words in REMEDIES)
    for whole, resumed in by_rank:
        second_epoch = [step for step in whole.steps if step.epoch == 1]
        steps = resumed.run.steps
        assert [step.moment for step in steps] == [step.moment for step in second_epoch]
        if "by the clock" not in name:
            assert sorted(samples_of(steps)) == sorted(samples_of(second_epoch))
        assert resumed.run.counts.optimiser_steps == change.batches + 2 + len(second_epoch)


GROWN_AFTER = 3  # batches


def resume_after_growth(rank: int, world_size: int, directory: Path) -> Resumed:
    """Resume after the fifth batch of an epoch whose batches grew after the third one."""

    def grow(trainer: L.Trainer) -> None:
        loader: Any = trainer.train_dataloader
        loader.batch_sampler.batch_size = 4

    growing = At("on_train_batch_end", grow, earlier=GROWN_AFTER - 1)
    training = training_on(
        rank, world_size, directory, divided_by_strategy(48), max_epochs=1, callbacks=[growing]
    )
    run = training.run("train_batch_end-5")
    assert [len(step.samples) for step in run.steps[:5]] == [2, 2, 2, 4, 4]
    return continuing.resume(training, run.saved["train_batch_end-5"], callbacks=[])


def test_an_epoch_in_which_the_batch_size_changed_starts_again(tmp_path: Path) -> None:
    """The resumed run reads all samples of the epoch once, and rank 0 warns."""
    first, second = run_ranks(resume_after_growth, 2, tmp_path)
    assert (len(first.warned), len(second.warned)) == (1, 0)
    assert sorted(samples_of([*first.run.steps, *second.run.steps])) == [*range(48)]


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
    # Of the 7 samples that are left, rank 0 would have 3 in two batches, and the others 2
    # in one batch.
    assert "another number of ranks" in warning
    assert [len(resumed.run.steps) for resumed in (first, *others)] == [3, 3, 3]


# Checkpoints that one rank saved alone, because another one was killed.


def turned_on_rank_one(rank: int, world_size: int) -> DataLoader[Any]:
    """Return loaders of samplers, of which only rank 1's differs from ``divided_by_user``."""
    sampler = continuing.Turning(SAMPLES, rank, world_size)
    order = sampler.own[::-1] if rank == 1 else sampler.own
    return DataLoader(Numbers(SAMPLES), 2, sampler=order)


# The loaders of the run that is killed, those of the resumed one, parts of the warning,
# and the batches of the resumed epoch.
ALONE: dict[str, tuple[Loaders, Loaders, list[str], list[int]]] = {
    "the same order": (divided_by_user(SAMPLES), divided_by_user(SAMPLES), [], [3]),
    "another order on the killed rank": (
        divided_by_user(SAMPLES),
        turned_on_rank_one,
        [OTHER_ORDER, "sampler"],
        [0, 1, 2, 3],
    ),
    "a loader with a state": (
        stateful(8),
        stateful(8),
        ["a known place", "map-style dataset"],
        [0, 1, 2, 3],
    ),
}


def train_to_kill(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Train until rank 1 is killed in its third step, after which rank 0 saves alone."""
    kill = Kill("on_after_backward", earlier=2)
    options = {"callbacks": [kill.callback()], "max_epochs": 1, **UNDIVIDED}
    training = training_on(rank, world_size, directory, ALONE[name][0], **options)
    training.strategy = {"stop_checkpoint": str(directory / "alone.ckpt")}
    training.run()


def resume_alone(rank: int, world_size: int, directory: Path, name: str) -> Resumed:
    """Resume from the file of ``train_to_kill``."""
    path = str(directory.parent / "alone.ckpt")
    options = {"max_epochs": 1, **UNDIVIDED}
    return resume_from(rank, world_size, directory, ALONE[name][1], path, **options)


@pytest.mark.parametrize("name", ALONE)
def test_each_rank_checks_a_place_that_one_rank_saved_alone(name: str, tmp_path: Path) -> None:
    """All ranks continue, or all start the epoch again and rank 0 warns once."""
    launch_ranks(train_to_kill, 2, tmp_path, name)
    (tmp_path / "resumed").mkdir()
    first, second = run_ranks(resume_alone, 2, tmp_path / "resumed", name)
    _, _, parts, batches = ALONE[name]
    assert [step.batch for step in first.run.steps] == batches
    assert [step.batch for step in second.run.steps] == batches
    assert len(first.warned) == len(parts[:1])
    assert all(part in first.warned[0] for part in parts)
    assert second.warned == []


# Numbers of ranks that change, and generators without a seed.


class Unseeded(continuing.Net):
    """Draws other numbers in each run, as without ``seed_everything``."""

    def setup(self, stage: str) -> None:
        random.seed()

    def on_fit_start(self) -> None:
        torch.seed()


UNSEEDED: dict[str, Any] = {"model": partial(Unseeded, dropout=0.0), **UNDIVIDED}


def train_unseeded(
    rank: int, world_size: int, directory: Path, point: str, path: str | None = None
) -> tuple[str, str]:
    """Train, from a checkpoint if given; save at a point, and resume from there.

    Return the checkpoint, and how the resumed run differs.
    """
    loaders = sampled_by(random.randrange)
    training = training_on(rank, world_size, directory, loaders, **UNSEEDED)
    run = training.run(point, ckpt_path=path)
    resumed = training.run(ckpt_path=run.saved[point])
    return run.saved[point], continuing.difference(training, run, 3, resumed)


def test_ranks_that_a_resume_adds_keep_their_orders(tmp_path: Path) -> None:
    """A run that is resumed on more ranks, and once more, equals one that did not stop."""
    [(path, _)] = run_ranks(train_unseeded, 1, tmp_path, "train_epoch_end-8")
    results = run_ranks(train_unseeded, 2, tmp_path, "train_batch_end-11", path)
    assert [difference for _, difference in results] == ["", ""]


# An epoch that continues.


def continue_drawn(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    """Return the differences of runs whose sampler draws while it is read."""
    training = training_on(
        rank, world_size, directory, sampled_by(random.randrange), model=Mixing, **UNDIVIDED
    )
    return continuing.generations(training, ["train_batch_end-3"], ["train_batch_end-10"])


class Mixing(continuing.Net):
    """Draws from Python's global generator in each step, as mixup does."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        random.random()
        return super().training_step(batch, index)


def test_a_sampler_may_draw_from_a_global_generator_while_it_is_read(tmp_path: Path) -> None:
    """Its order depends on the epoch and the rank only, whatever a step draws."""
    assert run_ranks(continue_drawn, 2, tmp_path) == [{}, {}]


def resume_in_threes(
    rank: int, world_size: int, directory: Path
) -> tuple[list[int], list[list[int]]]:
    """Resume after two batches of two samples, with batches of three.

    Return the samples of the whole epoch, and those of each batch of the resumed run.
    """
    training = training_on(rank, world_size, directory, divided_by_strategy(), max_epochs=1)
    whole = training.run("train_batch_end-2")
    training.loaders = lambda: DataLoader(Numbers(SAMPLES), 3, shuffle=True)
    resumed = training.run(ckpt_path=whole.saved["train_batch_end-2"])
    return samples_of(whole.steps), [list(step.samples) for step in resumed.steps]


def test_the_rest_of_an_epoch_can_be_read_in_other_batches(tmp_path: Path) -> None:
    """The samples that the strategy divides are the remaining ones, in the same order."""
    for whole, batches in run_ranks(resume_in_threes, 2, tmp_path):
        assert batches == [whole[4:7], whole[7:]]


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


def resume_exception(rank: int, world_size: int, directory: Path, shuffle: bool) -> str:
    """Describe how a run differs whose fourth of six batches has raised."""
    options = {"model": continuing.WITHOUT_DROPOUT, "max_epochs": 1, **UNDIVIDED}
    loaders = continuing.shuffled(12, shuffle=shuffle)
    training = continuing.Training(loaders, directory, options=options)
    whole = training.run()
    path = training.run("exception-3", fail_at=(0, 3)).saved["exception-3"]
    return continuing.difference(training, whole, 3, training.run(ckpt_path=path))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_run_continues_with_the_batch_that_raised(shuffle: bool, tmp_path: Path) -> None:
    """Also if each rank shuffles all samples by itself."""
    assert run_ranks(resume_exception, 2, tmp_path, shuffle) == ["", ""]


class DrawingSampler(continuing.Turning):
    """Draws a number whenever Lightning sets its epoch."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        torch.rand(())


def resume_with_drawing_sampler(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    """Return the differences of resumed runs of a model with dropout."""
    sampler = DrawingSampler(24, rank, world_size)
    options = {"use_distributed_sampler": False}
    training = continuing.Training(
        continuing.loader(24, sampler=sampler), directory, options=options
    )
    return continuing.generations(training, ["train_batch_end-3"], ["train_batch_end-8"])


def test_a_sampler_that_draws_when_its_epoch_is_set(tmp_path: Path) -> None:
    """Setting the epoch of a resumed run again does not change later random numbers."""
    assert run_ranks(resume_with_drawing_sampler, 2, tmp_path) == [{}, {}]
