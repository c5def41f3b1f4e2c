"""Training on a GPU gives the numbers of stock ``ddp`` there, or of the CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_ddp_ext import (
    RankZeroCheckpointIO,
    SyncBatchNorm,
    SyncBatchNormConversion,
    gather_predictions,
)
from tests.batchnorm.test_joined_batch import Way, all_deviations
from tests.gpu.placement import (
    GLOO,
    GPU,
    IS_GPU,
    SECOND_GPU,
    TOLERANCE,
    Placement,
    on_cpu,
    torch_devices,
)
from tests.harness import training


class Measured(training.Net):
    """Logs values and a metric, from tensors on the model's device."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        loss = self.loss(batch)
        targets = batch[1]
        self.mean.update(targets)
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        self.log("largest", targets.max(), sync_dist=True, reduce_fx="max", on_epoch=True)
        self.log("mean", self.mean)
        return loss


def options_of(
    kind: training.Kind, batchnorm_group_size: int | None, saver: ModelCheckpoint
) -> dict[str, Any]:
    """Return the Trainer's options. Stock's BatchNorm group has all ranks, whatever its
    size here; ours saves in the background.
    """
    options: dict[str, Any] = {"callbacks": [saver], "enable_checkpointing": True}
    is_synchronised = batchnorm_group_size is not None
    if kind == "stock":
        return {**options, "sync_batchnorm": is_synchronised}
    options["plugins"] = [RankZeroCheckpointIO(background=True)]
    if is_synchronised:
        options["callbacks"].append(SyncBatchNormConversion(process_group=batchnorm_group_size))
        options["strategy"] = {"broadcast_buffers": False}
    return options


def run_all_stages(
    rank: int,
    world_size: int,
    placement: Placement,
    directory: Path,
    kind: training.Kind,
    batchnorm_group_size: int | None,
) -> dict[str, Any]:
    """Train, save, resume, test, predict and gather; return the results."""
    L.seed_everything(1)
    model = Measured()
    saver = ModelCheckpoint(directory / kind / placement.backend, save_last=True)
    options = options_of(kind, batchnorm_group_size, saver)
    placement.trainer(directory, kind, **options).fit(model)
    assert dist.get_backend() == placement.backend

    trainer = placement.trainer(directory, kind, max_epochs=3, **options)
    trainer.fit(model, ckpt_path=saver.last_model_path)
    learned = training.weights(model)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    tested = trainer.test(model, verbose=False)
    trainer.strategy.barrier("between")
    trainer.predict(model)
    ranks_number = torch.full((2,), float(rank), device=placement.devices[rank])
    return {
        "step": trainer.global_step,
        "weights": {name: value.cpu() for name, value in learned.items()},
        "logged": logged,
        "tested": tested,
        "predicted": gather_predictions(trainer),
        "gathered": trainer.strategy.all_gather(ranks_number).cpu(),
    }


def assert_close(results: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Assert that the results are as expected, and the first two ranks' weights equal."""
    torch.testing.assert_close(results, expected, **TOLERANCE)
    training.assert_same(
        results[0]["weights"]["layers.0.weight"], results[1]["weights"]["layers.0.weight"]
    )


@pytest.mark.parametrize(("ranks", "batchnorm_group_size"), [(2, None), (4, 2)])
def test_ranks_that_share_a_gpu_over_gloo_learn_as_on_the_cpu(
    ranks: int, batchnorm_group_size: int | None, tmp_path: Path
) -> None:
    """Over gloo: training, batched logging, metrics, SyncBatchNorm, background saves,
    resuming, barrier, gathering give the CPU's numbers.

    Groups of two ranks among four share statistics.
    """
    placement = Placement("gloo", (GPU,) * ranks)
    results = placement.run(run_all_stages, tmp_path, "ours", batchnorm_group_size)
    expected = on_cpu(ranks).run(run_all_stages, tmp_path, "ours", batchnorm_group_size)
    assert_close(results, expected)


@pytest.mark.parametrize("placement", ["NCCL"], indirect=True)
@pytest.mark.parametrize("batchnorm_group_size", [None, 2])
def test_ranks_of_nccl_learn_as_stocks(
    placement: Placement, batchnorm_group_size: int | None, tmp_path: Path
) -> None:
    """Over NCCL: training, batched logging, metrics, SyncBatchNorm, background saves,
    resuming, barrier, gathering give stock's numbers.
    """
    results = placement.run(run_all_stages, tmp_path, "ours", batchnorm_group_size)
    kind: training.Kind = "stock" if IS_GPU else "ours"  # stand-ins show that the test works
    reference = placement if IS_GPU else on_cpu(2)
    expected = reference.run(run_all_stages, tmp_path, kind, batchnorm_group_size)
    assert_close(results, expected)


class AlwaysJoint(SyncBatchNorm):
    """Computes with one rank as with several."""

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self._normalise(input) if self.training else super().forward(input)
        return output


def deviations(rank: int, world_size: int, placement: Placement, directory: Path) -> list[str]:
    """Compare the layer with one process that has all ranks' batches, case by case."""
    device = placement.devices[rank]
    if IS_GPU:
        torch.cuda.set_device(device)
    layer_type = SyncBatchNorm if world_size > 1 else AlwaysJoint
    slack = 16.0 if IS_GPU else 1.0
    way = Way(layer_type, world_size, device, training.backend(placement.backend), slack)
    return all_deviations(rank, world_size, directory, way)


@pytest.mark.parametrize("ranks", [2, 1])
def test_synchronised_batchnorm_equals_the_joined_batch(
    ranks: int, placement: Placement, tmp_path: Path
) -> None:
    """SyncBatchNorm's kernels: 1 and 2 ranks, uneven and empty batches, channels last,
    half precision.
    """
    shortened = replace(placement, devices=placement.devices[:ranks])
    assert shortened.run(deviations, tmp_path) == [[]] * ranks


class TwoParts(training.Net):
    """Has its last layer on its rank's second device, and the others on the first."""

    def configure_model(self) -> None:
        self.first, self.second = self.trainer.strategy.rank_devices
        self.layers[:3].to(self.first)
        self.layers[3].to(self.second)

    def forward(self, x: Tensor) -> Tensor:
        assert x.device == self.first
        out: Tensor = self.layers[3](self.layers[:3](x).to(self.second))
        return out.to(self.first)


def train_on_two_devices(
    rank: int, world_size: int, placement: Placement, directory: Path, devices: list[str]
) -> dict[str, Tensor]:
    L.seed_everything(1)
    model = TwoParts()
    strategy = {"parallel_devices": torch_devices(devices), "devices_per_rank": 2}
    placement.trainer(directory, strategy=strategy).fit(model)
    return {name: value.cpu() for name, value in training.weights(model).items()}


def second_device(first: str) -> str:
    """Return the other GPU, or the CPU if a second GPU is missing."""
    if torch.cuda.device_count() < 2:
        return "cpu"
    return SECOND_GPU if first == GPU else GPU


def test_a_rank_with_two_devices_learns_as_on_the_cpu(placement: Placement, tmp_path: Path) -> None:
    """`devices_per_rank=2` with two GPUs, or over gloo with a GPU and the CPU."""
    if IS_GPU and placement is not GLOO and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    devices = [name for first in placement.devices for name in (first, second_device(first))]
    results = placement.run(train_on_two_devices, tmp_path, devices)
    expected = on_cpu(2).run(train_on_two_devices, tmp_path, ["cpu"] * len(devices))
    torch.testing.assert_close(results, expected, **TOLERANCE)
