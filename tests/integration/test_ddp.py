"""DDP averages gradients by a comm hook, also on CPU ranks if the hook works there, and its
error about unused parameters names them.
"""

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
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


LEFT_OUT = {
    "bf16_compress_hook is left out on CPU: BF16": {
        "ddp_comm_hook": default_hooks.bf16_compress_hook
    },
    "bf16_compress_wrapper_hook is left out on CPU: BF16": {
        "ddp_comm_hook": mean_over_ranks,
        "ddp_comm_wrapper": default_hooks.bf16_compress_wrapper,
    },
    "post_localSGD_hook is left out on CPU: its PostLocalSGDState needs subgroup=": {
        "ddp_comm_hook": post_localSGD_hook.post_localSGD_hook,
        "ddp_comm_state": post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=2),
        "model_averaging_period": 100,
    },
}


def train_without_hooks(
    kind: training.Kind, directory: Path
) -> tuple[list[list[str]], list[Tensor]]:
    """Return the warnings of each training, and the parameters after it."""
    warnings = []
    learned = []
    for strategy in (NO_HOOK, *LEFT_OUT.values()):
        L.seed_everything(1)
        model = training.Net()
        with training.warnings_with("left out") as warned:
            training.fit(kind, directory, model, strategy=strategy)
        warnings.append(warned)
        learned.append(parameters_to_vector(model.parameters()).detach())
    return warnings, learned


def test_a_comm_hook_that_needs_gpus_is_left_out_on_cpu(tmp_path: Path) -> None:
    """Rank 0 names it and the reason once, and the ranks learn as without it."""
    (first, learned), (second, _) = training.on_ranks("ours", train_without_hooks, tmp_path)
    assert [len(warned) for warned in first] == [0] + [1] * len(LEFT_OUT)
    for [warning], start in zip(first[1:], LEFT_OUT, strict=True):
        assert warning.startswith(f"ddp_comm_hook {start}")
    assert second == [[], *([] for _ in LEFT_OUT)]
    training.assert_same(learned[1:], learned[:1] * len(LEFT_OUT))


# Unused parameters.

SPARE_LAYERS = 6


class Forgetful(training.Net):
    """Leaves its spare layers out of the loss on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.ModuleList(nn.Linear(1, 1) for _ in range(SPARE_LAYERS))

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.global_rank == 0:
            loss = loss + sum(layer(batch[1]).mean() for layer in self.spare)
        return loss


def freeze_first_layer(trainer: L.Trainer) -> None:
    model: Any = trainer.lightning_module
    model.layers[0].requires_grad_(False)


FREEZE = training.At("on_train_start", freeze_first_layer, ranks=[1])
FIRST_LAYER = ["layers.0.weight", "layers.0.bias"]
SPARE = [f"spare.{layer}.{name}" for layer in range(SPARE_LAYERS) for name in ("weight", "bias")]


@pytest.mark.parametrize(
    ("callbacks", "unused"),
    [
        pytest.param([], SPARE, id="unused"),
        # DDP waits for parameters that were frozen after it was built.
        pytest.param([FREEZE], FIRST_LAYER + SPARE, id="unused and frozen"),
    ],
)
def test_unused_parameters_are_named(
    callbacks: list[L.Callback], unused: list[str], tmp_path: Path
) -> None:
    """The error names the first ten, the number of others, and the option that allows it;
    the other rank also exits.
    """
    first, second = training.fit_on(2, tmp_path, Forgetful(), *callbacks)
    assert (first.exit_code, second.exit_code) == (1, 1)
    assert second.failure.message.startswith(
        "a backward pass on rank 1 did not reach these parameters:"
        f" {', '.join(unused[:10])} and {len(unused) - 10} more; DDP waits for their gradients in"
        " each backward pass. If the loss is not to depend on them, choose"
        " strategy='ddp_ext_find_unused_parameters_true', or"
        " DDPExtStrategy(find_unused_parameters=True)\n"
    ), second.failure.message


class Penalised(training.Net):
    """Computes the gradient of a penalty for its first layer by a second backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        self.manual_backward(self.loss(batch))
        first: Any = self.layers[0]
        self.manual_backward(first.weight.square().sum() + first.bias.square().sum())


def test_parameters_that_a_second_backward_pass_leaves_out_are_named(tmp_path: Path) -> None:
    """The error speaks of a backward pass, since the step's first one reached them.

    A rank that stops because of the other one has that rank's error.
    """
    for outcome in training.fit_on(2, tmp_path, Penalised()):
        assert re.match(
            r"a backward pass on rank [01] did not reach these parameters: layers\.1\.weight,"
            r" layers\.1\.bias, layers\.3\.weight, layers\.3\.bias; DDP waits for their gradients",
            outcome.failure.message,
        ), outcome.failure.message
