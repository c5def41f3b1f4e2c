"""Comm hooks by name and as functions, on the CPU, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_ddp_ext import DDPExtStrategy, ring_all_reduce
from lightning_ddp_ext.errors import OptionError
from tests.harness.ranks import by_hand_env, run_ranks
from tests.harness.training import Net, assert_same, make_trainer, weights

HOOKS: dict[str, dict[str, Any]] = {
    "none": {},
    "ring": {"ddp_comm_hook": "ring"},
    "the function": {"ddp_comm_hook": ring_all_reduce},
    "fp16_compress": {"ddp_comm_hook": "fp16_compress"},
    "power_sgd": {"ddp_comm_hook": "power_sgd"},
    "wrapped": {"ddp_comm_hook": "ring", "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper},
}


def train(rank: int, world_size: int, directory: Path) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, options in HOOKS.items():
        L.seed_everything(1)
        model = Net()
        strategy = DDPExtStrategy(f"file://{directory}/meet", **options)
        make_trainer(strategy, devices=world_size, precision="64-true").fit(model)
        found[name] = {key: value for key, value in weights(model).items() if "running" not in key}
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    return run_ranks(train, 3, tmp_path_factory.mktemp("hooks"), env=by_hand_env(3), time_limit=90)


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_averages_the_gradients(name: str, trained: list[dict[str, dict[str, Tensor]]]) -> None:
    """As exactly as its numbers allow, and the same on every rank."""
    loose = name in ("fp16_compress", "wrapped")
    close = {"rtol": 2e-2, "atol": 2e-2} if loose else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(trained[0][name], trained[0]["none"], **close)
    for other in trained[1:]:
        assert_same(other[name], trained[0][name])
    if loose:
        assert not torch.equal(trained[0][name]["layers.0.weight"], trained[0]["none"]["layers.0.weight"])


def refused(rank: int, world_size: int) -> str:
    trainer = make_trainer(DDPExtStrategy(ddp_comm_hook="bf16_compress"), devices=world_size)
    with pytest.raises(OptionError) as caught:
        trainer.fit(Net())
    return str(caught.value)


def test_a_hook_for_gpus_alone_is_refused_on_the_cpu() -> None:
    (message,) = run_ranks(refused, 1)
    assert "ddp_comm_hook bf16_compress_hook cannot be used on the CPU: " in message
    assert "NCCL" in message
