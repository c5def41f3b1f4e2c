"""A comm hook averages the gradients of CPU ranks, as exactly as its number format allows."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.utils import parameters_to_vector

from tests.harness import training


def mean_over_ranks(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return default_hooks.allreduce_hook(None, bucket)


# Arguments of the strategy.
NO_HOOK: dict[str, Any] = {}
POWER_SGD_STATE = powerSGD_hook.PowerSGDState(process_group=None)  # exact for 1,000 steps
POWER_SGD = {"ddp_comm_hook": powerSGD_hook.powerSGD_hook, "ddp_comm_state": POWER_SGD_STATE}
FP16 = {"ddp_comm_hook": default_hooks.fp16_compress_hook}
WRAPPED_BY_FP16 = {
    "ddp_comm_hook": mean_over_ranks,
    "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
}

# Relative and absolute differences of numbers that were rounded.
IN_FLOAT64 = {"rtol": 1e-9, "atol": 1e-9}
IN_FP16 = {"rtol": 2e-2, "atol": 2e-2}


def train_with_hooks(kind: training.Kind, directory: Path) -> list[Tensor]:
    """Return all parameters after a training in float64 with each hook."""
    learned = []
    for strategy in (NO_HOOK, POWER_SGD, FP16, WRAPPED_BY_FP16):
        L.seed_everything(1)
        model = training.Net()
        training.fit(kind, directory, model, strategy=strategy, devices=3, precision="64-true")
        learned.append(parameters_to_vector(model.parameters()).detach())
    assert POWER_SGD_STATE.iter > 0, "the hook did not get its state"
    return learned


def test_a_comm_hook_averages_the_gradients(tmp_path: Path) -> None:
    """Ranks learn the same with a hook, and as much as its number format allows of what
    they learn without one.
    """
    by_rank = training.on_ranks("ours", train_with_hooks, tmp_path, world_size=3)
    for learned in by_rank:
        training.assert_same(learned, by_rank[0])
    without, power_sgd, fp16, wrapped_by_fp16 = by_rank[0]
    torch.testing.assert_close(power_sgd, without, **IN_FLOAT64)
    for rounded in (fp16, wrapped_by_fp16):
        torch.testing.assert_close(rounded, without, **IN_FP16)
        assert not torch.allclose(rounded, without, **IN_FLOAT64), "the hook was not called"
