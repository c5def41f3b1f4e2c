"""A run that is resumed in the middle of an epoch continues there, or starts the epoch
again with one warning: if its data changed, if their order cannot be drawn again, or if the
checkpoint has no position.

Each case is a start of two ranks that save, and a start of ranks that resume.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext import ScalableDistributedSampler
from tests.harness.ranks import launch_ranks
from tests.harness.training import Kind, on_ranks
from tests.integration import continuing
from tests.integration.early_ends import Kill

# Loaders have batches of two samples, four in an epoch on each of two ranks, unless they
# say otherwise.
SAMPLES = 16
STEPS_UNTIL_SAVE = 6
MIDDLE = "train_batch_end-2"  # of epoch 0
LATER = f"train_batch_end-{STEPS_UNTIL_SAVE}"  # in the middle of epoch 1
UNDIVIDED: dict[str, Any] = {"use_distributed_sampler": False}  # the strategy does not divide


def divided_by_strategy(
    samples: int = SAMPLES, batch_size: int = 2, **options: Any
) -> DataLoader[Any]:
    """Return a loader whose samples the strategy divides among the ranks."""
    return DataLoader(continuing.Numbers(samples), batch_size, shuffle=True, **options)


def divided_by_user(samples: int = SAMPLES) -> DataLoader[Any]:
    """Return a loader whose samples the user's sampler divides among the ranks."""
    return DataLoader(continuing.Numbers(samples), 2, sampler=turning(samples))


def turning(samples: int = SAMPLES) -> continuing.Turning:
    return continuing.Turning(samples, dist.get_rank(), dist.get_world_size())


def stateful(samples: int = SAMPLES, **options: Any) -> Any:
    """Return a loader with a state, whose samples the strategy divides."""
    return StatefulDataLoader(continuing.Numbers(samples), batch_size=2, shuffle=True, **options)


# What ranks run.


def training_on(
    directory: Path,
    loaders: continuing.Loaders,
    ranks: int = 2,
    *,
    strategy: Mapping[str, Any] = {},
    **options: Any,
) -> continuing.Training:
    """Return two epochs of training, whose weights draw no random numbers; the options are
    those of the Trainer.
    """
    options = {"max_epochs": 2, "model": continuing.WITHOUT_DROPOUT, **options}
    return continuing.Training(loaders, directory, ranks, options, dict(strategy))


def on_ranks_of(
    training: continuing.Training, function: Callable[..., Any], *args: Any
) -> list[Any]:
    """Return the results of ``function(training, *args)`` on the ranks of a training."""
    training.directory.mkdir(exist_ok=True)
    return on_ranks(
        training.side,
        call,
        training.directory,
        function,
        training,
        *args,
        world_size=training.devices,
    )


def call(kind: Kind, directory: Path, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def save_at(training: continuing.Training, point: str) -> str:
    """Save on the ranks of a training at a point; return the path."""
    return on_ranks_of(training, continuing.Training.run, point)[0].saved[point]


# An epoch that starts again.


class Change(NamedTuple):
    """What two ranks read that save, and the ranks that resume.

    Attributes:
        reason: a part of the warning.
        before: the loaders of the ranks that save.
        after: those of the ranks that resume, by default the same.
        ranks: the number of ranks that resume.
        options: see ``training_on``.
        repeats_samples: whether a rank reads the same samples in epoch 1 of each run.
    """

    reason: str
    before: continuing.Loaders
    after: continuing.Loaders | None = None
    ranks: int = 2
    options: Mapping[str, Any] = {}
    repeats_samples: bool = True


REMEDIES = ("map-style dataset", "resume with the same", "at the end of an epoch")


def resume_beside_whole(
    training: continuing.Training, path: str
) -> tuple[continuing.Run, continuing.Resumed]:
    """Return a run from the beginning, and a resumed one."""
    return training.run(), continuing.resume(training, path)


def expect_epoch_again(change: Change, directory: Path) -> None:
    """Save, resume with the change, and fail unless each rank trains on the whole epoch, and
    rank 0 warns once, with reason and remedy.
    """
    path = save_at(training_on(directory, change.before, **change.options), LATER)
    resuming = training_on(
        directory / "resumed", change.after or change.before, change.ranks, **change.options
    )
    by_rank = on_ranks_of(resuming, resume_beside_whole, path)
    expect_warning(change.reason, [resumed.warned for _, resumed in by_rank])
    for whole, resumed in by_rank:
        expected = [step for step in whole.steps if step.epoch == 1]
        steps = resumed.run.steps
        assert [step.moment for step in steps] == [step.moment for step in expected]
        assert resumed.run.counts.optimiser_steps == STEPS_UNTIL_SAVE + len(expected)
        if change.repeats_samples:
            assert sorted(continuing.samples_of(steps)) == sorted(continuing.samples_of(expected))


def expect_warning(reason: str, warned_by_rank: list[list[str]]) -> None:
    """Fail unless only rank 0 warns, once, with this reason and one of the remedies."""
    [warning], *warned_on_others = warned_by_rank
    assert not any(warned_on_others)
    begin = "epoch 1 cannot be resumed in the middle, so that epoch starts again: "
    assert warning.startswith(begin)
    given_reason, _, remedy = warning.removeprefix(begin).partition("; ")
    assert reason in given_reason
    assert any(words in remedy for words in REMEDIES)


# An order that cannot be drawn again.


def beside_stream(loader: continuing.Loaders) -> list[Any]:
    """Return a loader, and a stream that is read with it."""
    return [loader(), continuing.stream(4, dist.get_rank())]


def beside_stateful_stream(samples: int, streamed: int) -> list[Any]:
    """Return a loader of so many samples, and a stream with a state."""
    return [divided_by_strategy(samples), stateful_stream(streamed)]


def stateful_stream(samples: int) -> Any:
    """Return a loader with a state of this rank's own numbers."""
    return StatefulDataLoader(continuing.Stream(samples, dist.get_rank()), batch_size=2)


def short_and_long() -> list[Any]:
    """Return loaders of one batch and of four."""
    return [divided_by_strategy(4), divided_by_strategy(SAMPLES)]


def uneven_loaders() -> list[Any]:
    """Return loaders of four batches, and of one on rank 0 and three on rank 1."""
    return [divided_by_strategy(8), divided_by_strategy(2 + 4 * dist.get_rank())]


CLOCK = itertools.count()  # shows another time whenever it is read


class ByTheClock:
    """A sampler that draws another order whenever it is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        shift = next(CLOCK) % SAMPLES
        return iter([*range(shift, SAMPLES), *range(shift)])


class WithoutLength:
    """A sampler of eight samples without a length, all of which each rank reads."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def sampled_by(sampler: type[Any], samples: int) -> DataLoader[Any]:
    return DataLoader(continuing.Numbers(samples), 2, sampler=sampler())


OTHER_ORDER = "draws another order"
UNKNOWN_ORDER = "yields batches in an order that cannot be drawn again"
BEGUN_AGAIN = "begun again beside a longer loader"
WITHOUT_ORDER = {
    "a stream beside samples": Change(UNKNOWN_ORDER, partial(beside_stream, divided_by_strategy)),
    "a stream beside a loader with a state": Change(
        UNKNOWN_ORDER, partial(beside_stream, stateful)
    ),
    "a stream that has begun again": Change(
        BEGUN_AGAIN, partial(beside_stateful_stream, samples=SAMPLES, streamed=2)
    ),
    "a loader that has begun again beside a stream": Change(
        BEGUN_AGAIN, partial(beside_stateful_stream, samples=4, streamed=8)
    ),
    "a loader that has begun again beside a longer one": Change(BEGUN_AGAIN, short_and_long),
    # The shorter of two loaders has begun again, and each rank has another number of batches
    # of it than it knows.
    "uneven loaders": Change(
        BEGUN_AGAIN,
        uneven_loaders,
        options={"strategy": {"uneven_inputs": "stop_at_shortest"}, **UNDIVIDED},
    ),
    "workers that yield the first batch that is ready": Change(
        UNKNOWN_ORDER, partial(divided_by_strategy, in_order=False, **continuing.workers(2))
    ),
    "a sampler by the clock": Change(
        OTHER_ORDER, partial(sampled_by, ByTheClock, SAMPLES), repeats_samples=False
    ),
    "a sampler without a length": Change(
        UNKNOWN_ORDER, partial(sampled_by, WithoutLength, 8), options=UNDIVIDED
    ),
}


@pytest.mark.parametrize("name", WITHOUT_ORDER)
def test_an_epoch_whose_order_cannot_be_drawn_again_starts_again(name: str, tmp_path: Path) -> None:
    """The warning names the loader's order, also if the data are the same."""
    expect_epoch_again(WITHOUT_ORDER[name], tmp_path)


# Data that changed.


def undivided(batch_size: int) -> DataLoader[Any]:
    """Return a loader of eight samples, all of which each rank reads."""
    batches = BatchSampler(SequentialSampler(range(8)), batch_size, False)
    return DataLoader(continuing.Numbers(8), batch_sampler=batches)


def exact() -> DataLoader[Any]:
    """Return a loader that repeats and drops none of 15 samples."""
    numbers = continuing.Numbers(15)
    return DataLoader(numbers, 2, sampler=ScalableDistributedSampler(numbers, uneven="exact"))


def two_loaders() -> CombinedLoader:
    return CombinedLoader([divided_by_strategy(), divided_by_strategy(24)], "max_size_cycle")


OTHER_RANKS = "another number of ranks"
CHANGES = {
    "more samples": Change(
        "another length than when the checkpoint was saved (16, now 28)",
        divided_by_strategy,
        partial(divided_by_strategy, samples=28),
    ),
    "fewer samples than were read": Change(
        "another length than when the checkpoint was saved (16, now 6)",
        divided_by_strategy,
        partial(divided_by_strategy, samples=6),
    ),
    "more samples that the user divides": Change(
        "another length", divided_by_user, partial(divided_by_user, samples=28), options=UNDIVIDED
    ),
    "workers of a loader with a state": Change(
        "another number of workers", stateful, partial(stateful, **continuing.workers())
    ),
    "other batches on each rank": Change(
        "another length",
        partial(undivided, batch_size=2),
        partial(undivided, batch_size=3),
        options=UNDIVIDED,
    ),
    "a state for a sampler": Change("another kind", divided_by_strategy, stateful),
    "two loaders for one": Change(
        "began with 1 training loaders, and there are 2 now", divided_by_strategy, two_loaders
    ),
    "another number of ranks for a loader with a state": Change(OTHER_RANKS, stateful, ranks=1),
    # Of the 7 samples that are left, rank 0 would have 3 in two batches, and the others 2 in
    # one batch.
    "an epoch that would be uneven on more ranks": Change(OTHER_RANKS, exact, ranks=3),
    "another number of ranks for the user's sampler": Change(
        OTHER_RANKS, divided_by_user, ranks=1, options=UNDIVIDED
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_epoch_whose_data_changed_starts_again(name: str, tmp_path: Path) -> None:
    """The warning names what changed."""
    expect_epoch_again(CHANGES[name], tmp_path)


# Checkpoints that one rank saved alone, because another one was killed.


def turned_on_rank_one() -> DataLoader[Any]:
    """Return a loader whose order only differs from ``divided_by_user`` on rank 1."""
    direction = -1 if dist.get_rank() == 1 else 1
    return DataLoader(continuing.Numbers(SAMPLES), 2, sampler=turning().own[::direction])


@pytest.mark.parametrize(
    ("before", "after", "parts"),
    [
        pytest.param(
            divided_by_user,
            turned_on_rank_one,
            [OTHER_ORDER, "sampler"],
            id="another order on the killed rank",
        ),
        pytest.param(
            partial(stateful, samples=8),
            partial(stateful, samples=8),
            ["a known place", "map-style dataset"],
            id="a loader with a state",
        ),
    ],
)
def test_each_rank_checks_a_place_that_one_rank_saved_alone(
    before: continuing.Loaders, after: continuing.Loaders, parts: list[str], tmp_path: Path
) -> None:
    """If it is another place for one of them, all start the epoch again, and rank 0 warns
    once.
    """
    path = str(tmp_path / "alone.ckpt")
    one_epoch: dict[str, Any] = {"max_epochs": 1, **UNDIVIDED}
    until_kill = training_on(
        tmp_path,
        before,
        strategy={"stop_checkpoint": path},
        callbacks=[Kill("on_after_backward", earlier=2).callback()],  # of rank 1, in its third step
        **one_epoch,
    )
    launch_ranks(call, 2, continuing.Training.run, until_kill)
    first, second = on_ranks_of(
        training_on(tmp_path / "resumed", after, **one_epoch), continuing.resume, path
    )
    for resumed in (first, second):
        assert [step.batch for step in resumed.run.steps] == [0, 1, 2, 3]
    [warning] = first.warned
    assert all(part in warning for part in parts)
    assert second.warned == []


# Checkpoints without a data position of this release.

STREAMED = 12  # samples of each rank
NO_POSITION = (
    "epoch 0 cannot be resumed in the middle, so that epoch starts again: the checkpoint has no"
    " position that this release can read; save at the end of an epoch before you change the"
    " strategy or its release"
)


@pytest.mark.parametrize("kind", ["stock", "another release"])
def test_a_checkpoint_without_a_position_repeats_the_epoch(kind: str, tmp_path: Path) -> None:
    """Each rank reads all its own data again, and rank 0 warns with the remedy."""
    training = training_on(tmp_path, partial(stateful_stream, STREAMED))
    path = save_at(replace(training, side="stock" if kind == "stock" else "ours"), MIDDLE)
    if kind == "another release":
        checkpoint = torch.load(path, weights_only=False)
        checkpoint["lightning_ddp_ext"]["version"] = 5
        torch.save(checkpoint, path)
    first, second = on_ranks_of(training, continuing.resume, path)
    assert first.warned == [NO_POSITION]
    assert second.warned == []
    for rank, resumed in enumerate((first, second)):
        steps = resumed.run.steps
        assert continuing.samples_of(step for step in steps if step.epoch == 0) == [
            *continuing.Stream(STREAMED, rank).numbers
        ]


# An epoch that continues.


def resume_in_threes(training: continuing.Training) -> tuple[list[int], list[list[int]]]:
    """Resume after two batches of two samples, with batches of three.

    Return the samples of the whole epoch, and those of each batch of the resumed run.
    """
    whole = training.run(MIDDLE)
    training.loaders = partial(divided_by_strategy, batch_size=3)
    resumed = training.run(ckpt_path=whole.saved[MIDDLE])
    return continuing.samples_of(whole.steps), [list(step.samples) for step in resumed.steps]


def test_the_rest_of_an_epoch_can_be_read_in_other_batches(tmp_path: Path) -> None:
    """The samples that the strategy divides are the remaining ones, in the same order."""
    training = training_on(tmp_path, divided_by_strategy, max_epochs=1)
    for whole, batches in on_ranks_of(training, resume_in_threes):
        assert batches == [whole[4:7], whole[7:]]


def resume_with_lower_limit(
    training: continuing.Training,
) -> tuple[list[continuing.Step], list[continuing.Step]]:
    """Return the steps of a whole run, and of one that resumes after six batches with a
    limit of four.
    """
    whole = training.run("train_batch_end-6")
    resumed = training.run(ckpt_path=whole.saved["train_batch_end-6"], limit_train_batches=4)
    return whole.steps, resumed.steps


def test_an_epoch_beyond_its_limit_ends_after_one_step(tmp_path: Path) -> None:
    """It does not have as many batches again."""
    training = training_on(
        tmp_path,
        partial(divided_by_strategy, samples=40),
        accumulate_grad_batches=2,
        limit_train_batches=8,
    )
    for whole, steps in on_ranks_of(training, resume_with_lower_limit):
        assert [step.moment for step in steps] == [(0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
        assert continuing.samples_of(steps[:2]) == continuing.samples_of(whole[6:8])


TWENTY_FOUR = partial(divided_by_strategy, samples=24)


def resume_twice(training: continuing.Training, path: str) -> list[continuing.Run]:
    """Resume, and resume a checkpoint that a callback saves before the first batch."""
    first = training.run("train_start-2", ckpt_path=path)
    return [first, training.run(ckpt_path=first.saved["train_start-2"])]


def test_a_resumed_run_can_be_saved_before_its_first_batch(tmp_path: Path) -> None:
    """The file has the place and the random numbers of the one that was resumed."""
    options: dict[str, Any] = {"max_epochs": 1, "model": continuing.Net}
    path = save_at(training_on(tmp_path, TWENTY_FOUR, **options), MIDDLE)
    for ranks in (1, 2):
        resuming = training_on(tmp_path / f"{ranks} ranks", TWENTY_FOUR, ranks, **options)
        for first, second in on_ranks_of(resuming, resume_twice, path):
            assert len(continuing.samples_of(first.steps)) == 16 // ranks
            assert continuing.samples_of(first.steps) == continuing.samples_of(second.steps)
            assert first.weights.equal(second.weights)


def test_the_last_batch_of_an_epoch_is_a_step_on_fewer_ranks(tmp_path: Path) -> None:
    """Its gradients are not left over for the next epoch, and the epoch is validated."""
    in_pairs: dict[str, Any] = {
        "max_epochs": 1,
        "accumulate_grad_batches": 2,
        "limit_val_batches": 1.0,
    }
    # After the first optimiser step, 12 of 24 samples are read.
    path = save_at(training_on(tmp_path, TWENTY_FOUR, 3, **in_pairs), MIDDLE)
    resuming = training_on(tmp_path, TWENTY_FOUR, **in_pairs)
    for run, _ in on_ranks_of(resuming, continuing.resume, path):
        # Three batches are left: two of one optimiser step, and the last one alone.
        assert len(run.steps) == 3
        assert run.counts.optimiser_steps == 1 + 2
        assert [event.what for event in run.events] == [
            "step",
            "step",
            "step",
            "validation",
            "epoch end",
        ]
