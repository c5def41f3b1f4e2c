"""Ranks with several devices each; on the CPU every device is the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.errors import OptionError
from tests.harness.ranks import by_hand_env, run_ranks
from tests.harness.training import Net, assert_same, make_trainer, weights


class Parts(Net):
    """Puts its layers on the devices of its rank in turn."""

    def configure_model(self) -> None:
        strategy: Any = self.trainer.strategy
        for index, layer in enumerate(self.layers):
            layer.to(strategy.rank_devices[index % len(strategy.rank_devices)])


def train(rank: int, world_size: int, directory: Path, per_rank: int) -> dict[str, Any]:
    L.seed_everything(1)
    files = directory / str(per_rank)
    model, checkpoint = Parts(), ModelCheckpoint(files, save_last=True)

    def options() -> dict[str, Any]:
        strategy = DDPExtStrategy(f"file://{directory}/meet", devices_per_rank=per_rank)
        return {"strategy": strategy, "devices": 2 * per_rank, "enable_checkpointing": True, "callbacks": [checkpoint]}

    trainer = make_trainer(**options(), sync_batchnorm=True)
    trainer.fit(model)
    strategy: Any = trainer.strategy
    devices = [str(device) for device in strategy.rank_devices]
    again = make_trainer(**options(), max_epochs=3, sync_batchnorm=True)
    again.fit(model, ckpt_path=files / "last.ckpt")
    tested = again.test(model, verbose=False)
    assert devices == ["cpu"] * per_rank
    assert strategy.world_size == 2
    return {"weights": weights(model), "step": again.global_step, "tested": tested}


def test_two_devices_a_rank_learn_as_one_does(tmp_path: Path) -> None:
    """Four devices are two ranks: sampling, SyncBatchNorm, checkpoints and metrics are those of two ranks."""
    two, one = (run_ranks(train, 2, tmp_path, per_rank, env=by_hand_env(2)) for per_rank in (2, 1))
    assert_same(two, one)


def test_a_part_that_is_on_no_device_of_its_rank_is_named() -> None:
    strategy = DDPExtStrategy(devices_per_rank=2, parallel_devices=[torch.device("cuda", 0), torch.device("cuda", 1)])
    strategy.cluster_environment = LightningEnvironment()
    strategy.connect(Net())
    words = r"layers\.0\.weight is on cpu; put it on one of self\.trainer\.strategy\.rank_devices \(cuda:0, cuda:1\)"
    with pytest.raises(OptionError, match=words):
        strategy.model_to_device()
