"""A rank with several of the Trainer's devices, for a model that spans them."""

from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.integration.data.resume import device_generators
from lightning_ddp_ext.rendezvous.process_context import current
from tests.harness import training


class Spanning(training.Net):
    """Puts its layers on the devices of its rank in turn; each of them is the CPU."""

    def configure_model(self) -> None:
        devices: list[torch.device] = self.trainer.strategy.rank_devices
        for index, layer in enumerate(self.layers):
            layer.to(devices[index % len(devices)])


class Run(NamedTuple):
    """A rank's devices, and the results that must not depend on their number."""

    devices: list[str]
    has_one_device: bool  # NCCL may connect by it
    results: dict[str, Any]


def train_and_resume(kind: training.Kind, directory: Path, per_rank: int) -> Run:
    """Train, resume and test on two ranks with this number of devices each."""
    L.seed_everything(1)
    files = directory / f"{per_rank} per rank"
    model = Spanning()
    checkpoint = ModelCheckpoint(files, save_last=True)
    options = {
        "strategy": {"devices_per_rank": per_rank},
        "devices": 2 * per_rank,
        "sync_batchnorm": True,
        "enable_checkpointing": True,
    }
    training.fit(kind, directory, model, checkpoint, **options)
    resumed = {"max_epochs": 3, "ckpt_path": files / "last.ckpt", **options}
    trainer = training.fit(kind, directory, model, checkpoint, **resumed)
    context = current()
    assert context is not None
    return Run(
        devices=[str(device) for device in trainer.strategy.rank_devices],
        has_one_device=context.groups.request.has_one_device,
        results={
            "world size": trainer.world_size,
            "weights": training.weights(model),
            "steps": trainer.global_step,
            "tested": trainer.test(model, verbose=False),
        },
    )


def test_two_devices_a_rank_learn_as_one_does(tmp_path: Path) -> None:
    """With four devices, two ranks train: sampling, SyncBatchNorm, checkpoints and
    metrics equal those of two ranks with one device each.
    """
    ones = training.on_ranks("ours", train_and_resume, tmp_path, 1)
    twos = training.on_ranks("ours", train_and_resume, tmp_path, 2)
    for one, two in zip(ones, twos, strict=True):
        assert one.devices == ["cpu"]
        assert two.devices == ["cpu", "cpu"]
        assert one.has_one_device
        assert not two.has_one_device
        training.assert_same(one.results, two.results)
        assert one.results["world size"] == 2


def with_gpus(count: int, *, local_rank: int = 0) -> DDPExtStrategy:
    """Return the strategy of a rank with two of so many GPUs."""
    gpus = [torch.device("cuda", number) for number in range(count)]
    strategy = DDPExtStrategy(devices_per_rank=2, parallel_devices=gpus)
    strategy.cluster_environment = LightningEnvironment()
    strategy.cluster_environment.local_rank = lambda: local_rank
    return strategy


def test_a_parameter_on_another_device_than_its_ranks_is_named() -> None:
    """The error names the parameter, its device, and the devices to choose from."""
    strategy = with_gpus(2)
    strategy.connect(training.Net())
    message = (
        r"layers\.0\.weight is on cpu; put it on one of self\.trainer\.strategy\.rank_devices"
        r" \(cuda:0, cuda:1\)"
    )
    with pytest.raises(ConfigurationError, match=message):
        strategy.model_to_device()


def test_generators_of_all_devices_of_a_rank_belong_to_its_training() -> None:
    """A part of the model on a rank's second GPU draws from that GPU's generator."""
    generators = tuple(torch.Generator() for _ in range(4))
    second_rank = with_gpus(4, local_rank=1)
    with patch.object(torch.cuda, "default_generators", generators):
        found = device_generators(second_rank)
    assert [generators.index(generator) for generator in found] == [2, 3]


@pytest.mark.lowest
@pytest.mark.parametrize(("devices", "valid"), [(7, 6), (1, 2)])
def test_devices_that_cannot_be_divided_are_refused(devices: int, valid: int) -> None:
    """The error names a valid number of devices."""
    message = rf"multiple of devices_per_rank=2 \(got {devices}\); write, .*devices={valid}"
    with pytest.raises(ConfigurationError, match=message):
        training.make_trainer(DDPExtStrategy(devices_per_rank=2), devices=devices)
