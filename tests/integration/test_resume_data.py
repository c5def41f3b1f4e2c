"""A checkpoint from the middle of an epoch: ``resume_data`` continues exactly, from the
epoch's start, or as stock.
"""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext.errors import ResumeError
from tests.harness import ranks
from tests.harness.training import Kind, assert_same, on_both, on_ranks
from tests.integration import continuing


def sixteen(rank: int, world_size: int) -> DataLoader[Any]:
    return DataLoader(continuing.Numbers(16), 2, shuffle=True)


def two(rank: int, world_size: int) -> CombinedLoader:
    return CombinedLoader(
        [DataLoader(continuing.Numbers(number), 2, shuffle=True) for number in (16, 24)],
        "max_size_cycle",
    )


def stateful(number: int = 16, **options: Any) -> continuing.Loaders:
    return lambda rank, world_size: StatefulDataLoader(
        continuing.Numbers(number), batch_size=2, shuffle=True, **options
    )


def stateful_stream(rank: int, world_size: int) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(continuing.Stream(9, rank), batch_size=2)


def weighted(replacement: bool) -> continuing.Loaders:
    sampler = WeightedRandomSampler([1.0] * 16, 16, replacement)
    return lambda rank, world_size: DataLoader(continuing.Numbers(16), 2, sampler=sampler)


def plain(*chosen: Any, **options: Any) -> continuing.Loaders:
    """Of a sampler of torch's that is left to each rank."""
    return lambda rank, world_size: DataLoader(continuing.Numbers(8), *chosen, **options)


def batched(size: int) -> continuing.Loaders:
    return plain(batch_sampler=BatchSampler(SequentialSampler(range(8)), size, drop_last=False))


def other_on_rank_one(rank: int, world_size: int) -> DataLoader[Any]:
    return DataLoader(
        continuing.Numbers(8),
        batch_sampler=BatchSampler(SequentialSampler(range(8)), 2, drop_last=rank == 1),
    )


class Change(NamedTuple):
    """The data of two ranks that save in their second epoch, and those of the ranks that
    resume.
    """

    before: continuing.Loaders
    after: continuing.Loaders
    message: str = 'resume_data="epoch"'  # in the error
    ranks: int = 2  # that resume
    batches: int = 4  # of an epoch before
    is_divided: bool = True  # by the strategy


CHANGES = {
    "more samples": Change(sixteen, continuing.sampled("lightning's", 28)),
    "more samples that each rank deals out to itself": Change(
        continuing.sampled("plain", 16), continuing.sampled("plain", 28), is_divided=False
    ),
    "more samples of a loader with a state": Change(stateful(), stateful(28)),
    "a shorter stream": Change(continuing.stream(9), continuing.stream(2), batches=5),
    "more workers of a stream": Change(
        continuing.stream(8, **continuing.workers(1)),
        continuing.stream(8, **continuing.workers(2)),
        "had num_workers=1 when the checkpoint was saved, and now has 2; resume with",
    ),
    "workers of a loader with a state": Change(stateful(), stateful(**continuing.workers())),
    "another order on each rank": Change(plain(2, shuffle=True), plain(2), is_divided=False),
    "other batches on each rank": Change(batched(2), batched(3), is_divided=False),
    "another sampler on rank 1": Change(batched(2), other_on_rank_one, is_divided=False),
    "another draw by weight": Change(weighted(True), weighted(False)),
    "two loaders for one": Change(sixteen, two),
    "another number of ranks": Change(
        stateful(),
        stateful(),
        "had ranks=2 when the checkpoint was saved, and now has 1; resume with",
        ranks=1,
    ),
}
BEGUN = (
    "more samples",
    "a shorter stream",
    "workers of a loader with a state",
    "two loaders for one",
    "another number of ranks",
)


def training_on(
    directory: Path,
    devices: int,
    loaders: continuing.Loaders,
    *,
    is_divided: bool = True,
    side: Kind = "ours",
) -> continuing.Training:
    options = {"max_epochs": 2, "dropout": False, "use_distributed_sampler": is_divided}
    rank = int(os.environ["RANK"])
    return continuing.Training(
        lambda: loaders(rank, devices), directory, devices, options, side=side
    )


def save_in_second_epoch(rank: int, world_size: int, directory: Path, name: str) -> str:
    """Return the checkpoint after two steps of epoch 1."""
    change = CHANGES[name]
    point = f"train_batch_end-{change.batches + 2}"
    run = training_on(directory, 2, change.before, is_divided=change.is_divided)
    return run.run(point).saved[point]


def resume_changed(rank: int, world_size: int, directory: Path, name: str, path: str) -> str:
    """Return the error."""
    change = CHANGES[name]
    run = training_on(directory, world_size, change.after, is_divided=change.is_divided)
    with pytest.raises(ResumeError) as refused:
        run.run(ckpt_path=path)
    return str(refused.value)


def on_changed_ranks(function: Callable[..., Any], directory: Path, name: str) -> list[Any]:
    """Save on two ranks, and call the function on those that resume."""
    path, _ = ranks.run_ranks(save_in_second_epoch, 2, directory, name)
    resumed = CHANGES[name].ranks
    (directory / "resumed").mkdir()
    env = ranks.by_hand_env(resumed)
    return ranks.run_ranks(function, resumed, directory / "resumed", name, path, env=env)


@pytest.mark.parametrize("name", CHANGES)
def test_an_epoch_that_cannot_be_continued_is_refused(name: str, tmp_path: Path) -> None:
    """Every rank's error names ``resume_data="epoch"``, and what has changed."""
    for message in on_changed_ranks(resume_changed, tmp_path, name):
        assert 'resume_data="epoch"' in message
        assert CHANGES[name].message in message


def begin_anew(
    rank: int, world_size: int, directory: Path, name: str, path: str
) -> tuple[continuing.Run, continuing.Run]:
    """Return a run from the beginning, and one that begins the checkpoint's epoch anew."""
    run = training_on(directory, world_size, CHANGES[name].after)
    whole = run.run()
    run.strategy = {"resume_data": "epoch"}
    return whole, run.run(ckpt_path=path)


@pytest.mark.parametrize("name", BEGUN)
def test_an_epoch_that_cannot_be_continued_can_be_begun_anew(name: str, tmp_path: Path) -> None:
    """With ``resume_data="epoch"`` a run trains on the whole epoch again."""
    done = CHANGES[name].batches + 2
    for whole, begun in on_changed_ranks(begin_anew, tmp_path, name):
        second_epoch = [step for step in whole.steps if step.epoch == 1]
        assert begun.steps == second_epoch
        optimiser_steps, *_ = begun.counts
        assert optimiser_steps == done + len(second_epoch)


def save_points(
    kind: Kind, directory: Path, loaders: continuing.Loaders, *points: continuing.Point
) -> list[str]:
    return list(training_on(directory, 2, loaders, side=kind).run(*points).saved.values())


def resume_points(
    kind: Kind, directory: Path, loaders: continuing.Loaders, paths: list[str]
) -> tuple[list[continuing.Run], list[str]]:
    """Return runs, and the warnings that an epoch starts again."""
    run = training_on(directory, 2, loaders, side=kind)
    run.strategy = {"resume_data": "stock"} if kind == "ours" and loaders is sixteen else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs = [run.run(ckpt_path=path, dropout=True) for path in paths]
    return runs, [text for each in caught if "so that epoch starts" in (text := str(each.message))]


def test_data_and_random_numbers_can_be_left_to_stock(tmp_path: Path) -> None:
    """With ``resume_data="stock"`` a resumed run reads what it reads with stock, and
    draws the same random numbers.
    """
    (tmp_path / "saved").mkdir()
    paths = on_ranks(
        "ours", save_points, tmp_path / "saved", sixteen, "train_batch_end-2", "train_epoch_end-4"
    )[0]
    for (mine, _), (expected, _) in zip(
        *on_both(resume_points, tmp_path, sixteen, paths), strict=True
    ):
        assert [run.steps for run in mine] == [run.steps for run in expected]
        assert_same([run.weights for run in mine], [run.weights for run in expected])


def test_a_checkpoint_of_stock_lightning_begins_the_epoch_again(tmp_path: Path) -> None:
    """It does not record the positions of other ranks; rank 0 warns, and every rank
    reads its own data.
    """
    paths, _ = on_ranks("stock", save_points, tmp_path, stateful_stream, "train_batch_end-2")
    (first, warned), (second, silent) = on_ranks(
        "ours", resume_points, tmp_path, stateful_stream, paths
    )
    assert warned == ["the checkpoint has no data position in epoch 0, so that epoch starts again"]
    assert silent == []
    for (run,), numbers in ((first, range(9)), (second, range(1000, 1009))):
        first_epoch = [step for step in run.steps if step.epoch == 0]
        assert continuing.samples_of(first_epoch) == [*numbers]


def test_a_data_position_of_another_release_begins_the_epoch_again(tmp_path: Path) -> None:
    """Rank 0 warns, and names the version of the position and the one that it reads."""
    paths, _ = on_ranks("ours", save_points, tmp_path, stateful_stream, "train_batch_end-2")
    checkpoint = torch.load(paths[0], weights_only=False)
    checkpoint["lightning_ddp_ext"]["version"] = 5
    torch.save(checkpoint, paths[0])
    (_, warned), _ = on_ranks("ours", resume_points, tmp_path, stateful_stream, paths)
    assert warned == [
        "the checkpoint's data position in epoch 0 has version 5, but this release reads version 7,"
        " so that epoch starts again"
    ]


def two_loaders(mode: Any) -> CombinedLoader:
    """Return two loaders, of which the first one ends after four batches."""
    own = torch.Generator().manual_seed(20)
    return CombinedLoader(
        [
            DataLoader(continuing.Numbers(8), 2, shuffle=True),
            DataLoader(continuing.Numbers(20), 2, shuffle=True, generator=own),
        ],
        mode,
    )


def resume_two_loaders(
    rank: int, world_size: int, directory: Path, mode: str, done: int
) -> list[list[continuing.Step]]:
    """Return the steps from the last optimiser step on, which has two batches, without a
    stop and resumed.
    """
    options = {"use_distributed_sampler": False, "accumulate_grad_batches": 2}
    runs = continuing.Training(lambda: two_loaders(mode), directory, world_size, options)
    point = f"train_batch_end-{done}"
    whole = runs.run(point)
    return [whole.steps[done - 1 :], runs.run(ckpt_path=whole.saved[point]).steps]


@pytest.mark.parametrize(("mode", "done"), [("max_size", 7), ("max_size_cycle", 5)])
def test_a_loader_that_is_longer_than_the_first_one_continues(
    mode: str, done: int, tmp_path: Path
) -> None:
    """The run resumes at an optimiser step that begins after the first loader's end."""
    [[expected, resumed]] = ranks.run_ranks(resume_two_loaders, 1, tmp_path, mode, done)
    assert resumed == expected


def resume_twice(rank: int, world_size: int, directory: Path) -> list[int]:
    """Return how often Lightning warns of a resume within an epoch that continues, and
    of one that does not.
    """
    run = training_on(directory, 2, sixteen)
    path = run.run("train_batch_end-2").saved["train_batch_end-2"]
    found = []
    before = list(warnings.filters)
    for data in ("exact", "stock"):
        run.strategy = {"resume_data": data}
        with warnings.catch_warnings(record=True) as caught:
            run.run(ckpt_path=path)
            assert warnings.filters == before
        found.append(
            sum(
                "checkpoint that ended before the epoch ended" in str(each.message)
                for each in caught
            )
        )
    return found


def test_lightnings_warning_is_hidden_only_where_an_epoch_continues(tmp_path: Path) -> None:
    """No filter remains after a run, so a later run without our resume shows
    Lightning's warning.
    """
    assert ranks.run_ranks(resume_twice, 2, tmp_path) == [[0, 1], [0, 0]]


class Resumed(NamedTuple):
    """A resumed run, and the warnings about the resume."""

    run: continuing.Run
    warned: list[str]


def resume_recorded(training: continuing.Training, path: str) -> Resumed:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = training.run(ckpt_path=path)
    texts = [str(each.message) for each in caught]
    return Resumed(run, [text for text in texts if "resume" in text])


def resume_exception(rank: int, world_size: int, directory: Path, shuffle: bool) -> Resumed:
    """Resume an epoch of six batches whose fourth one has raised."""
    options = {"use_distributed_sampler": False, "max_epochs": 1}
    runs = continuing.Training(
        lambda: DataLoader(continuing.Numbers(12), 2, shuffle=shuffle), directory, 2, options
    )
    path = runs.run("exception-3", fail_at=(0, 3)).saved["exception-3"]
    return resume_recorded(runs, path)


def test_an_order_that_cannot_be_restored_starts_again(tmp_path: Path) -> None:
    """A checkpoint of an exception has no random numbers, so an epoch whose order was
    drawn from them starts again.
    """
    first, second = ranks.run_ranks(resume_exception, 2, tmp_path, True)
    [warning] = first.warned
    assert warning.startswith(
        "epoch 0 cannot be resumed in the middle: BatchSampler over RandomSampler on ranks 0, 1"
        " does not yield"
    )
    assert len(first.run.steps) == 6
    assert second.warned == []


def test_a_fixed_order_continues_after_an_exception(tmp_path: Path) -> None:
    """The run reads the three batches that are left."""
    for resumed in ranks.run_ranks(resume_exception, 2, tmp_path, False):
        assert resumed.warned == []
        assert len(resumed.run.steps) == 3


# Orders that nothing but the run itself determines.

CLOCK = itertools.count()  # shows another time whenever it is read


class Counting(IterableDataset[Tensor]):
    """Counts its epochs itself, and shuffles this rank's numbers by that count, as
    WebDataset's ``detshuffle`` does.
    """

    def __init__(self, rank: int) -> None:
        self.numbers = range(100 * rank, 100 * rank + 24)
        self.epoch = -1

    def __iter__(self) -> Iterator[Tensor]:
        self.epoch += 1
        return self.shuffled(random.Random(self.epoch))

    def shuffled(self, chance: Any) -> Iterator[Tensor]:
        return iter(torch.tensor([chance.sample(self.numbers, 24)]).float().T)


class Clocked(Counting):
    """Shuffles by the clock, as WebDataset's ``shuffle`` does."""

    def __iter__(self) -> Iterator[Tensor]:
        return self.shuffled(random.Random(next(CLOCK)))


class Buffered(Counting):
    """Shuffles by a buffer, from Python's global generator, while it is read."""

    def __iter__(self) -> Iterator[Tensor]:
        left = list(self.numbers)
        while left:
            yield torch.tensor([float(left.pop(random.randrange(min(8, len(left)))))])


class Sampled(Sampler[int]):
    """Draws the order of a stream of one of these classes."""

    def __init__(self, stream: Counting) -> None:
        self.stream = stream

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        return (int(number) for number in self.stream)


class Split(IntEnum):
    TRAIN = 1


def unusual_batch(rows: list[Tensor]) -> dict[str, Any]:
    """Return a batch with Python's numbers, and with values whose content is hard to
    read.
    """
    return {
        "split": Split.TRAIN,
        "ragged": torch.nested.nested_tensor(rows),
        "numbers": [float(row) for row in rows],
    }


class Mixing(continuing.Net):
    """Draws from Python's global generator in each step, as mixup does."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        random.random()
        return super().training_step(
            torch.tensor([batch["numbers"]]).T if isinstance(batch, dict) else batch, index
        )


def own_order(stream: Any, rank: int) -> DataLoader[Any]:
    return DataLoader(continuing.Numbers(24), 2, sampler=Sampled(stream(0)))


class Unknown(NamedTuple):
    """Loaders of a rank, whose epoch of 24 samples has twelve batches of two."""

    make: Callable[[int], Any]
    batches: int = 12
    accumulation: int = 1
    is_divided: bool = False  # by the strategy


STREAMS: dict[str, type[Counting]] = {
    "counting": Counting,
    "clocked": Clocked,
    "buffered": Buffered,
}


def streamed(stream: type[Counting], rank: int) -> DataLoader[Any]:
    return DataLoader(stream(rank), 2)


UNKNOWN = {
    **{name: Unknown(partial(streamed, stream)) for name, stream in STREAMS.items()},
    "clocked, unusual": Unknown(
        lambda rank: DataLoader(Clocked(rank), 2, collate_fn=unusual_batch)
    ),
    "sampler that counts": Unknown(partial(own_order, Counting)),
    "sampler that draws late": Unknown(partial(own_order, Buffered)),
    "divided sampler that counts": Unknown(
        partial(own_order, Counting), batches=6, is_divided=True
    ),
    "two streams": Unknown(
        lambda rank: [DataLoader(continuing.Numbers(24), 2), DataLoader(Clocked(rank), 2)]
    ),
    "stateful loader": Unknown(lambda rank: StatefulDataLoader(Buffered(rank), 2), accumulation=2),
}


class Restarted(NamedTuple):
    """A run that resumed in the middle of its second epoch, and one that was told to
    repeat the epoch.
    """

    resumed: Resumed
    repeated: continuing.Run


def resume_unknown_order(rank: int, world_size: int, directory: Path, name: str) -> Restarted:
    case = UNKNOWN[name]
    options = {
        "max_epochs": 2,
        "use_distributed_sampler": case.is_divided,
        "accumulate_grad_batches": case.accumulation,
        "model": Mixing,
    }
    runs = continuing.Training(lambda: case.make(rank), directory, 2, options)
    point = f"train_batch_end-{case.batches + 5}"
    path = runs.run(point).saved[point]
    resumed = resume_recorded(runs, path)
    runs.strategy = {"resume_data": "epoch"}
    repeated = runs.run(ckpt_path=path)
    runs.strategy = {"resume_data": "strict"}
    with pytest.raises(ResumeError, match="does not yield"):
        runs.run(ckpt_path=path)
    return Restarted(resumed, repeated)


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_epoch_whose_order_cannot_be_drawn_again_starts_again(name: str, tmp_path: Path) -> None:
    """The run reads each sample of that epoch once, as with ``resume_data="epoch"``,
    and rank 0 warns.
    """
    by_rank = ranks.run_ranks(resume_unknown_order, 2, tmp_path, name)
    for rank, (resumed, repeated) in enumerate(by_rank):
        steps = resumed.run.steps
        assert [step.moment for step in steps] == [
            (1, batch) for batch in range(UNKNOWN[name].batches)
        ]
        assert resumed.run.counts == repeated.counts
        assert resumed.run.events == repeated.events
        if name in STREAMS:
            own = range(100 * rank, 100 * rank + 24)
            assert sorted(continuing.samples_of(steps)) == [*own]
    [warning] = by_rank[0].resumed.warned
    assert "does not yield" in warning
    assert "so that epoch starts again" in warning
    assert by_rank[1].resumed.warned == []
