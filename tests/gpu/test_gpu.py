"""What needs CUDA: NCCL on every GPU there is, and two ranks that share one GPU over gloo, which NCCL refuses.

`make gpu` runs these and nothing else does. Numbers are compared with the same training on the CPU, or with stock `ddp`
on the same GPUs, up to the order of additions. `DDPX_GPU_TESTS_ON=cpu` runs the same functions without a GPU, with gloo
by another name in NCCL's place: that shows that the tests work, and nothing of CUDA.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_ddp_ext import (
    DDPExtStrategy,
    HangWatchdog,
    RankZeroCheckpointIO,
    SyncBatchNormConversion,
    gather_predictions,
)
from lightning_ddp_ext.checkpoint.rank_notes import Kind
from lightning_ddp_ext.errors import RankAbsentError, RankDiedError, RankFailedError, RankHungError
from lightning_ddp_ext.integration.recorder import Recorder
from tests.harness.ranks import by_hand_env, free_port, launch_ranks, run_ranks
from tests.harness.training import At, Net, backend, make_trainer, weights
from tests.integration.continuing import Numbers, Training, generations
from tests.integration.rescuing import NAME, Kill, Plan, survive
from tests.supervision.model import boom, die, wait_for_ever

pytestmark = pytest.mark.gpu

GPU = os.environ.get("DDPX_GPU_TESTS_ON", "cuda:0")
HAS_GPU = GPU != "cpu"
NCCL = "nccl" if HAS_GPU else "nccl_stand_in"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def gpus() -> int:
    """Return the number of GPUs; skip or fail without one."""
    count = torch.cuda.device_count() if HAS_GPU else 2
    if count == 0:
        pytest.skip("needs a CUDA device")
    return count


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    return run_ranks(function, world_size, *args, env=by_hand_env(world_size))


def strategy(directory: Path, device: str = GPU, **options: Any) -> DDPExtStrategy:
    """Two ranks on one device, over gloo."""
    chosen = {"parallel_devices": [torch.device(device)] * 2, "process_group_backend": "gloo", **options}
    return DDPExtStrategy(f"file://{directory}/rank0", **chosen)


def strategy_of_nccl(directory: Path, **options: Any) -> DDPExtStrategy:
    """Start a rank on each GPU."""
    return DDPExtStrategy(f"file://{directory}/rank0", process_group_backend=backend(NCCL), **options)


def trainer_on(chosen: Any, **options: Any) -> L.Trainer:
    return make_trainer(chosen, accelerator="auto", devices="auto", **options)


def on_cpu(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in values.items()}


class Measured(Net):
    """Logs plain values and a metric, of tensors where the model is."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.loss(batch)
        self.mean.update(batch[1])
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        self.log("largest", batch[1].max(), sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)
        self.log("mean", self.mean)
        return loss


def train(rank: int, world_size: int, directory: Path, device: str, sync: bool) -> dict[str, Any]:
    L.seed_everything(1)
    model = Measured()
    callbacks = [SyncBatchNormConversion()] if sync else []
    trainer = trainer_on(strategy(directory, device), callbacks=callbacks)
    trainer.fit(model)
    tested = trainer.test(model, verbose=False)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"weights": on_cpu(weights(model)), "logged": logged, "tested": tested}


@pytest.mark.parametrize("sync", [False, True])
def test_two_ranks_on_one_gpu_learn_as_on_the_cpu(sync: bool, tmp_path: Path) -> None:
    """Weights, running statistics, logged values, batched reductions and metrics, with and without SyncBatchNorm."""
    on_gpu, on_host = (on_ranks(train, 2, tmp_path, device, sync) for device in (GPU, "cpu"))
    torch.testing.assert_close(on_gpu, on_host, **TOLERANCE)
    first, second = (result["weights"] for result in on_gpu)
    torch.testing.assert_close(first["layers.0.weight"], second["layers.0.weight"], rtol=0, atol=0)


class Parts(Net):
    """Has its parameters, all on one type of device as DDP requires, on its rank's first device; computes on both."""

    def configure_model(self) -> None:
        self.first, self.second = self.trainer.strategy.rank_devices  # type: ignore[attr-defined]
        self.layers.to(self.first)

    def forward(self, x: Tensor) -> Tensor:
        assert x.device == self.first
        hidden = self.layers[:2](x).to(self.second)
        out: Tensor = self.layers[3](self.layers[2](hidden).to(self.first))
        return out


def train_on_two_devices(rank: int, world_size: int, directory: Path, first: str) -> dict[str, Tensor]:
    L.seed_everything(1)
    model, devices = Parts(), [torch.device(first), torch.device("cpu")] * 2
    trainer_on(strategy(directory, parallel_devices=devices, devices_per_rank=2)).fit(model)
    return on_cpu(weights(model))


def test_a_rank_with_a_gpu_and_the_cpu_learns_as_on_the_cpu(tmp_path: Path) -> None:
    """Batches go to the first of its devices."""
    on_gpu, on_host = (on_ranks(train_on_two_devices, 2, tmp_path, first) for first in (GPU, "cpu"))
    torch.testing.assert_close(on_gpu, on_host, **TOLERANCE)


def train_with_nccl(rank: int, world_size: int, directory: Path, kind: str) -> dict[str, Any]:
    L.seed_everything(1)
    model, checkpoint = Measured(), ModelCheckpoint(directory / kind, save_last=True)

    def chosen() -> DDPStrategy:  # a new one for each Trainer
        return strategy_of_nccl(directory) if kind == "ours" else DDPStrategy()

    kind_of_device = {"devices": world_size, "accelerator": "gpu" if HAS_GPU else "cpu"}
    options = {"callbacks": [checkpoint], "enable_checkpointing": True, **kind_of_device}
    trainer = make_trainer(chosen(), **options)
    trainer.fit(model)
    formed = dist.get_backend()
    again = make_trainer(chosen(), **{**options, "max_epochs": 3})
    again.fit(model, ckpt_path=checkpoint.last_model_path)
    again.predict(model)
    learned = {"weights": on_cpu(weights(model)), "step": again.global_step, "predicted": gather_predictions(again)}
    return {"learned": learned, "backend": formed}


def test_nccl_on_all_gpus_gives_the_numbers_of_stock(gpus: int, tmp_path: Path) -> None:
    """Training, saving, resuming, and predictions on rank 0, with one rank per GPU."""
    ours = on_ranks(train_with_nccl, gpus, tmp_path, "ours")
    variables = by_hand_env(gpus, port=free_port())
    stock = run_ranks(train_with_nccl, gpus, tmp_path, "stock", env=variables)
    torch.testing.assert_close(*([rank["learned"] for rank in ranks] for ranks in (ours, stock)), **TOLERANCE)
    assert ours[0]["backend"] == NCCL


def resume_dropout(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    options = {"accelerator": "auto", "devices": "auto"}
    chosen = {"parallel_devices": [torch.device(GPU)] * world_size, "process_group_backend": "gloo"}
    loaders = lambda: DataLoader(Numbers(16), 2, shuffle=True)  # noqa: E731
    return generations(Training(loaders, directory, world_size, options, chosen), ["train_batch_end-3"])


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_run_draws_the_random_numbers_of_the_gpu_that_were_next(world_size: int, tmp_path: Path) -> None:
    """Dropout continues, so that weights are those of a run without a stop."""
    assert on_ranks(resume_dropout, world_size, tmp_path) == [{}] * world_size


# What happens on rank 1, and what rank 0 raises because of it.
FAULTS: dict[str, tuple[Callable[[], None], type[RankFailedError], str]] = {
    "raises": (boom, RankFailedError, "failed, so this rank stops: BoomError: no such layer"),
    "dies": (die, RankDiedError, "died: its process ended unexpectedly"),
    "hangs": (wait_for_ever, RankHungError, r"never entered \w+ #\d+ .*; it is in training_step, .*test_gpu.py:"),
    "is late": (wait_for_ever, RankAbsentError, "has waited in a collective for its timeout of 2 s, but rank 1 .*:"),
}


class Faulty(Net):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def training_step(self, batch: Any, index: int) -> Any:
        if index == 2 and self.global_rank == 1:
            FAULTS[self.fault][0]()
        return super().training_step(batch, index)


def go_wrong(rank: int, world_size: int, directory: Path, over: str, fault: str) -> None:
    make = strategy if over == "gloo" else strategy_of_nccl
    chosen = make(directory, timeout=2 if fault == "is late" else 600)
    timeouts = chosen.rendezvous.timeouts
    chosen.rendezvous.timeouts = replace(timeouts, grace=dict.fromkeys(timeouts.grace, 10.0))
    callbacks: list[L.Callback] = [OnExceptionCheckpoint(directory, "rest")]
    callbacks += [HangWatchdog(2, directory=directory)] if fault == "hangs" else []
    devices: Any = "auto" if over == "gloo" else 2
    make_trainer(chosen, accelerator="auto", devices=devices, callbacks=callbacks, enable_checkpointing=True).fit(
        Faulty(fault)
    )


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("over", ["gloo", "NCCL"])
def test_messages_name_the_rank_that_fails(over: str, fault: str, gpus: int, tmp_path: Path) -> None:
    """The other rank raises it, before torch's watchdog for NCCL ends the process, and saves no partial sums."""
    if over == "NCCL" and gpus < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    first, second = launch_ranks(go_wrong, 2, tmp_path, over, fault, env=by_hand_env(2))
    _, error, sentence = FAULTS[fault]
    assert (first.exit_code, second.exit_code) == (1, -signal.SIGKILL if fault == "dies" else 1), first.story()
    assert first.error is not None
    assert type(first.error.exception) is error, first.story()
    assert re.search(sentence, first.error.message), first.story()
    assert (tmp_path / "rest.ckpt").exists() == (over == "gloo")


def parameters(module: L.LightningModule) -> dict[str, Tensor]:
    """Return the parameters, on the CPU: buffers of BatchNorm are each rank's own."""
    return {name: parameter.detach().cpu().clone() for name, parameter in module.named_parameters()}


def save_and_restore(rank: int, world_size: int, directory: Path, background: bool, restored_on: str) -> bool:
    """Save in mid-training, train on, and restore on another device what was saved."""
    at_save: dict[str, Tensor] = {}

    def save(trainer: L.Trainer) -> None:
        at_save.update(parameters(trainer.lightning_module))
        trainer.save_checkpoint(directory / "it.ckpt")

    after_step_2, plugin = At("on_train_batch_end", save, earlier=1), RankZeroCheckpointIO(background=background)
    trainer_on(strategy(directory), callbacks=[after_step_2], plugins=[plugin]).fit(Net())
    content = torch.load(directory / "it.ckpt", weights_only=True)  # to the devices that the file names
    assert {str(weight.device) for weight in content["state_dict"].values()} == {GPU}
    saved = on_cpu({name: content["state_dict"][name] for name in at_save})
    torch.testing.assert_close(saved, at_save, rtol=0, atol=0)

    model = Net()
    momenta: list[Tensor] = []

    def look(trainer: L.Trainer) -> None:
        momenta.extend(state["momentum_buffer"] for state in trainer.optimizers[0].state.values())
        torch.testing.assert_close(parameters(model), at_save, rtol=0, atol=0)

    trainer = trainer_on(strategy(directory, restored_on), callbacks=[At("on_train_start", look)], max_epochs=2)
    trainer.fit(model, ckpt_path=directory / "it.ckpt")
    return bool(momenta) and all(str(momentum.device) == restored_on for momentum in momenta)


@pytest.mark.parametrize("restored_on", [GPU, "cpu"])
@pytest.mark.parametrize("background", [False, True])
def test_a_gpu_checkpoint_is_complete_and_loads_on_any_device(
    background: bool, restored_on: str, tmp_path: Path
) -> None:
    """Steps after the start of a background save are not in the file; optimiser states follow their parameters."""
    assert on_ranks(save_and_restore, 2, tmp_path, background, restored_on) == [True, True]


def test_a_killed_rank_costs_no_step(tmp_path: Path) -> None:
    """With dropout and BatchNorm on the GPU, the resumed runs end with the weights of an undisturbed run."""
    # The variables of a launcher name the ranks.
    shared = {"start_method": "popen", "parallel_devices": [torch.device(GPU)] * 2, "process_group_backend": "gloo"}
    plan = Plan(strategy=shared, trainer={"accelerator": "auto", "devices": "auto"})
    kills = [Kill("on_after_backward", 9, [0]), Kill("on_validation_batch_end", 1), Kill("on_train_batch_end", 6, [0])]
    results = []
    for name, chosen in (("undisturbed", []), ("disturbed", kills)):
        (tmp_path / name).mkdir()
        results.append(survive(2, plan, chosen, tmp_path / name, env=by_hand_env(2)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


class Wide(Net):
    """Has gradients in several buckets, so that a rank can be killed between their sums."""

    def __init__(self) -> None:
        super().__init__()
        wide = [nn.Linear(1024, 1024) for _ in range(8)]
        self.layers = nn.Sequential(nn.Linear(4, 1024), *wide, nn.Linear(1024, 1))


@contextmanager
def unguarded(recorder: Recorder) -> Iterator[None]:
    recorder.note(Kind.BATCH)
    yield


def train_wide(
    rank: int, world_size: int, directory: Path, milliseconds: float | None = None, is_guarded: bool = True
) -> dict[int, Any]:
    """Return the weights after each step; with ``milliseconds`` rank 1 is killed then, in its fifth backward pass."""
    L.seed_everything(1)
    model, steps = Wide(), {}

    def kill(trainer: L.Trainer) -> None:
        if milliseconds is not None and trainer.global_rank == 1:
            threading.Timer(milliseconds / 1000, die).start()

    def record(trainer: L.Trainer, *_: Any) -> None:
        steps[trainer.global_step] = on_cpu(weights(model)) if milliseconds is None else None

    callbacks = [At("on_before_backward", kill, earlier=4), LambdaCallback(on_train_batch_end=record)]
    chosen = strategy_of_nccl(directory, rescue_checkpoint=directory / NAME)
    with nullcontext() if is_guarded else patch.object(Recorder, "backward", unguarded):
        make_trainer(chosen, accelerator="auto", devices=2, callbacks=callbacks, max_epochs=4).fit(model)
    return steps


@pytest.mark.parametrize("is_guarded", [True, False])
def test_partial_sums_of_an_aborted_collective_are_not_saved(is_guarded: bool, gpus: int, tmp_path: Path) -> None:
    """Without the wait after the backward pass some are: the kills happen at the right moments."""
    if gpus < 2 or not (HAS_GPU or is_guarded):
        pytest.skip("needs two GPUs")
    steps, found = on_ranks(train_wide, 2, tmp_path)[0], []
    for number in range(30 if HAS_GPU else 3):
        directory = tmp_path / f"{number}"
        directory.mkdir()
        launch_ranks(train_wide, 2, directory, number / 3, is_guarded, env=by_hand_env(2))
        content = torch.load(directory / NAME, weights_only=True, map_location="cpu")
        step, held = content["global_step"], content["state_dict"]
        found.append(all(torch.allclose(held[name], value, **TOLERANCE) for name, value in steps[step].items()))
    assert all(found) == is_guarded
