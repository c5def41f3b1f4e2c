"""Predictions of all ranks, once each and in the dataset's order, on rank 0."""

from __future__ import annotations

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
    """Returns a given function of a batch, and records the samples that it has seen."""

    def __init__(self, predict: Callable[[Tensor], Any] = torch.clone) -> None:
        super().__init__()
        self.predict = predict
        self.read: list[float] = []

    def predict_step(self, x: Tensor, index: int, dataloader_idx: int = 0) -> Any:
        self.read += x.tolist()
        return self.predict(x)


def loader(samples: int, **options: Any) -> DataLoader[Any]:
    chosen = options if "batch_sampler" in options else {"batch_size": 2, **options}
    return DataLoader(torch.arange(float(samples)), **chosen)


def predict(
    trainer: L.Trainer, loaders: Any, *function: Callable[[Tensor], Any]
) -> tuple[Any, list[float]]:
    """Return the gathered predictions, and the samples that this rank read."""
    model = Predicts(*function)
    trainer.predict(model, loaders)
    return gather_predictions(trainer), model.read


def several(rank: int, world_size: int, directory: Path) -> list[Any]:
    trainer = training.make_trainer(training.make_strategy("ours", directory), devices=world_size)
    own = loader(7, sampler=ExactDistributedSampler(range(7)))
    return [predict(trainer, each) for each in (loader(1), loader(7), own)]


def test_every_prediction_is_gathered_once_and_in_order(tmp_path: Path) -> None:
    """Rank 0 has all predictions in the dataset's order, also of fewer samples than
    ranks, the others have None.
    """
    by_rank = ranks.run_ranks(several, 3, tmp_path)
    for samples, of_ranks in zip((1, 7, 7), zip(*by_rank, strict=True), strict=True):
        first, *others = (gathered for gathered, _ in of_ranks)
        assert (first.tolist(), others) == (list(range(samples)), [None, None])
        # Nothing was predicted that is not among them.
        assert sorted(x for _, read in of_ranks for x in read) == list(range(samples))


def structures(kind: training.Kind, directory: Path) -> list[Any]:
    trainer = training.make_trainer(training.make_strategy(kind, directory))
    own_batches = loader(5, batch_sampler=BatchSampler(range(5), 2, True))
    repeating = loader(
        5, sampler=DistributedSampler(range(5), 2, trainer.global_rank, shuffle=False)
    )
    gathered = [
        predict(trainer, loader(5), structured)[0],
        predict(trainer, [loader(5), loader(5, shuffle=True), loader(2)])[0],
        predict(trainer, own_batches)[0],
        predict(trainer, repeating, lambda x: x * 10 + trainer.global_rank)[0],
    ]
    return [
        *gathered,
        predict(
            training.make_trainer(training.make_strategy(kind, directory), limit_predict_batches=1),
            loader(7),
        )[0],
    ]


@pytest.mark.lowest
def test_structures_loaders_and_limits(tmp_path: Path) -> None:
    """Ours and stock return structures as of one batch, loaders in a list, and limited
    ones as far as read.
    """
    for by_rank in training.on_both(structures, tmp_path):
        (structure, loaders, own_batches, repeating, limited), others = by_rank
        training.assert_same(structure, structured(torch.arange(5.0)))
        assert isinstance(structure["pair"], Pair)
        assert isinstance(structure["array"], np.ndarray)
        assert [each.tolist() for each in loaders[::2]] == [[0, 1, 2, 3, 4], [0, 1]]
        assert sorted(set(loaders[1].tolist())) == loaders[1].tolist()
        assert own_batches.tolist() == [0, 1, 2, 3, 4]
        assert repeating.tolist() == [0, 11, 20, 31, 40]  # rank 1 predicts sample 0 again
        assert limited.tolist() == [0, 1, 2, 3]
        assert others == [None] * 5


REFUSED: dict[str, Callable[[Tensor], Any]] = {
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


def refuse(rank: int, world_size: int, directory: Path) -> list[str]:
    """Return every rank's error on predictions that cannot be joined."""
    trainer = training.make_trainer(training.make_strategy("ours", directory))

    def gather(
        loaders: Any = None, function: Callable[[Tensor], Any] = torch.clone, **options: Any
    ) -> str:
        if loaders is not None:
            trainer.predict(Predicts(function), loaders, **options)
        with pytest.raises(SamplingError) as error:
            gather_predictions(trainer)
        return str(error.value)

    without = gather()
    told = [gather(loader(3), each) for each in REFUSED.values()]
    return [without, gather(loader(3), return_predictions=False), gather([torch.ones(2, 1)]), *told]


def test_what_cannot_be_joined_is_refused_on_every_rank(tmp_path: Path) -> None:
    """Every rank raises the same error, with the value that was found and the remedy."""
    first, second = ranks.run_ranks(refuse, 2, tmp_path)
    assert first == second
    starts = [
        "trainer has no predictions; first call trainer.predict with data on every rank",
        "trainer.predict must keep its predictions (got return_predictions=False);",
        "loader 0 must record the samples of each batch (got Tensor, which does not);",
        *REFUSED,
    ]
    assert [message[: len(start)] for message, start in zip(first, starts, strict=True)] == starts


def predict_on_two_hosts(rank: int, world_size: int, init_method: str) -> Any:
    strategy = DDPExtStrategy(init_method, process_group_backend=training.backend("nccl_stand_in"))
    gathered, _ = predict(training.make_trainer(strategy, devices=1, num_nodes=2), loader(5))
    return gathered


@pytest.mark.netns
def test_predictions_of_hosts_whose_names_are_loopback_addresses(two_hosts: Network) -> None:
    """Debian gives a host's own name the address 127.0.1.1, at which gloo would wait for
    the other host.
    """
    for host in two_hosts:
        known = host.hosts_file.read_text()
        own = f"{host.address} {host.name}"
        assert own in known
        host.hosts_file.write_text(known.replace(own, f"127.0.1.1 {host.name}"))
    env = {**ranks.by_hand_env(2), "LOCAL_RANK": "0", "NODE_RANK": str, "GLOO_SOCKET_IFNAME": None}
    init_method = f"tcp://{two_hosts[0].address}:29874"
    gathered, nothing = ranks.run_ranks(
        predict_on_two_hosts, 2, init_method, env=env, namespaces=list(two_hosts)
    )
    assert (gathered.tolist(), nothing) == ([0, 1, 2, 3, 4], None)


def test_other_mappings_are_joined_as_dicts_at_any_depth() -> None:
    """Such as BatchEncoding of transformers, here in a tuple."""
    batches = [
        PredictedBatch([1, 0], (UserDict(x=torch.tensor([10, 0])),)),
        PredictedBatch([2], (UserDict(x=torch.tensor([20])),)),
    ]
    (joined,) = join_batches(batches)
    assert joined["x"].tolist() == [0, 10, 20]
