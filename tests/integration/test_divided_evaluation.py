"""Evaluation of data that users limit or divide among ranks: each rank evaluates its
part, and values are those of all samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import CatMetric

from lightning_ddp_ext.errors import RankAbsentError, RankFailedError
from tests.harness.ranks import run_ranks
from tests.integration.evaluating import AtTheEnd, Batch, Ragged, loader, make_on, scores


class Gathers(AtTheEnd):
    """Gathers the indices that all ranks evaluated."""

    def __init__(self, loaders: int) -> None:
        super().__init__(loaders)
        self.indices = nn.ModuleList(CatMetric() for _ in range(loaders))

    def validation_step(self, batch: Batch, index: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, index, dataloader_idx)
        indices: Any = self.indices[dataloader_idx]
        indices.update(batch["index"])


@dataclass
class Chosen:
    """What an evaluation read by the user's choice, and the mean that it logged."""

    sizes: list[int]  # of this rank's batches
    seen: list[list[int]]  # the indices on all ranks, by loader
    mean: float | None  # of one loader


def validate(trainer: L.Trainer, *loaders: Any) -> Chosen:
    model = Gathers(len(loaders))
    trainer.validate(model, list(loaders), verbose=False)
    mean = trainer.callback_metrics.get("mean")
    return Chosen(
        sizes=[len(indices) for indices in model.seen],
        seen=[each.compute().int().sort().values.tolist() for each in model.indices],  # type: ignore[operator]
        mean=None if mean is None else float(mean),
    )


def choose(rank: int, world_size: int, directory: Path) -> dict[str, Chosen]:
    """Evaluate otherwise than each sample once, by the user's choice."""

    def trainer(**options: Any) -> L.Trainer:
        return make_on(world_size, directory, **options)

    own = DistributedSampler(range(4), world_size, rank, shuffle=False)  # type: ignore[arg-type]
    return {
        "two batches": validate(trainer(limit_val_batches=2), loader(19, 3), loader(7)),
        "three quarters": validate(trainer(limit_val_batches=0.75), loader(19, 3), loader(7)),
        "drop_last": validate(trainer(), loader(16, 3, drop_last=True)),
        "own sampler": validate(trainer(), loader(4, sampler=own)),
        "stock's sampler": validate(trainer(exact_evaluation=False), loader(4, 2)),
    }


def test_limits_and_samplers_that_repeat_can_be_chosen(tmp_path: Path) -> None:
    """A limit leaves each rank that many batches.

    ``drop_last``, the user's own sampler or stock's repeat samples.
    """
    padded = [0, 0, 1, 1, 2, 3]
    mean = sum(float(scores(4)[index]["x"]) for index in padded) / len(padded)
    for found in run_ranks(choose, 3, tmp_path):
        for limit in ("two batches", "three quarters"):
            assert found[limit].sizes == [3, 3, 1, 1]
            assert found[limit].seen == [list(range(18)), list(range(6))]
        assert found["drop_last"].sizes == [3, 3]
        assert found["drop_last"].seen == [sorted([0, 1, *range(16)])]
        assert found["own sampler"].seen == [padded]
        assert found["stock's sampler"].seen == [padded]
        assert found["stock's sampler"].mean == pytest.approx(mean, rel=1e-6)


class Dealt(DistributedSampler[Any]):
    """A user's sampler for several ranks that repeats nothing, so that some have more
    samples or none.
    """

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]


class Part(IterableDataset[Any]):
    """A stream of a rank's part of the samples, without a length."""

    def __init__(self, samples: int, rank: int, world_size: int) -> None:
        self.samples = samples
        self.part = slice(rank, None, world_size)

    def __iter__(self) -> Iterator[Any]:
        return iter(scores(self.samples)[self.part])


class Unsized(Ragged):
    """Has no length."""

    __len__ = None  # type: ignore[assignment]


@dataclass
class Divided:
    """What an evaluation logged, and the sizes of this rank's batches."""

    logged: dict[str, float]
    sizes: list[int]


def divide(rank: int, world_size: int, directory: Path) -> dict[str, Divided]:
    """Evaluate data that the user divides, so that ranks have other numbers of batches."""
    trainer = make_on(world_size, directory, use_distributed_sampler=False)
    own = trainer.global_rank
    loaders: dict[str, list[DataLoader[Any]]] = {
        "sampler": [loader(n, 1, sampler=Dealt(scores(n), world_size, own)) for n in (5, 4)],
        "stream": [DataLoader(Part(n, own, world_size), 2) for n in (7, 9)],
        "without length": [
            DataLoader(scores(9), batch_sampler=Unsized(range(own, 9, world_size), 2, False))
        ],
    }
    found = {}
    for name, each in loaders.items():
        model = AtTheEnd(len(each))
        logged = {
            key: value
            for values in trainer.validate(model, each, verbose=False)
            for key, value in values.items()
        }
        found[name] = Divided(logged, [len(indices) for indices in model.seen])
    return found


def test_ranks_that_have_other_numbers_of_batches(tmp_path: Path) -> None:
    """Each rank evaluates its own batches, and values are those of all samples."""
    (one,) = run_ranks(divide, 1, tmp_path)
    ranks = run_ranks(divide, 3, tmp_path)
    for found in ranks:
        for name, alone in one.items():
            assert found[name].logged == pytest.approx(alone.logged, rel=1e-6), name
    assert {name: [found[name].sizes for found in ranks] for name in one} == {
        "sampler": [[1, 1, 1, 1], [1, 1, 1], [1, 1]],
        "stream": [[2, 1, 2, 1], [2, 2, 1], [2, 2, 1]],
        "without length": [[1, 2]] * 3,
    }


def evaluate_one_sample(
    rank: int, world_size: int, directory: Path, data: str
) -> tuple[type[BaseException], str]:
    """Return the error of an evaluation in which only rank 0 has a sample."""
    trainer = make_on(world_size, directory, use_distributed_sampler=False)
    if data == "sampler":
        only_on_rank_0 = loader(1, sampler=Dealt(scores(1), world_size, trainer.global_rank))
    else:
        only_on_rank_0 = DataLoader(Part(1, trainer.global_rank, world_size))
    with pytest.raises((RankFailedError, RuntimeError)) as caught:
        trainer.validate(AtTheEnd(), only_on_rank_0, verbose=False)
    return caught.type, str(caught.value)


@pytest.mark.parametrize("data", ["sampler", "stream"])
def test_a_rank_without_a_batch_ends_the_evaluation(data: str, tmp_path: Path) -> None:
    """Every rank raises.

    If the loaders have lengths, this is stock's error on the rank without a batch;
    otherwise, an error that names the ranks and the remedy.
    """
    first, second = run_ranks(evaluate_one_sample, 2, tmp_path, data)
    if data == "sampler":
        assert first[0] is RankFailedError
        assert first[1].startswith("rank 1 (host ")
        assert "Please make sure that it returns at least 1 batch" in first[1]
        assert second[0] is RuntimeError
        return
    assert first == second
    assert first[0] is RankAbsentError
    assert "let every rank run the same number of evaluation steps" in first[1]
