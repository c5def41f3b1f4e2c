"""A rank with several of the Trainer's devices, for a model that spans them."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_ddp_ext import ConfigurationError, DDPExtStrategy
from tests.harness import training


class Spanning(training.Net):
    """Puts its layers on the devices of its rank in turn; each of them is the CPU."""

    def configure_model(self) -> None:
        devices: list[torch.device] = self.trainer.strategy.rank_devices
        for index, layer in enumerate(self.layers):
            layer.to(devices[index % len(devices)])


def train_and_resume(
    kind: training.Kind, directory: Path, per_rank: int
) -> tuple[list[str], dict[str, Any]]:
    """Train, resume and test on two ranks with this number of devices each.

    Return a rank's devices, and the results that must not depend on their number.
    """
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
    results = {
        "world size": trainer.world_size,
        "weights": training.weights(model),
        "steps": trainer.global_step,
        "tested": trainer.test(model, verbose=False),
    }
    return [str(device) for device in trainer.strategy.rank_devices], results


def test_two_devices_a_rank_learn_as_one_does(tmp_path: Path) -> None:
    """With four devices, two ranks train: sampling, SyncBatchNorm, checkpoints and
    metrics equal those of two ranks with one device each.
    """
    ones = training.on_ranks("ours", train_and_resume, tmp_path, 1)
    twos = training.on_ranks("ours", train_and_resume, tmp_path, 2)
    assert [devices for devices, _ in ones] == [["cpu"]] * 2
    assert [devices for devices, _ in twos] == [["cpu", "cpu"]] * 2
    results = [results for _, results in ones]
    training.assert_same(results, [results for _, results in twos])
    assert results[0]["world size"] == 2


def test_a_parameter_on_another_device_than_its_ranks_is_named() -> None:
    """The error names the parameter, its device, and the devices to choose from."""
    gpus = [torch.device("cuda", number) for number in range(2)]
    strategy = DDPExtStrategy(devices_per_rank=2, parallel_devices=gpus)
    strategy.cluster_environment = LightningEnvironment()
    strategy.connect(training.Net())
    message = (
        r"layers\.0\.weight is on cpu; put it on one of self\.trainer\.strategy\.rank_devices"
        r" \(cuda:0, cuda:1\)"
    )
    with pytest.raises(ConfigurationError, match=message):
        strategy.model_to_device()


@pytest.mark.lowest
@pytest.mark.parametrize(("devices", "valid"), [(7, 6), (1, 2)])
def test_devices_that_cannot_be_divided_are_refused(devices: int, valid: int) -> None:
    """The error names a valid number of devices."""
    message = rf"multiple of devices_per_rank=2 \(got {devices}\); write, .*devices={valid}"
    with pytest.raises(ConfigurationError, match=message):
        training.make_trainer(DDPExtStrategy(devices_per_rank=2), devices=devices)
