"""Training on GPUs gives the numbers of a reference.

===============  =====================================================================
Ranks on GPUs    Reference
===============  =====================================================================
over gloo        the same on the CPU
over NCCL        stock ``ddp`` on the same GPUs
SyncBatchNorm    torch's BatchNorm in one process, with the batches of all ranks joined
===============  =====================================================================

With stand-ins for GPUs and NCCL (see ``conftest``), the reference of the first two rows is
the CPU over gloo, because stock cannot synchronise BatchNorm there.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_ddp_ext import (
    BatchNormError,
    RankZeroCheckpointIO,
    SyncBatchNorm,
    gather_predictions,
)
from tests.batchnorm.test_joined_batch import Way, all_deviations
from tests.gpu.conftest import (
    GPU,
    IS_GPU,
    SECOND_GPU,
    Placement,
    on_cpu,
    torch_devices,
)
from tests.harness import training

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # for sums in another order


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


def run_all_stages(
    rank: int,
    world_size: int,
    placement: Placement,
    directory: Path,
    kind: training.Kind,
    synchronises: bool,
) -> dict[str, Any]:
    """Train, save, resume, test, predict and gather; return the results on the CPU."""
    L.seed_everything(1)
    model = Measured()
    saver = ModelCheckpoint(directory / kind / placement.backend, save_last=True)
    background = AsyncCheckpointIO(RankZeroCheckpointIO())
    options: dict[str, Any] = {
        "callbacks": [saver],
        "enable_checkpointing": True,
        "plugins": [background] if kind == "ours" else [],
        "sync_batchnorm": synchronises,
    }
    placement.trainer(directory, kind, **options).fit(model)
    assert torch.distributed.get_backend() == placement.backend

    trainer = placement.trainer(directory, kind, max_epochs=3, **options)
    trainer.fit(model, ckpt_path=saver.last_model_path)
    learned = training.weights(model)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    tested = trainer.test(model, verbose=False)
    trainer.strategy.barrier("between")
    trainer.predict(model)
    own_number = torch.full((2,), float(rank), device=placement.devices[rank])
    return {
        "step": trainer.global_step,
        "weights": {name: value.cpu() for name, value in learned.items()},
        "logged": logged,
        "tested": tested,
        "predicted by all ranks": gather_predictions(trainer),  # on rank 0
        "numbers of all ranks": trainer.strategy.all_gather(own_number).cpu(),
    }


def assert_as_expected(results: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Assert that the results are near those expected, and all ranks' weights equal."""
    torch.testing.assert_close(results, expected, **TOLERANCE)
    first_layers = [result["weights"]["layers.0.weight"] for result in results]
    training.assert_same(first_layers, first_layers[:1] * len(results))


@pytest.mark.parametrize(("ranks", "synchronises"), [(2, False), (4, True)])
def test_ranks_that_share_a_gpu_over_gloo_learn_as_on_the_cpu(
    ranks: int, synchronises: bool, tmp_path: Path
) -> None:
    """Training, batched logging, metrics, SyncBatchNorm, background saves, resuming, barrier
    and gathering give the CPU's numbers.
    """
    placement = Placement("gloo", (GPU,) * ranks)
    results = placement.run(run_all_stages, tmp_path, "ours", synchronises)
    on_the_cpu = on_cpu(ranks).run(run_all_stages, tmp_path, "ours", synchronises)
    assert_as_expected(results, on_the_cpu)


@pytest.mark.parametrize("placement", ["NCCL"], indirect=True)
@pytest.mark.parametrize("synchronises", [False, True])
def test_ranks_of_nccl_learn_as_stocks(
    placement: Placement, synchronises: bool, tmp_path: Path
) -> None:
    """Training, batched logging, metrics, SyncBatchNorm, background saves, resuming, barrier
    and gathering give stock's numbers.
    """
    results = placement.run(run_all_stages, tmp_path, "ours", synchronises)
    if IS_GPU:
        reference = placement.run(run_all_stages, tmp_path, "stock", synchronises)
    else:
        reference = on_cpu(2).run(run_all_stages, tmp_path, "ours", synchronises)
    assert_as_expected(results, reference)


class AlwaysJoint(SyncBatchNorm):
    """Computes with one rank as with several."""

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self._normalise(input) if self.training else super().forward(input)
        return output


def deviations_on_placement(
    rank: int, world_size: int, placement: Placement, directory: Path
) -> list[str]:
    """Compare the layer with one process that has all ranks' batches, case by case."""
    kind = SyncBatchNorm if world_size > 1 else AlwaysJoint
    slack = 16.0 if IS_GPU else 1.0
    with placement.group(rank, world_size, directory) as device:
        return all_deviations(Way(world_size, kind, str(device), slack), rank)


@pytest.mark.parametrize("ranks", [2, 1])
def test_synchronised_batchnorm_equals_the_joined_batch(
    ranks: int, placement: Placement, tmp_path: Path
) -> None:
    """SyncBatchNorm's kernels are right on one and two ranks, for uneven and empty batches,
    channels last, and half precision.
    """
    shortened = replace(placement, devices=placement.devices[:ranks])
    no_deviations: list[list[str]] = [[]] * ranks
    assert shortened.run(deviations_on_placement, tmp_path) == no_deviations


def run_one_value(rank: int, world_size: int, placement: Placement, directory: Path) -> Tensor:
    """Return the running statistics after a batch of one sample on the last rank only."""
    with placement.group(rank, world_size, directory) as device:
        layer = SyncBatchNorm(3).to(device)
        samples = torch.ones(rank, 3, device=device, requires_grad=True)
        with suppress(BatchNormError):  # on the CPU
            layer(samples).sum().backward()
        return torch.stack([layer.running_mean, layer.running_var]).cpu()


def test_one_value_on_all_ranks_together_changes_no_running_statistics(
    placement: Placement, tmp_path: Path
) -> None:
    """A variance of one value is not defined. The CPU raises, and the GPU continues."""
    expected = torch.stack([torch.zeros(3), torch.ones(3)])
    training.assert_same(placement.run(run_one_value, tmp_path), [expected] * 2)


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


@pytest.mark.parametrize(
    ("placement", "devices"),
    [
        pytest.param("gloo", [GPU, "cpu", GPU, "cpu"], id="gloo"),
        pytest.param("NCCL", [GPU, SECOND_GPU, SECOND_GPU, GPU], id="NCCL"),
    ],
    indirect=["placement"],
)
def test_a_rank_with_two_devices_learns_as_on_the_cpu(
    placement: Placement, devices: list[str], tmp_path: Path
) -> None:
    """With ``devices_per_rank=2`` (two GPUs, or over gloo a GPU and the CPU), the weights
    are those of ranks on the CPU.
    """
    if IS_GPU and SECOND_GPU in devices and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    results = placement.run(train_on_two_devices, tmp_path, devices)
    on_the_cpu = on_cpu(2).run(train_on_two_devices, tmp_path, ["cpu"] * len(devices))
    torch.testing.assert_close(results, on_the_cpu, **TOLERANCE)
