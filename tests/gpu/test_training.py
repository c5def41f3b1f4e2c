"""Training on a GPU gives the numbers of stock ``ddp`` there, or of the CPU, and
continues after stops and deaths.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_ddp_ext import (
    HangWatchdog,
    RankZeroCheckpointIO,
    SyncBatchNorm,
    SyncBatchNormConversion,
    gather_predictions,
)
from tests.batchnorm.test_joined_batch import Way, all_deviations
from tests.gpu import placement as places
from tests.gpu.placement import GPU, IS_GPU, Placement
from tests.harness import training
from tests.harness.ranks import launch_ranks
from tests.harness.training import Net
from tests.integration import continuing, rescuing
from tests.integration.rescuing import Kill, Plan

pytestmark = pytest.mark.gpu


def on_cpu(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in values.items()}


class Measured(Net):
    """Logs values and a metric, from tensors on the model's device."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        loss = self.loss(batch)
        self.mean.update(batch[1])
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        self.log(
            "largest", batch[1].max(), sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True
        )
        self.log("mean", self.mean)
        return loss


def train_in_group(
    rank: int,
    world_size: int,
    placement: Placement,
    directory: Path,
    kind: training.Kind,
    *args: Any,
) -> dict[str, Any]:
    """Run all stages; on the CPU stock needs a group that is open."""
    is_group_open = kind == "stock" and not IS_GPU
    with training.stock_group(rank, world_size, directory) if is_group_open else nullcontext():
        return run_all_stages(rank, placement, directory, kind, *args)


def run_all_stages(
    rank: int,
    placement: Placement,
    directory: Path,
    kind: training.Kind,
    ranks_per_batchnorm_group: int | None,
) -> dict[str, Any]:
    """Train, save, resume, test, predict and gather; return the results."""
    L.seed_everything(1)
    model = Measured()
    saver = ModelCheckpoint(directory / kind / placement.backend, save_last=True)
    options: dict[str, Any] = {"callbacks": [saver], "enable_checkpointing": True}
    if ranks_per_batchnorm_group and kind == "ours":
        conversion = SyncBatchNormConversion(process_group=ranks_per_batchnorm_group)
        options["callbacks"].append(conversion)
        options["strategy"] = {"broadcast_buffers": False}
    elif ranks_per_batchnorm_group:
        options["sync_batchnorm"] = True
    placement.trainer(directory, kind, **options).fit(model)
    assert dist.get_backend() == placement.backend
    resumed = placement.trainer(directory, kind, max_epochs=3, **options)
    resumed.fit(model, ckpt_path=saver.last_model_path)
    results: dict[str, Any] = {
        "step": resumed.global_step,
        "weights": on_cpu(training.weights(model)),
    }
    results["logged"] = {name: float(value) for name, value in resumed.callback_metrics.items()}
    results["tested"] = resumed.test(model, verbose=False)
    resumed.strategy.barrier("between")
    resumed.predict(model)
    results["predicted"] = gather_predictions(resumed)
    own = torch.full((2,), float(rank), device=placement.devices[rank])
    results["gathered"] = resumed.strategy.all_gather(own).cpu()
    return results


def reference_for(
    placement: Placement, ranks_per_batchnorm_group: int | None
) -> tuple[Placement, training.Kind]:
    """Return where, and with which strategy, the expected numbers are computed."""
    on_cpu = Placement("gloo", ("cpu",) * len(placement.devices))
    if placement.backend == "gloo":
        return on_cpu, "ours"
    if IS_GPU:
        return placement, "stock"
    # Stock has no SyncBatchNorm for the CPU.
    return on_cpu, "ours" if ranks_per_batchnorm_group else "stock"


@pytest.mark.parametrize(
    ("placement", "ranks", "ranks_per_batchnorm_group"),
    [("gloo", 2, None), ("gloo", 4, 2), ("NCCL", 2, None), ("NCCL", 2, 2)],
    indirect=["placement"],
)
def test_ranks_on_a_gpu_learn_as_elsewhere(
    placement: Placement, ranks: int, ranks_per_batchnorm_group: int | None, tmp_path: Path
) -> None:
    """Training, batched logging, metrics, SyncBatchNorm, saving, resuming, barrier,
    gathering: as on CPU, or as stock.

    Over gloo the numbers are those of the CPU; over NCCL, those of stock ``ddp`` on the
    same GPUs. Groups of two ranks among four share statistics.
    """
    placement = replace(placement, devices=placement.devices * (ranks // 2))
    reference, kind = reference_for(placement, ranks_per_batchnorm_group)
    found = placement.run(train_in_group, tmp_path, "ours", ranks_per_batchnorm_group)
    expected = reference.run(train_in_group, tmp_path, kind, ranks_per_batchnorm_group)
    torch.testing.assert_close(found, expected, **places.TOLERANCE)
    training.assert_same(*(result["weights"]["layers.0.weight"] for result in found[:2]))


class AlwaysJoint(SyncBatchNorm):
    """Computes with one rank as with several."""

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self._normalise(input) if self.training else super().forward(input)
        return output


def deviations(rank: int, world_size: int, placement: Placement, directory: Path) -> list[str]:
    device = placement.devices[rank]
    if IS_GPU:
        torch.cuda.set_device(device)
    kind = SyncBatchNorm if world_size > 1 else AlwaysJoint
    slack = 16.0 if IS_GPU else 1.0
    way = Way(kind, world_size, device, training.backend(placement.backend), slack)
    return all_deviations(rank, world_size, directory, way)


@pytest.mark.parametrize("is_alone", [False, True], ids=["2 ranks", "1 rank"])
def test_synchronised_batchnorm_equals_the_joined_batch(
    is_alone: bool, placement: Placement, tmp_path: Path
) -> None:
    """SyncBatchNorm's kernels: 1 and 2 ranks, uneven and empty batches, channels last,
    half precision.
    """
    chosen = replace(placement, devices=placement.devices[:1]) if is_alone else placement
    assert chosen.run(deviations, tmp_path) == [[]] * len(chosen.devices)


class Parts(Net):
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
    model = Parts()
    chosen = {
        "parallel_devices": [torch.device(device) for device in devices],
        "devices_per_rank": 2,
    }
    placement.trainer(directory, strategy=chosen).fit(model)
    return on_cpu(training.weights(model))


def test_a_rank_with_two_devices_learns_as_on_the_cpu(placement: Placement, tmp_path: Path) -> None:
    """`devices_per_rank=2` with two GPUs, or over gloo with a GPU and the CPU."""
    has_two_gpus = torch.cuda.device_count() > 1
    if IS_GPU and placement is not places.GLOO and not has_two_gpus:
        pytest.skip("needs two GPUs")
    second = {"cuda:0": "cuda:1", "cuda:1": "cuda:0"} if has_two_gpus else {}
    pairs = [each for first in placement.devices for each in (first, second.get(first, "cpu"))]
    found = placement.run(train_on_two_devices, tmp_path, pairs)
    expected = places.GLOO.run(train_on_two_devices, tmp_path, ["cpu"] * len(pairs))
    torch.testing.assert_close(found, expected, **places.TOLERANCE)


def resume_with_dropout(
    rank: int, world_size: int, placement: Placement, directory: Path
) -> dict[str, str]:
    def loaders() -> DataLoader[Any]:
        return DataLoader(continuing.Numbers(16), 2, shuffle=True)

    options = {"accelerator": "auto", "devices": "auto"}
    resuming = continuing.Training(loaders, directory, world_size, options, placement.options)
    return continuing.generations(resuming, ["train_batch_end-3"])


@pytest.mark.parametrize("chosen", [places.GLOO, places.ALONE], ids=["gloo", "1 rank"])
def test_a_resumed_run_draws_the_random_numbers_that_were_next(
    chosen: Placement, tmp_path: Path
) -> None:
    """A resumed run with dropout ends with the weights of a run without a stop."""
    assert chosen.run(resume_with_dropout, tmp_path) == [{}] * len(chosen.devices)


class Scaled(rescuing.Net):
    """Has the scale of a ``GradScaler`` in a buffer, so that it is compared as a weight
    is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(()))

    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        self.scale.fill_(self.trainer.precision_plugin.scaler.get_scale())
        return super().training_step(batch, index)


AFTER_BACKWARD = Kill("on_after_backward", 9, [0])
IN_A_SAVE = Kill("writing", 1, [0])
STOP = Kill("on_train_batch_end", 3, by="sigterm")
CHAINS = [
    pytest.param(
        "gloo",
        False,
        [AFTER_BACKWARD, Kill("on_validation_batch_end", 1), IN_A_SAVE, STOP],
        id="gloo",
    ),
    pytest.param("NCCL", False, [AFTER_BACKWARD, IN_A_SAVE, STOP], id="NCCL"),
    pytest.param("gloo", True, [AFTER_BACKWARD, STOP], id="float16"),
]


def plan_on(placement: Placement, is_scaled: bool = False, **strategy: Any) -> Plan:
    """Return the plan of a run on a GPU; with float16, the scale grows every eight
    steps.
    """
    trainer: dict[str, Any] = {"accelerator": "auto", "devices": "auto"}
    if is_scaled:
        kind = GPU.partition(":")[0]
        scaler = torch.amp.GradScaler(kind, init_scale=256.0, growth_interval=8)
        trainer["plugins"] = [MixedPrecision("16-mixed", kind, scaler)]
    # The variables of a launcher name the ranks.
    shared = {
        "start_method": "popen",
        "parallel_devices": [torch.device(each) for each in placement.devices],
    }
    return Plan(
        strategy={**shared, "process_group_backend": placement.backend, **strategy},
        trainer=trainer,
        kind=Scaled if is_scaled else None,
    )


@pytest.mark.parametrize(("placement", "is_scaled", "kills"), CHAINS, indirect=["placement"])
def test_a_killed_rank_costs_no_step(
    placement: Placement, is_scaled: bool, kills: Sequence[Kill], tmp_path: Path
) -> None:
    """Runs resumed after a killed rank, a killed save and SIGTERM end as an undisturbed
    run, to the last bit.
    """
    plan = plan_on(placement, is_scaled)
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    undisturbed = rescuing.survive(2, plan, (), tmp_path / "undisturbed", env=placement.variables)
    disturbed = rescuing.survive(2, plan, kills, tmp_path / "disturbed", env=placement.variables)
    training.assert_same(disturbed, undisturbed)


@pytest.mark.parametrize("start_method", ["spawn", "forkserver", "fork"])
def test_each_start_method_trains_on_a_gpu(start_method: str, tmp_path: Path) -> None:
    """Ranks started by spawn, forkserver and fork learn as ranks that were started by
    hand.
    """
    for name in ("by hand", "started"):
        (tmp_path / name).mkdir()
    env = places.GLOO.variables
    by_hand, _ = launch_ranks(
        rescuing.train, 2, plan_on(places.GLOO), tmp_path / "by hand", env=env
    )
    plan = plan_on(places.GLOO, start_method=start_method)
    [started] = launch_ranks(rescuing.train, 1, plan, tmp_path / "started", env={})
    assert started.exit_code == 0, started.story()
    training.assert_same(started.result, by_hand.result)


class Trained(NamedTuple):
    """What a rank has after a training that saved."""

    weights: dict[str, Tensor]
    gpus_in_use: list[int]  # on which this process has a context
    devices_in_file: set[str]


def save_in_training(
    rank: int,
    world_size: int,
    placement: Placement,
    path: Path,
    model_type: type[Net],
    is_background: bool,
) -> Trained:
    """Save after the second step, and train on; threads read the device meanwhile."""
    L.seed_everything(1)
    model = model_type()
    save = training.At(
        "on_train_batch_end", partial(L.Trainer.save_checkpoint, filepath=path), earlier=1
    )
    placement.trainer(
        path.parent,
        strategy={"rescue_checkpoint": path.parent / "last-rescued.ckpt"},
        plugins=[RankZeroCheckpointIO(background=is_background)],
        callbacks=[save, HangWatchdog(300, directory=path.parent)],
    ).fit(model)
    in_use = [
        number
        for number in range(torch.cuda.device_count())
        if torch._C._cuda_hasPrimaryContext(number)
    ]
    saved = torch.load(path)["state_dict"].values() if rank == 0 else ()
    return Trained(on_cpu(training.weights(model)), in_use, {str(value.device) for value in saved})


def devices_of_momenta(
    rank: int, world_size: int, placement: Placement, directory: Path, path: Path
) -> set[str]:
    """Return where a resumed run has the optimiser's states."""
    found: set[str] = set()

    def look(trainer: L.Trainer) -> None:
        states = trainer.optimizers[0].state.values()
        found.update(str(state["momentum_buffer"].device) for state in states)

    looks = training.At("on_train_start", look)
    placement.trainer(directory, callbacks=[looks]).fit(places.Wide(), ckpt_path=path)
    return found


GPUS_IN_REVERSE = Placement(places.NCCL, ("cuda:1", "cuda:0") if IS_GPU else ("cpu", "cpu"))
ON_CPU = Placement("gloo", ("cpu", "cpu"))


@pytest.mark.parametrize("chosen", [places.GLOO, GPUS_IN_REVERSE], ids=["one GPU", "two GPUs"])
def test_a_background_save_has_the_content_of_a_foreground_save(
    chosen: Placement, tmp_path: Path
) -> None:
    """Checkpoints saved in the background while training continues are whole, and load
    on the GPU and the CPU.

    Of two GPUs each rank uses only its own, also where rank 0 has the second one.
    """
    if IS_GPU and torch.cuda.device_count() < len({*chosen.devices}):
        pytest.skip("needs two GPUs")
    paths = [tmp_path / f"{each}.ckpt" for each in ("foreground", "background", "of net")]
    chosen.run(save_in_training, paths[0], places.Wide, False)
    trained = chosen.run(save_in_training, paths[1], places.Wide, True)
    foreground, background = (torch.load(path, map_location="cpu") for path in paths[:2])
    training.assert_same(background["state_dict"], foreground["state_dict"])
    training.assert_same(background["optimizer_states"], foreground["optimizer_states"])

    numbers = [[torch.device(each).index] if IS_GPU else [] for each in chosen.devices]
    assert [each.gpus_in_use for each in trained] == numbers
    assert trained[0].devices_in_file == {chosen.devices[0]}

    for placement in (chosen, ON_CPU):
        restored = placement.run(devices_of_momenta, tmp_path, paths[1])
        assert restored == [{device} for device in placement.devices]

    # Wide is too large to learn; its numbers overflow.
    here, elsewhere = (
        [each.weights for each in placement.run(save_in_training, paths[2], Net, True)]
        for placement in (chosen, ON_CPU)
    )
    torch.testing.assert_close(here, elsewhere, **places.TOLERANCE)
    training.assert_same(here[0]["layers.0.weight"], here[1]["layers.0.weight"])
