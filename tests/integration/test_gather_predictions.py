"""Predictions of all ranks, once each and in the dataset's order, on rank 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_ddp_ext.errors import ExactEvaluationError
from lightning_ddp_ext.integration.predictions import gather_predictions
from tests.harness.ranks import by_hand_env, run_ranks
from tests.harness.training import Kind, assert_same, make_strategy, make_trainer, on_both


class Pair(NamedTuple):
    whole: Any
    half: Any


def structured(x: Tensor) -> Any:
    """All kinds of things by sample that a step may return."""
    numbers = x.tolist()
    return {
        "tensor": torch.stack([x, x * 2], dim=1),
        "pair": Pair(x, (x / 2, [number * 2 for number in numbers])),
        "names": [f"sample {number:.0f}" for number in numbers],
        "tuple": (x, x + 1),
        "uneven": [torch.ones(int(number)) for number in numbers],
        "array": x.numpy(),
    }


class Predicts(L.LightningModule):
    """Returns what it is told to make of a batch, and knows which batches it has seen."""

    def __init__(self, predict: Callable[[Tensor], Any] = structured) -> None:
        super().__init__()
        self.predict = predict
        self.batches: list[list[float]] = []

    def predict_step(self, x: Tensor, index: int, dataloader_idx: int = 0) -> Any:
        self.batches.append(x.tolist())
        return self.predict(x)


class Predicted(NamedTuple):
    gathered: Any
    batches: list[list[float]]


def numbers(samples: int) -> Tensor:
    return torch.arange(samples, dtype=torch.float32)


def loader(samples: int, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(numbers(samples), batch_size, **options)  # type: ignore[arg-type]


def predict(trainer: L.Trainer, loaders: Any, model: Predicts | None = None) -> Predicted:
    model = model or Predicts(torch.clone)
    trainer.predict(model, loaders)
    return Predicted(gather_predictions(trainer), model.batches)


def several(rank: int, world_size: int, directory: Path, sizes: list[int]) -> list[Predicted]:
    trainer = make_trainer(make_strategy("ours", directory), devices=world_size)
    return [predict(trainer, loader(samples)) for samples in sizes]


def test_every_prediction_comes_once_and_in_order(tmp_path: Path) -> None:
    """Rank 0 has all predictions in the dataset's order, also of fewer samples than ranks, the others have None."""
    sizes = [1, 2, 3, 7, 12]
    first, *others = run_ranks(several, 3, tmp_path, sizes, env=by_hand_env(3))
    assert [each.gathered.tolist() for each in first] == [list(range(samples)) for samples in sizes]
    assert all(each.gathered is None for rank in others for each in rank)
    for number, samples in enumerate(sizes):  # nothing was predicted that is not among them
        read = [x for rank in [first, *others] for batch in rank[number].batches for x in batch]
        assert sorted(read) == list(range(samples))


def structures(kind: Kind, directory: Path) -> list[Any]:
    trainer = make_trainer(make_strategy(kind, directory))
    shuffled = loader(5, shuffle=True, batch_size=2)
    return [
        predict(trainer, loader(5), Predicts()).gathered,
        predict(trainer, [loader(5), shuffled, loader(2)]).gathered,
        predict(trainer, DataLoader(numbers(5), batch_sampler=BatchSampler(range(5), 2, True))).gathered,  # type: ignore[arg-type]
        predict(make_trainer(make_strategy(kind, directory), limit_predict_batches=1), loader(7)).gathered,
    ]


@pytest.mark.lowest
def test_structures_loaders_and_limits(tmp_path: Path) -> None:
    """With ours and stock, structures come back as of one batch, loaders in a list, limited ones as far as read."""
    for by_rank in on_both(structures, tmp_path):
        (structure, loaders, batch_sampler, limited), others = by_rank
        expected = structured(numbers(5))
        assert structure.pop("names") == expected.pop("names")
        assert_same(structure, expected)
        assert isinstance(structure["pair"], Pair)
        assert [each.tolist() for each in loaders[::2]] == [[0, 1, 2, 3, 4], [0, 1]]
        assert sorted(set(loaders[1].tolist())) == loaders[1].tolist()
        assert batch_sampler.tolist() == [0, 1, 2, 3, 4]
        assert limited.tolist() == [0, 1, 2, 3]
        assert others == [None] * 4


def repeating(rank: int, world_size: int, directory: Path) -> Predicted:
    """Ranks that say which of them has predicted, over a sampler of the user's that repeats sample 0."""
    sampler = DistributedSampler(range(5), world_size, rank, shuffle=False)  # type: ignore[arg-type, var-annotated]
    trainer = make_trainer(make_strategy("ours", directory))
    return predict(trainer, loader(5, sampler=sampler), Predicts(lambda x: x * 10 + rank))


def test_of_a_repeated_sample_the_first_prediction_is_taken(tmp_path: Path) -> None:
    """A sampler of the user's that repeats a sample is left alone, and its first prediction is the one that counts."""
    ranks = run_ranks(repeating, 2, tmp_path, env=by_hand_env(2))
    assert ranks[0].gathered.tolist() == [0, 11, 20, 31, 40]
    assert [each.batches for each in ranks] == [[[0, 2], [4]], [[1, 3], [0]]]


def test_one_process_needs_no_ranks() -> None:
    """On one process it puts a shuffled loader's predictions into the dataset's order."""
    found = predict(make_trainer("auto", devices=1), loader(7, shuffle=True))
    assert found.gathered.tolist() == list(range(7))


def each_by_itself(rank: int, world_size: int, directory: Path) -> list[Predicted]:
    """Ranks with a Trainer of their own each, in a default group whose collectives do nothing."""
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    trainer = make_trainer("auto", devices=1)
    indices = [range(rank, 7, world_size), [4, 0] if rank == 0 else [], range(rank, 3, world_size)]
    found = [predict(trainer, loader(7, sampler=each)) for each in indices]
    dist.destroy_process_group()
    return found


def test_predictions_travel_in_cpu_memory(tmp_path: Path) -> None:
    """Where the default group is no gloo group, by one; and a rank that has read nothing adds nothing."""
    first, *others = run_ranks(each_by_itself, 3, tmp_path)
    assert [each.gathered.tolist() for each in first] == [list(range(7)), [0, 4], [0, 1, 2]]
    assert all(each.gathered is None for rank in others for each in rank)


def wrong(rank: int, world_size: int, directory: Path) -> list[str]:
    """What every rank is told about predictions that cannot be joined."""
    trainer = make_trainer(make_strategy("ours", directory))
    found = [message_of(lambda: gather_predictions(trainer))]
    returned: list[Callable[[Tensor], Any]] = [
        torch.mean,
        lambda x: len(x),
        lambda x: {"x": x[:1]},
        lambda x: torch.ones(len(x), len(x)),
        lambda x: {f"key {len(x)}": x},
        lambda x: x if rank else x.tolist(),
        lambda x: np.zeros(len(x), float if rank else "datetime64[s]"),
        lambda x: [(lambda: 0) for _ in x] if rank else x.tolist(),
    ]
    for each in returned:
        found.append(message_of(lambda each=each: predict(trainer, loader(3), Predicts(each))))  # type: ignore[misc]
    trainer.predict(Predicts(torch.clone), loader(3), return_predictions=False)
    found.append(message_of(lambda: gather_predictions(trainer)))
    trainer.predict(Predicts(torch.clone), [numbers(2)])  # no DataLoader
    found.append(message_of(lambda: gather_predictions(trainer)))
    return found


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ExactEvaluationError) as error:
        call()
    return str(error.value)


def test_what_cannot_be_joined_is_refused_on_every_rank(tmp_path: Path) -> None:
    """Every rank raises the same error, which says what was found and what to return instead."""
    first, second = run_ranks(wrong, 2, tmp_path, env=by_hand_env(2))
    assert first == second
    starts = [
        "trainer has no predictions; call trainer.predict on every rank first",
        "predictions must have a first dimension by sample, 2 in this batch (got Tensor, rows: none); have",
        "predictions must have a first dimension by sample, 2 in this batch (got int, rows: none); have",
        "predictions['x'] must have a first dimension by sample, 2 in this batch (got Tensor, rows: 1);",
        "predictions cannot be joined: RuntimeError: ",
        "predictions cannot be joined: KeyError: 'key ",
        "predictions must have a first dimension by sample, 1 in this batch (got Tensor, rows: 1); have",
        "predictions cannot be joined: ",
        "predictions must be picklable to be gathered: ",
        "trainer.predict must keep its predictions (got return_predictions=False);",
        "loader 0 must tell which samples a batch holds (got Tensor, which does not);",
    ]
    assert [message[: len(start)] for message, start in zip(first, starts, strict=True)] == starts


def test_arrays_stay_arrays() -> None:
    """What NumPy holds stays with NumPy."""
    found = predict(make_trainer("auto", devices=1), loader(3), Predicts(lambda x: x.numpy())).gathered
    assert isinstance(found, np.ndarray)
