"""Predictions of all ranks, once each and in the dataset's order, on rank 0."""

import tracemalloc
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_ddp_ext import DDPExtStrategy, ExactDistributedSampler
from lightning_ddp_ext.data.prediction_rows import PredictedBatch, join_batches
from lightning_ddp_ext.errors import SamplingError
from lightning_ddp_ext.integration.data.predictions import gather_predictions
from tests.harness import ranks, training
from tests.harness.network import Network


class Pair(NamedTuple):
    whole: Any
    half: Any


def structured(x: Tensor) -> Any:
    """Return outputs by sample of all kinds that a step may return."""
    return {
        "tensor": torch.stack([x, x * 2], dim=1),
        "pair": Pair(x, (x / 2, [number * 2 for number in x.tolist()])),
        "uneven": [torch.ones(int(number)) for number in x.tolist()],
        "array": x.numpy(),
    }


class Predicts(L.LightningModule):
    """Returns a given function of a batch, and records the samples that it has read."""

    def __init__(self, predict: Callable[[Tensor], Any] = torch.clone) -> None:
        super().__init__()
        self.predict = predict
        self.read: list[float] = []

    def predict_step(self, x: Tensor, index: int, dataloader_idx: int = 0) -> Any:
        self.read += x.tolist()
        return self.predict(x)


def loader(samples: int, **options: Any) -> DataLoader[Any]:
    """Return a loader of these numbers, in batches of two."""
    chosen = options if "batch_sampler" in options else {"batch_size": 2, **options}
    return DataLoader(torch.arange(float(samples)), **chosen)


def predict(
    trainer: L.Trainer, loaders: Any, function: Callable[[Tensor], Any] = torch.clone
) -> Any:
    trainer.predict(Predicts(function), loaders)
    return gather_predictions(trainer)


SAMPLES = {"fewer than ranks": 1, "several": 7, "the user's sampler": 7}


def predict_numbers(
    rank: int, world_size: int, directory: Path, name: str
) -> tuple[Any, list[float]]:
    """Return the gathered predictions, and the samples that this rank read."""
    samples = SAMPLES[name]
    own = {"sampler": ExactDistributedSampler(range(samples))} if "sampler" in name else {}
    trainer = training.make_trainer(training.make_strategy("ours", directory), devices=world_size)
    model = Predicts()
    trainer.predict(model, loader(samples, **own))
    return gather_predictions(trainer), model.read


@pytest.mark.parametrize("name", SAMPLES)
def test_every_prediction_is_gathered_once_and_in_order(name: str, tmp_path: Path) -> None:
    """Rank 0 has all predictions in the dataset's order, the others have None.

    The ranks read each sample once.
    """
    by_rank = ranks.run_ranks(predict_numbers, 3, tmp_path, name)
    numbers = list(range(SAMPLES[name]))
    gathered, *others = (predictions for predictions, _ in by_rank)
    assert gathered.tolist() == numbers
    assert others == [None, None]
    assert sorted(sample for _, samples in by_rank for sample in samples) == numbers


def gather_views(trainer: L.Trainer) -> None:
    """Gather numbers that are views of large tensors, which are not sent."""
    large = 1 << 20
    trainer.predict(Predicts(lambda x: {"x": UserDict(y=x.repeat(large, 1).T[:, :1])}), loader(5))
    tracemalloc.start()
    gather_predictions(trainer)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < large


def predict_in_all_ways(kind: training.Kind, directory: Path) -> dict[str, Any]:
    """Return what ``gather_predictions`` returns on this rank, by the way to predict."""

    def make_trainer(**options: Any) -> L.Trainer:
        return training.make_trainer(training.make_strategy(kind, directory), **options)

    trainer = make_trainer()
    rank = trainer.global_rank
    gather_views(trainer)
    repeating = DistributedSampler(range(5), 2, rank, shuffle=False)
    own_batches = BatchSampler(range(5), 2, True)
    return {
        "structure": predict(trainer, loader(5), structured),
        "several loaders": predict(trainer, [loader(5), loader(5, shuffle=True), loader(2)]),
        "own batches": predict(trainer, loader(5, batch_sampler=own_batches)),
        "repeating": predict(trainer, loader(5, sampler=repeating), lambda x: x * 10 + rank),
        "limited": predict(make_trainer(limit_predict_batches=1), loader(7)),
    }


@pytest.mark.lowest
def test_structures_loaders_and_limits(tmp_path: Path) -> None:
    """Predictions have the structure of one batch, with ours and with stock.

    Those of several loaders are in a list. With a limit, they are those of the batches
    that were read. Only their own numbers are sent.
    """
    for first, second in training.on_both(predict_in_all_ways, tmp_path):
        training.assert_same(first["structure"], structured(torch.arange(5.0)))
        assert isinstance(first["structure"]["pair"], Pair)
        assert isinstance(first["structure"]["array"], np.ndarray)
        in_order, shuffled, short = (each.tolist() for each in first["several loaders"])
        assert in_order == [0, 1, 2, 3, 4]
        assert shuffled == sorted(set(shuffled))
        assert short == [0, 1]
        assert first["own batches"].tolist() == [0, 1, 2, 3, 4]
        assert first["repeating"].tolist() == [0, 11, 20, 31, 40]  # rank 1 predicts sample 0 again
        assert first["limited"].tolist() == [0, 1, 2, 3]
        assert set(second.values()) == {None}


# The predictions of a step, by the beginning of the error.
NOT_JOINED: dict[str, Callable[[Tensor], Any]] = {
    "predictions must have one row per sample, 2 in this batch (got Tensor, rows: none": torch.mean,
    "predictions['x'] must have one row per sample, 2 in this batch (got Tensor": lambda x: {
        "x": x[:1]
    },
    "predictions must have the same structure in all batches"
    " (got {'x': 'Tensor'} and {'x': 'Tensor', 'y': 'Tensor'})": lambda x: (
        {"x": x} if 0 in x else {"x": x, "y": x}
    ),
    "predictions cannot be joined: RuntimeError: ": lambda x: torch.ones(len(x), len(x)),
}


NOT_PREDICTED = "trainer has no predictions; first call trainer.predict with data on every rank"
NOT_KEPT = "trainer.predict must keep its predictions (got return_predictions=False);"
NOT_RECORDED = "loader 0 must record the samples of each batch (got Tensor, which does not);"


def fail_to_join(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    """Return this rank's errors by the beginnings that they should have."""
    trainer = training.make_trainer(training.make_strategy("ours", directory))

    def error() -> str:
        with pytest.raises(SamplingError) as caught:
            gather_predictions(trainer)
        return str(caught.value)

    errors = {NOT_PREDICTED: error()}
    trainer.predict(Predicts(), loader(3), return_predictions=False)
    errors[NOT_KEPT] = error()
    trainer.predict(Predicts(), [torch.ones(2, 1)])
    errors[NOT_RECORDED] = error()
    for message, function in NOT_JOINED.items():
        trainer.predict(Predicts(function), loader(3))
        errors[message] = error()
    return errors


def test_what_cannot_be_joined_is_refused_on_every_rank(tmp_path: Path) -> None:
    """Every rank raises the same error, with the wrong value and the remedy."""
    first, second = ranks.run_ranks(fail_to_join, 2, tmp_path)
    assert first == second
    for beginning, error in first.items():
        assert error.startswith(beginning)


def predict_on_two_hosts(rank: int, world_size: int, init_method: str) -> Any:
    strategy = DDPExtStrategy(init_method, process_group_backend=training.backend("nccl_stand_in"))
    return predict(training.make_trainer(strategy, devices=1, num_nodes=2), loader(5))


@pytest.mark.netns
def test_predictions_of_hosts_whose_names_are_loopback_addresses(two_hosts: Network) -> None:
    """A host whose name has the address 127.0.1.1, as on Debian, sends its predictions.

    Gloo would wait for the other host at this address.
    """
    for host in two_hosts:
        known = host.hosts_file.read_text()
        own = f"{host.address} {host.name}"
        assert own in known
        host.hosts_file.write_text(known.replace(own, f"127.0.1.1 {host.name}"))
    env = {**ranks.by_hand_env(2), "LOCAL_RANK": "0", "NODE_RANK": str, "GLOO_SOCKET_IFNAME": None}
    init_method = f"tcp://{two_hosts[0].address}:29874"
    first, second = ranks.run_ranks(
        predict_on_two_hosts, 2, init_method, env=env, namespaces=list(two_hosts)
    )
    assert first.tolist() == [0, 1, 2, 3, 4]
    assert second is None


def test_samples_may_be_tensors() -> None:
    """A user's sampler may yield them; the first prediction of each sample is used."""
    batches = [PredictedBatch([torch.tensor(1), torch.tensor(0)], ["b", "a"])]
    again = PredictedBatch([torch.tensor(1), torch.tensor(2)], ["again", "c"])
    assert join_batches([*batches, again]) == ["a", "b", "c"]


def test_other_mappings_are_joined_as_dicts_at_any_depth() -> None:
    """Such as BatchEncoding of transformers, here in a tuple."""
    batches = [
        PredictedBatch([1, 0], (UserDict(x=torch.tensor([10, 0])),)),
        PredictedBatch([2], (UserDict(x=torch.tensor([20])),)),
    ]
    (joined,) = join_batches(batches)
    assert joined["x"].tolist() == [0, 10, 20]
