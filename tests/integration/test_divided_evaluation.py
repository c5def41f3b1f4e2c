"""An evaluation in which users divide the samples, or in which samples cannot or must not
count once.

Values of samples that users divide are those of one process; evaluations in which samples
do not count once are stock's.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torchmetrics.classification import BinaryAUROC

from lightning_ddp_ext import RankFailedError
from tests.harness.ranks import run_ranks
from tests.harness.training import (
    Kind,
    Streamed,
    assert_same,
    make_strategy,
    make_trainer,
    on_both,
    raised,
)

# Samples that the user divides.


class Scorer(L.LightningModule):
    """Logs a metric of each loader, and values, at the end of an epoch. Samples are numbers.

    Attributes:
        samples: those of each batch that this rank evaluated, by loader.
    """

    def __init__(self, loaders: int = 1) -> None:
        super().__init__()
        self.aurocs = nn.ModuleList(BinaryAUROC() for _ in range(loaders))
        self.samples: dict[int, list[list[int]]] = {number: [] for number in range(loaders)}

    def validation_step(self, numbers: Tensor, index: int, dataloader_idx: int = 0) -> None:
        scores = (numbers * 0.254) % 1  # each sample that counts twice changes the metric
        auroc: Any = self.aurocs[dataloader_idx]
        auroc.update(scores, numbers % 2)
        self.log(f"auroc {dataloader_idx}", auroc)
        log = partial(self.log, sync_dist=True, batch_size=len(numbers))
        log("mean", scores.mean())
        log("greatest", scores.max(), reduce_fx="max")
        self.samples[dataloader_idx].append(numbers.tolist())


def loader(samples: int, batch_size: int = 1, **options: Any) -> DataLoader[Any]:
    return DataLoader(range(samples), batch_size, **options)


def sampled(samples: int, rank: int, world_size: int) -> DataLoader[Any]:
    return loader(samples, sampler=range(rank, samples, world_size))


def streamed(samples: int, rank: int, world_size: int) -> DataLoader[Any]:
    return DataLoader(Streamed(range(rank, samples, world_size)), 2)


def unsized(samples: int, rank: int, world_size: int) -> DataLoader[Any]:
    own = range(rank, samples, world_size)
    return loader(samples, batch_sampler=iter([own[:1], own[1:]]))  # has no length


# Loaders of a rank's part of so many samples, and the sizes of the batches that each of
# three ranks evaluates.
DIVISIONS: list[tuple[Callable[[int, int, int], DataLoader[Any]], int, list[list[int]]]] = [
    (sampled, 5, [[1, 1], [1, 1], [1]]),
    (sampled, 4, [[1, 1], [1], [1]]),
    (streamed, 7, [[2, 1], [2], [2]]),
    (streamed, 9, [[2, 1], [2, 1], [2, 1]]),
    (unsized, 9, [[1, 2], [1, 2], [1, 2]]),
]


def undivided_trainer(world_size: int, directory: Path) -> L.Trainer:
    return make_trainer(
        make_strategy("ours", directory) if world_size > 1 else "auto",
        devices=world_size,
        use_distributed_sampler=False,
    )


def divide(rank: int, world_size: int, directory: Path) -> tuple[Any, list[list[int]]]:
    """Evaluate this rank's part of each loader; return what was logged, and the sizes of
    this rank's batches by loader.
    """
    loaders = [make(samples, rank, world_size) for make, samples, _ in DIVISIONS]
    model = Scorer(len(loaders))
    trainer = undivided_trainer(world_size, directory)
    trainer.validate(model, loaders, verbose=False)
    return (
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        [[len(batch) for batch in batches] for batches in model.samples.values()],
    )


def test_ranks_with_different_numbers_of_batches_log_what_one_process_logs(
    tmp_path: Path,
) -> None:
    """Each rank evaluates its own batches, and values are those of all samples."""
    [(alone, _)] = run_ranks(divide, 1, tmp_path)
    for rank, (logged, sizes) in enumerate(run_ranks(divide, 3, tmp_path)):
        assert logged == pytest.approx(alone, rel=1e-6)
        assert sizes == [sizes_by_rank[rank] for _, _, sizes_by_rank in DIVISIONS]


def evaluate_one_sample(
    rank: int, world_size: int, directory: Path
) -> tuple[type[BaseException], str]:
    """Evaluate data of which only rank 0 has a sample; return the error's type and text."""
    trainer = undivided_trainer(world_size, directory)
    error = raised(
        Exception, trainer.validate, Scorer(), sampled(1, rank, world_size), verbose=False
    )
    return type(error), str(error)


def test_a_rank_whose_loader_has_no_batch_ends_the_evaluation(tmp_path: Path) -> None:
    """This rank raises stock's error; the other one names it with this cause."""
    (kind, message), (kind_on_rank_1, _) = run_ranks(evaluate_one_sample, 2, tmp_path)
    assert kind is RankFailedError
    assert message.startswith("rank 1 (host ")
    assert "Please make sure that it returns at least 1 batch" in message
    assert kind_on_rank_1 is RuntimeError


# Samples that cannot or must not count once.


class Ragged(BatchSampler):
    """A user's batch sampler: each of three batches is larger than the one before."""

    def __iter__(self) -> Iterator[list[int]]:
        samples = list(self.sampler)
        return iter([samples[:1], samples[1:3], samples[3:]])

    def __len__(self) -> int:
        return 3


class Pulls(Scorer):
    """Takes batches from an iterator."""

    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:
        batch, _, _ = next(dataloader_iter)
        super().validation_step(batch, 0)


class Pairs(Scorer):
    """Takes batches of two loaders, of which one may have ended."""

    def __init__(self) -> None:
        super().__init__(loaders=2)

    def validation_step(self, batches: Any, index: int) -> None:
        for number, batch in enumerate(batches):
            if batch is not None:
                super().validation_step(batch, index, number)


def combined(mode: Any) -> CombinedLoader:
    return CombinedLoader([loader(11, 2), loader(5, 2)], mode)


class Uncounted(NamedTuple):
    """What a rank reads, the model, and options of the Trainer and of our strategy."""

    loaders: Callable[[int], Any]
    model: type[Scorer] = Scorer
    options: Mapping[str, Any] = {}
    strategy: Mapping[str, Any] = {}


UNCOUNTED = {
    "min_size": Uncounted(lambda rank: combined("min_size"), Pairs),
    "max_size": Uncounted(lambda rank: combined("max_size"), Pairs, {"limit_val_batches": 1}),
    "max_size_cycle": Uncounted(
        lambda rank: combined("max_size_cycle"), Pairs, {"fast_dev_run": True}
    ),
    "dataloader_iter": Uncounted(lambda rank: loader(5, 2), Pulls),
    "drop_last": Uncounted(lambda rank: loader(9, 2, drop_last=True)),
    "the user's batches": Uncounted(
        lambda rank: loader(13, batch_sampler=Ragged(range(13), 2, False))
    ),
    "a sampler that repeats": Uncounted(
        lambda rank: loader(5, sampler=DistributedSampler(range(5), 2, rank, shuffle=False))
    ),
    "exact_evaluation=False": Uncounted(
        lambda rank: loader(5, 2), strategy={"exact_evaluation": False}
    ),
}


def evaluate_uncounted(kind: Kind, directory: Path) -> dict[str, tuple[Any, Any]]:
    """Return what each evaluation logged, and the samples of this rank's batches."""
    evaluated = {}
    for name, case in UNCOUNTED.items():
        model = case.model()
        strategy = make_strategy(kind, directory, **case.strategy if kind == "ours" else {})
        trainer = make_trainer(strategy, **case.options)
        evaluated[name] = (
            trainer.validate(model, case.loaders(trainer.global_rank), verbose=False),
            model.samples,
        )
    return evaluated


def test_evaluations_that_do_not_count_samples_once_are_stocks(tmp_path: Path) -> None:
    """Values, samples and batches are stock's on each rank."""
    ours, stock = on_both(evaluate_uncounted, tmp_path)
    assert_same(ours, stock)
