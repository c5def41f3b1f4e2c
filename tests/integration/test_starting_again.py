"""A run that is resumed in the middle of an epoch continues there, or starts the epoch
again with one warning: if its data changed, or if their order cannot be drawn again.
"""

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext import ScalableDistributedSampler
from tests.harness.ranks import by_hand_env, launch_ranks, run_ranks
from tests.integration import continuing
from tests.integration.early_ends import Kill

# The training data: batches of two samples, four in an epoch on each of two ranks, unless
# a loader says otherwise.

SAMPLES = 16
LATER = "train_batch_end-6"  # in the middle of epoch 1
CLOCK = itertools.count()  # shows another time whenever it is read


def divided_by_strategy(
    rank: int, world_size: int, samples: int = SAMPLES, batch_size: int = 2, **options: Any
) -> DataLoader[Any]:
    """Return a loader whose samples the strategy divides among the ranks."""
    return DataLoader(continuing.Numbers(samples), batch_size, shuffle=True, **options)


def divided_by_user(rank: int, world_size: int, samples: int = SAMPLES) -> DataLoader[Any]:
    """Return a loader whose samples the user's sampler divides among the ranks."""
    sampler = continuing.Turning(samples, rank, world_size)
    return DataLoader(continuing.Numbers(samples), 2, sampler=sampler)


def turned_on_rank_one(rank: int, world_size: int) -> DataLoader[Any]:
    """Return a loader whose order only differs from ``divided_by_user`` on rank 1."""
    sampler = continuing.Turning(SAMPLES, rank, world_size)
    order = sampler.own[::-1] if rank == 1 else sampler.own
    return DataLoader(continuing.Numbers(SAMPLES), 2, sampler=order)


def undivided(rank: int, world_size: int, batch_size: int) -> DataLoader[Any]:
    """Return a loader of eight samples, all of which each rank reads."""
    batches = BatchSampler(SequentialSampler(range(8)), batch_size, False)
    return DataLoader(continuing.Numbers(8), batch_sampler=batches)


def stateful(rank: int, world_size: int, samples: int = SAMPLES, **options: Any) -> Any:
    """Return a loader with a state, whose samples the strategy divides."""
    return StatefulDataLoader(continuing.Numbers(samples), batch_size=2, shuffle=True, **options)


def exact(rank: int, world_size: int) -> DataLoader[Any]:
    """Return a loader that repeats and drops none of 15 samples."""
    numbers = continuing.Numbers(15)
    return DataLoader(numbers, 2, sampler=ScalableDistributedSampler(numbers, uneven="exact"))


def beside_stream(rank: int, world_size: int, loader: continuing.Loaders) -> list[Any]:
    """Return a loader, and a stream that is read with it."""
    return [loader(rank, world_size), continuing.stream(4)(rank, world_size)]


def beside_stateful_stream(rank: int, world_size: int, samples: int, streamed: int) -> list[Any]:
    """Return a loader of so many samples, and a stream with a state."""
    return [
        divided_by_strategy(rank, world_size, samples),
        StatefulDataLoader(continuing.Stream(streamed, rank), batch_size=2),
    ]


def two_loaders(rank: int, world_size: int) -> CombinedLoader:
    return CombinedLoader(
        [divided_by_strategy(rank, world_size, samples) for samples in (SAMPLES, 24)],
        "max_size_cycle",
    )


def short_and_long(rank: int, world_size: int) -> list[Any]:
    """Return loaders of one batch and of four."""
    return [divided_by_strategy(rank, world_size, samples) for samples in (4, SAMPLES)]


def uneven_loaders(rank: int, world_size: int) -> list[Any]:
    """Return loaders of four batches, and of one on rank 0 and three on rank 1."""
    return [divided_by_strategy(rank, world_size, samples) for samples in (8, 2 + 4 * rank)]


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


def sampled_without_length(rank: int, world_size: int) -> DataLoader[Any]:
    sampler: Any = WithoutLength()
    return DataLoader(continuing.Numbers(8), 2, sampler=sampler)


def by_the_clock(rank: int, world_size: int) -> DataLoader[Any]:
    return DataLoader(continuing.Numbers(SAMPLES), 2, sampler=ByTheClock())


# An epoch that starts again.


class Change(NamedTuple):
    """The data of two ranks that save, and those of the ranks that resume.

    Attributes:
        reason: a part of the warning.
        ranks: the number of ranks that resume.
        options: see ``training_on``.
    """

    before: continuing.Loaders
    after: continuing.Loaders
    reason: str
    ranks: int = 2
    options: Mapping[str, Any] = {}


def same(loaders: continuing.Loaders, reason: str) -> Change:
    return Change(loaders, loaders, reason)


# The strategy does not divide the samples.
UNDIVIDED: dict[str, Any] = {"use_distributed_sampler": False}
REMEDIES = ("map-style dataset", "resume with the same", "at the end of an epoch")
OTHER_ORDER = "draws another order"
BEGUN_AGAIN = "begun again beside a longer loader"
UNKNOWN_ORDER = "yields batches in an order that cannot be drawn again"
CHANGES = {
    "a stream beside samples": same(
        partial(beside_stream, loader=divided_by_strategy), UNKNOWN_ORDER
    ),
    "a stream beside a loader with a state": same(
        partial(beside_stream, loader=stateful), UNKNOWN_ORDER
    ),
    "a stream that has begun again": same(
        partial(beside_stateful_stream, samples=SAMPLES, streamed=2), BEGUN_AGAIN
    ),
    "a loader that has begun again beside a stream": same(
        partial(beside_stateful_stream, samples=4, streamed=8), BEGUN_AGAIN
    ),
    "a loader that has begun again beside a longer one": same(short_and_long, BEGUN_AGAIN),
    "workers that yield the first batch that is ready": same(
        partial(divided_by_strategy, in_order=False, **continuing.workers(2)), UNKNOWN_ORDER
    ),
    "a sampler by the clock": same(by_the_clock, OTHER_ORDER),
    "a sampler without a length": Change(
        sampled_without_length, sampled_without_length, UNKNOWN_ORDER, options=UNDIVIDED
    ),
    "more samples": Change(
        divided_by_strategy,
        partial(divided_by_strategy, samples=28),
        "another length than when the checkpoint was saved (16, now 28)",
    ),
    "fewer samples than were read": Change(
        divided_by_strategy,
        partial(divided_by_strategy, samples=6),
        "another length than when the checkpoint was saved (16, now 6)",
    ),
    "more samples that the user divides": Change(
        divided_by_user, partial(divided_by_user, samples=28), "another length", options=UNDIVIDED
    ),
    "workers of a loader with a state": Change(
        stateful, partial(stateful, **continuing.workers()), "another number of workers"
    ),
    "other batches on each rank": Change(
        partial(undivided, batch_size=2),
        partial(undivided, batch_size=3),
        "another length",
        options=UNDIVIDED,
    ),
    "a state for a sampler": Change(divided_by_strategy, stateful, "another kind"),
    "two loaders for one": Change(
        divided_by_strategy, two_loaders, "began with 1 training loaders, and there are 2 now"
    ),
    "another number of ranks for a loader with a state": Change(
        stateful, stateful, "another number of ranks", ranks=1
    ),
    # Of the 7 samples that are left, rank 0 would have 3 in two batches, and the others 2 in
    # one batch.
    "an epoch that would be uneven on more ranks": Change(
        exact, exact, "another number of ranks", ranks=3
    ),
    # The shorter of two loaders has begun again, and each rank has another number of batches
    # of it than it knows.
    "uneven loaders": Change(
        uneven_loaders,
        uneven_loaders,
        BEGUN_AGAIN,
        options={"strategy": {"uneven_inputs": "stop_at_shortest"}, **UNDIVIDED},
    ),
    "another number of ranks for the user's sampler": Change(
        divided_by_user,
        divided_by_user,
        "another number of ranks",
        ranks=1,
        options=UNDIVIDED,
    ),
}


def training_on(
    rank: int, world_size: int, directory: Path, loaders: continuing.Loaders, **options: Any
) -> continuing.Training:
    """Return two epochs of training, whose weights draw no random numbers.

    The options are the Trainer's; ``strategy`` holds those of the strategy.
    """
    strategy = options.pop("strategy", {})
    options = {"max_epochs": 2, "model": continuing.WITHOUT_DROPOUT, **options}
    return continuing.Training(
        lambda: loaders(rank, world_size), directory, world_size, options, strategy
    )


def save_at(
    rank: int,
    world_size: int,
    directory: Path,
    loaders: continuing.Loaders,
    point: str,
    **options: Any,
) -> str:
    """Return the checkpoint of a run at a point."""
    return training_on(rank, world_size, directory, loaders, **options).run(point).saved[point]


def resume_from(
    rank: int,
    world_size: int,
    directory: Path,
    loaders: continuing.Loaders,
    path: str,
    **options: Any,
) -> continuing.Resumed:
    return continuing.resume(training_on(rank, world_size, directory, loaders, **options), path)


def resume_beside_whole(
    rank: int,
    world_size: int,
    directory: Path,
    loaders: continuing.Loaders,
    path: str,
    **options: Any,
) -> tuple[continuing.Run, continuing.Resumed]:
    """Return a run from the beginning, and a resumed one."""
    training = training_on(rank, world_size, directory, loaders, **options)
    return training.run(), continuing.resume(training, path)


@pytest.mark.parametrize("name", CHANGES)
def test_an_epoch_that_cannot_continue_starts_again(name: str, tmp_path: Path) -> None:
    """Each rank trains on the whole epoch, and rank 0 warns once, with reason and remedy."""
    change = CHANGES[name]
    path, _ = run_ranks(save_at, 2, tmp_path, change.before, LATER, **change.options)
    place = tmp_path / "resumed"
    options = {"env": by_hand_env(change.ranks), **change.options}
    by_rank = run_ranks(resume_beside_whole, change.ranks, place, change.after, path, **options)
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
        if change.before is not by_the_clock:
            assert sorted(continuing.samples_of(steps)) == sorted(
                continuing.samples_of(second_epoch)
            )
        assert resumed.run.counts.optimiser_steps == 6 + len(second_epoch)


# Checkpoints that one rank saved alone, because another one was killed.


def train_to_kill(rank: int, world_size: int, directory: Path, loaders: continuing.Loaders) -> None:
    """Train until rank 1 is killed in its third step, after which rank 0 saves alone."""
    kill = Kill("on_after_backward", earlier=2)
    options = {
        "callbacks": [kill.callback()],
        "max_epochs": 1,
        "strategy": {"stop_checkpoint": str(directory / "alone.ckpt")},
        **UNDIVIDED,
    }
    training_on(rank, world_size, directory, loaders, **options).run()


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
    launch_ranks(train_to_kill, 2, tmp_path, before)
    place = tmp_path / "resumed"
    path = str(tmp_path / "alone.ckpt")
    first, second = run_ranks(resume_from, 2, place, after, path, max_epochs=1, **UNDIVIDED)
    assert [step.batch for step in first.run.steps] == [0, 1, 2, 3]
    assert [step.batch for step in second.run.steps] == [0, 1, 2, 3]
    [warning] = first.warned
    assert all(part in warning for part in parts)
    assert second.warned == []


# An epoch that continues.


def resume_in_threes(
    rank: int, world_size: int, directory: Path
) -> tuple[list[int], list[list[int]]]:
    """Resume after two batches of two samples, with batches of three.

    Return the samples of the whole epoch, and those of each batch of the resumed run.
    """
    training = training_on(rank, world_size, directory, divided_by_strategy, max_epochs=1)
    whole = training.run("train_batch_end-2")
    training.loaders = lambda: DataLoader(continuing.Numbers(SAMPLES), 3, shuffle=True)
    resumed = training.run(ckpt_path=whole.saved["train_batch_end-2"])
    return continuing.samples_of(whole.steps), [list(step.samples) for step in resumed.steps]


def test_the_rest_of_an_epoch_can_be_read_in_other_batches(tmp_path: Path) -> None:
    """The samples that the strategy divides are the remaining ones, in the same order."""
    for whole, batches in run_ranks(resume_in_threes, 2, tmp_path):
        assert batches == [whole[4:7], whole[7:]]


def resume_with_lower_limit(rank: int, world_size: int, directory: Path) -> list[continuing.Step]:
    """Return the steps of a run that resumes after six batches, with a limit of four."""
    loaders = partial(divided_by_strategy, samples=40)
    options = {"accumulate_grad_batches": 2, "limit_train_batches": 8}
    training = training_on(rank, world_size, directory, loaders, **options)
    whole = training.run("train_batch_end-6")
    resumed = training.run(ckpt_path=whole.saved["train_batch_end-6"], limit_train_batches=4)
    assert continuing.samples_of(resumed.steps[:2]) == continuing.samples_of(whole.steps[6:8])
    return resumed.steps


def test_an_epoch_beyond_its_limit_ends_after_one_step(tmp_path: Path) -> None:
    """It does not have as many batches again."""
    for steps in run_ranks(resume_with_lower_limit, 2, tmp_path):
        assert [step.moment for step in steps] == [(0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]


TWENTY_FOUR = partial(divided_by_strategy, samples=24)


def resume_twice(
    rank: int, world_size: int, directory: Path, path: str
) -> list[tuple[list[int], Tensor]]:
    """Resume, and resume a checkpoint that a callback saves before the first batch.

    Return the samples and weights of both runs.
    """
    training = training_on(
        rank, world_size, directory, TWENTY_FOUR, max_epochs=1, model=continuing.Net
    )
    first = training.run("train_start-2", ckpt_path=path)
    second = training.run(ckpt_path=first.saved["train_start-2"])
    return [(continuing.samples_of(run.steps), run.weights) for run in (first, second)]


def test_a_resumed_run_can_be_saved_before_its_first_batch(tmp_path: Path) -> None:
    """The file has the place and the random numbers of the one that was resumed."""
    path, _ = run_ranks(
        save_at, 2, tmp_path, TWENTY_FOUR, "train_batch_end-2", max_epochs=1, model=continuing.Net
    )
    for ranks in (1, 2):
        place = tmp_path / str(ranks)
        place.mkdir()
        for first, second in run_ranks(resume_twice, ranks, place, path, env=by_hand_env(ranks)):
            assert len(first[0]) == 16 // ranks
            assert first[0] == second[0]
            assert first[1].equal(second[1])


IN_PAIRS = {"max_epochs": 1, "accumulate_grad_batches": 2, "limit_val_batches": 1.0}


def test_the_last_batch_of_an_epoch_is_a_step_on_fewer_ranks(tmp_path: Path) -> None:
    """Its gradients are not left over for the next epoch, and the epoch is validated."""
    # After the first optimiser step, 12 of 24 samples are read.
    path, *_ = run_ranks(
        save_at, 3, tmp_path, TWENTY_FOUR, "train_batch_end-2", env=by_hand_env(3), **IN_PAIRS
    )
    for run, _ in run_ranks(resume_from, 2, tmp_path, TWENTY_FOUR, path, **IN_PAIRS):
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
