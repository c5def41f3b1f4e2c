"""`uneven_inputs="join"`: ranks train on each batch once, as one process trains on all of a step's batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric, SumMetric

from lightning_ddp_ext import SamplingError
from tests.harness.ranks import by_hand_env, run_ranks
from tests.harness.training import At, make_strategy, make_trainer
from tests.integration.continuing import Saver

Lengths = list[int]  # batches of each rank


def batch_of(rank: int, index: int) -> Tensor:
    """Return two rows that no other rank, step or epoch has."""
    return torch.arange(6.0).reshape(2, 3).add(10 * rank + index).sin()


def joined(lengths: Lengths, index: int) -> Tensor:
    """Return all samples that the ranks read in one step."""
    return torch.cat([batch_of(rank, index) for rank, length in enumerate(lengths) if index < length])


class Batches(Dataset[Tensor]):
    """The batches of one rank; or, for one process, those of all ranks."""

    def __init__(self, lengths: Lengths, rank: int | None) -> None:
        self.lengths, self.rank = lengths, rank

    def __len__(self) -> int:
        return max(self.lengths) if self.rank is None else self.lengths[self.rank]

    def __getitem__(self, index: int) -> Tensor:
        if index >= len(self):
            raise IndexError
        return joined(self.lengths, index) if self.rank is None else batch_of(self.rank, index)


class Stream(IterableDataset[Tensor]):
    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self.batches[index] for index in range(len(self.batches))])


class Net(L.LightningModule):
    """Counts samples in logged values, in metrics and in BatchNorm."""

    def __init__(self, loader: Any, kind: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
        self.mean, self.sum = MeanMetric(), SumMetric()
        self.loader = loader
        self.automatic_optimization = kind != "manual"
        self.idle: list[bool] = []
        self.logged: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        out = self.layers(batch)
        loss: Tensor = (out - batch.sum(1, keepdim=True)).square().mean()
        self.mean(batch)
        self.sum(len(batch))
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch))
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        self.log("samples", self.sum, on_epoch=True, on_step=False)
        self.log("agreed", float(self.trainer.strategy.reduce_boolean_decision(True)))
        if not self.automatic_optimization:
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
        batch.fill_(torch.nan)  # no later reader may see it
        self.idle.append(getattr(self.trainer.strategy, "is_idle", False))
        self.logged.append(float(self.trainer.callback_metrics["loss_step"]))

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.layers[:2].parameters(), lr=0.1, momentum=0.9)
        if self.automatic_optimization:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return first, torch.optim.SGD(self.layers[2:].parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        return self.loader


def fit(strategy: Any, lengths: Lengths, rank: int | None, kind: str, **options: Any) -> dict[str, Any]:
    """Train for two epochs, on one of the ranks or in one process for all; return all values that must be equal."""
    torch.manual_seed(1)
    batches = Batches(lengths, rank)
    loader = DataLoader(Stream(batches) if kind == "stream" else batches, batch_size=None)
    net = Net(loader, kind)
    path = options.pop("ckpt_path", None)
    if kind == "accumulated":
        options |= {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    ranks = 1 if rank is None else len(lengths)
    trainer = make_trainer(
        strategy, devices=ranks, use_distributed_sampler=False, sync_batchnorm=rank is not None, **options
    )
    trainer.fit(net, ckpt_path=path)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    state = {name: value.tolist() for name, value in net.state_dict().items()}
    return {"state": state, "metrics": metrics, "logged": net.logged, "steps": trainer.global_step, "idle": net.idle}


def train(rank: int, world_size: int, directory: Path, cases: list[tuple[str, Lengths]]) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", message="the first training batch is the same")  # one is lent, and read once
    strategies = [make_strategy("ours", directory, uneven_inputs="join") for _ in cases]
    return [fit(strategy, lengths, rank, kind) for strategy, (kind, lengths) in zip(strategies, cases, strict=True)]


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("state", "metrics", "logged"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)
    assert found["steps"] == expected["steps"]


CASES: list[tuple[str, Lengths]] = [
    *(("sized", [5, 3]), ("stream", [2, 4]), ("stream", [0, 3]), ("accumulated", [5, 2]), ("manual", [4, 2]))
]


@pytest.mark.parametrize("cases", [CASES, [("sized", [1, 4, 2])]], ids=["2 ranks", "3 ranks"])
def test_ranks_learn_what_one_process_learns_from_the_same_batches(
    cases: list[tuple[str, Lengths]], tmp_path: Path
) -> None:
    """Weights, running statistics, logged values and metrics agree; each rank can detect its idle steps."""
    world_size = len(cases[0][1])
    by_rank = run_ranks(train, world_size, tmp_path, cases, env=by_hand_env(world_size))
    for number, (kind, lengths) in enumerate(cases):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            alone = fit("auto", lengths, None, kind)
        assert alone["metrics"]["samples"] == 2 * sum(lengths)
        for rank, results in enumerate(by_rank):
            assert_close(results[number], alone)
            assert results[number]["idle"] == 2 * [index >= lengths[rank] for index in range(max(lengths))]


def resume(rank: int, world_size: int, directory: Path) -> None:
    """Resume from checkpoints with and without an idle rank; the ranks learn what they learn without a stop."""
    warnings.simplefilter("ignore")
    points = {f"train_batch_end-{done}": done for done in (2, 4)}
    for kind in ("sized", "stream"):
        lengths, saver = [5, 3], Saver(directory / kind, points)
        whole = fit(make_strategy("ours", directory, uneven_inputs="join"), lengths, rank, kind, callbacks=[saver])
        for point, done in points.items():
            strategy = make_strategy("ours", directory, uneven_inputs="join")
            resumed = fit(strategy, lengths, rank, kind, ckpt_path=saver.saved[point])
            assert (kind, resumed["state"], resumed["idle"]) == (kind, whole["state"], whole["idle"][done:])


def test_an_epoch_can_be_resumed_where_a_rank_ended(tmp_path: Path) -> None:
    """All continue with the next batch, and the rank that had none left is still idle."""
    run_ranks(resume, 2, tmp_path, env=by_hand_env(2))


class Pulls(Net):
    """Takes batches from an iterator."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


def refused(rank: int, world_size: int, directory: Path) -> list[str]:
    warnings.simplefilter("ignore")
    loader = DataLoader(Batches([3, 2], rank), batch_size=None)
    averaging = {"ddp_comm_state": PostLocalSGDState(None, None, 2), "model_averaging_period": 2}
    # Not before: DDP refuses the layer on the CPU.
    convert = At("on_train_start", lambda trainer: nn.SyncBatchNorm.convert_sync_batchnorm(trainer.model))
    cases: list[tuple[Net, dict[str, Any], list[L.Callback]]] = [
        (Net([loader, loader], "sized"), {}, []),
        (Pulls(loader, "sized"), {}, []),
        (Net(loader, "sized"), {}, [convert]),
        (Net(loader, "sized"), averaging, []),
    ]
    found = []
    for net, options, callbacks in cases:
        strategy = make_strategy("ours", directory, uneven_inputs="join", **options)
        with pytest.raises(SamplingError) as caught:
            make_trainer(strategy, use_distributed_sampler=False, callbacks=callbacks).fit(net)
        found.append(str(caught.value))
    return found


def test_what_an_idle_rank_cannot_take_part_in_is_refused(tmp_path: Path) -> None:
    """Every rank raises before the first step, with a remedy."""
    needed = [
        "a single training loader (got 2); combine their datasets",
        "a training_step that takes a batch (got one that takes dataloader_iter); replace its argument",
        "layers that can skip idle ranks (layers.1 is torch's SyncBatchNorm); use sync_batchnorm=True",
        "gradient averaging in every step; remove model_averaging_period",
    ]
    expected = [f"uneven_inputs='join' needs {each}, or use 'stop_at_shortest'" for each in needed]
    assert run_ranks(refused, 2, tmp_path, env=by_hand_env(2)) == [expected, expected]
