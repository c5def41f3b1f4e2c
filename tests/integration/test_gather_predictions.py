"""Predictions of all ranks, once each and in the dataset's order, on rank 0."""

import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_ddp_ext import DDPExtStrategy, ExactDistributedSampler, SamplingError
from lightning_ddp_ext.integration.data.predictions import gather_predictions
from tests.harness import ranks, training
from tests.harness.environment import Network


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
    """Returns a given function of a batch."""

    def __init__(self, predict: Callable[[Tensor], Any] = torch.clone) -> None:
        super().__init__()
        self.predict = predict

    def predict_step(self, x: Tensor, index: int, dataloader_idx: int = 0) -> Any:
        return self.predict(x)


def loader(samples: int, **options: Any) -> DataLoader[Any]:
    """Return a loader of these numbers, in batches of two."""
    chosen = options if "batch_sampler" in options else {"batch_size": 2, **options}
    return DataLoader(torch.arange(float(samples)), **chosen)


def new_trainer(kind: training.Kind, directory: Path, **options: Any) -> L.Trainer:
    return training.make_trainer(training.make_strategy(kind, directory), **options)


def predict(
    trainer: L.Trainer, loaders: Any, function: Callable[[Tensor], Any] = torch.clone
) -> Any:
    """Predict, and return what ``gather_predictions`` returns on this rank."""
    trainer.predict(Predicts(function), loaders)
    return gather_predictions(trainer)


class Case(NamedTuple):
    """The loaders of a rank, what is predicted, and what rank 0 gathers."""

    loaders: Callable[[int], Any]
    gathered: Any
    predict: Callable[[Tensor], Any] = torch.clone
    options: Mapping[str, Any] = {}  # of the Trainer


CASES = {
    "one sample of a rank": Case(lambda rank: loader(3), gathered=torch.arange(3.0)),
    "a sampler that does not repeat": Case(
        lambda rank: loader(7, sampler=ExactDistributedSampler(range(7))),
        gathered=torch.arange(7.0),
    ),
    "all structures": Case(
        lambda rank: loader(5), structured(torch.arange(5.0)), predict=structured
    ),
    "several loaders": Case(
        lambda rank: [loader(5), loader(5, sampler=[*torch.arange(5).flip(0)]), loader(2)],
        gathered=[torch.arange(5.0), torch.arange(5.0), torch.arange(2.0)],
    ),
    "the user's batch sampler": Case(
        lambda rank: loader(5, batch_sampler=BatchSampler(range(5), 2, True)),
        gathered=torch.arange(5.0),
    ),
    # Rank 1 predicts sample 0 again.
    "a sampler that repeats": Case(
        lambda rank: loader(5, sampler=DistributedSampler(range(5), 2, rank, shuffle=False)),
        gathered=torch.tensor([0.0, 11.0, 20.0, 31.0, 40.0]),
        predict=lambda x: x * 10 + torch.distributed.get_rank(),
    ),
    "one batch of a rank": Case(
        lambda rank: loader(7),
        gathered=torch.arange(4.0),
        options={"limit_predict_batches": 1},
    ),
}


def predict_cases(kind: training.Kind, directory: Path) -> dict[str, Any]:
    gathered = {}
    for name, case in CASES.items():
        trainer = new_trainer(kind, directory, **case.options)
        gathered[name] = predict(trainer, case.loaders(trainer.global_rank), case.predict)
    return gathered


@pytest.mark.lowest
def test_predictions_are_those_of_the_samples_that_were_read(tmp_path: Path) -> None:
    """Rank 0 has the first prediction of each sample in the dataset's order, however the
    samples are read, also with stock; the others have None. Predictions have the
    structure of one batch.
    """
    for first, second in training.on_both(predict_cases, tmp_path):
        training.assert_same(first, {name: case.gathered for name, case in CASES.items()})
        assert isinstance(first["all structures"]["pair"], Pair)
        assert isinstance(first["all structures"]["array"], np.ndarray)
        assert second == dict.fromkeys(CASES)


LARGE = 1 << 20  # numbers


def view(x: Tensor) -> Tensor:
    return x.repeat(LARGE, 1).T[:, :1]


def gather_views(kind: training.Kind, directory: Path) -> int:
    """Gather twice five numbers, which are views of large tensors.

    Return the most bytes of Python objects, which include what is sent but no tensors.
    """
    trainer = new_trainer(kind, directory)
    trainer.predict(Predicts(lambda x: {"x": view(x), "each": list(view(x))}), loader(5))
    tracemalloc.start()
    gather_predictions(trainer)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most_bytes


def test_of_a_view_only_its_own_numbers_are_sent(tmp_path: Path) -> None:
    """The large tensor behind the view stays on its rank, also with stock."""
    for most_bytes_by_rank in training.on_both(gather_views, tmp_path):
        assert max(most_bytes_by_rank) < LARGE


def predicting(function: Callable[[Tensor], Any]) -> Callable[[L.Trainer], object]:
    return lambda trainer: trainer.predict(Predicts(function), loader(3))


NO_PREDICTIONS = (
    "trainer must have predictions whose samples are known (got none); first call trainer.predict"
)
# What a Trainer does before its predictions are gathered, and the beginning of the error.
REFUSALS: list[tuple[Callable[[L.Trainer], object], str]] = [
    (
        lambda trainer: None,
        NO_PREDICTIONS,
    ),
    (
        lambda trainer: trainer.predict(Predicts(), loader(3), return_predictions=False),
        NO_PREDICTIONS,
    ),
    (
        lambda trainer: trainer.predict(Predicts(), [torch.ones(2, 1)]),
        NO_PREDICTIONS,
    ),
    (
        predicting(torch.mean),
        "predictions cannot be joined: TypeError: len() of a 0-d tensor; predict_step must return",
    ),
    (
        predicting(lambda x: {"x": x[:1]}),
        (
            "predictions cannot be joined: ValueError: predictions['x'] must have one row per"
            " sample, 2 in a batch (got 1); predict_step must return a tensor"
        ),
    ),
    (
        predicting(lambda x: {"x": x} if 0 in x else {"x": x, "y": x}),
        "predictions cannot be joined: ValueError: Node ",
    ),
    (
        predicting(lambda x: torch.ones(len(x), len(x))),
        "predictions cannot be joined: RuntimeError: ",
    ),
]


def refuse(rank: int, world_size: int, directory: Path) -> list[str]:
    """Return this rank's errors."""
    errors = []
    for act, _ in REFUSALS:
        trainer = new_trainer("ours", directory)
        act(trainer)
        errors.append(str(training.raised(SamplingError, gather_predictions, trainer)))
    return errors


def test_what_cannot_be_joined_is_refused_on_every_rank(tmp_path: Path) -> None:
    """Every rank raises the same error, with the wrong value."""
    first, second = ranks.run_ranks(refuse, 2, tmp_path)
    assert first == second
    for error, (_, beginning) in zip(first, REFUSALS, strict=True):
        assert error.startswith(beginning)


def predict_on_two_hosts(rank: int, world_size: int, init_method: str) -> Any:
    # As with NCCL, the predictions are sent in a gloo group of their own.
    strategy = DDPExtStrategy(init_method, process_group_backend=training.backend("nccl_stand_in"))
    return predict(training.make_trainer(strategy, devices=1, num_nodes=2), loader(5))


@pytest.mark.netns
def test_predictions_of_hosts_whose_names_are_loopback_addresses(two_hosts: Network) -> None:
    """A host whose name has the address 127.0.1.1, as on Debian, sends its predictions.

    Gloo would wait for the other host at this address.
    """
    for host in two_hosts:
        host.name_as_loopback()
    env = {**ranks.by_hand_env(2), "LOCAL_RANK": "0", "NODE_RANK": str, "GLOO_SOCKET_IFNAME": None}
    init_method = f"tcp://{two_hosts[0].address}:29874"
    first, second = ranks.run_ranks(
        predict_on_two_hosts, 2, init_method, env=env, namespaces=list(two_hosts)
    )
    assert first.tolist() == [0, 1, 2, 3, 4]
    assert second is None
