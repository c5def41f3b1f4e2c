"""DDP names parameters that a backward pass does not reach, and options that it cannot use.

``test_unfrozen_parameters`` shows which gradients it averages.
"""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
)

from lightning_ddp_ext import ConfigurationError
from tests.harness import training
from tests.harness.ranks import launch_ranks, message_of, output_of_all

# Comm hooks.

HOOKS: dict[str, dict[str, Any]] = {
    "fp16": {"ddp_comm_hook": default_hooks.fp16_compress_hook},
    "local SGD": {
        "ddp_comm_hook": post_localSGD_hook.post_localSGD_hook,
        "ddp_comm_state": post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=2),
        "model_averaging_period": 100,
    },
}


def train_with_hooks(kind: training.Kind, directory: Path) -> dict[str, dict[str, Tensor]]:
    """Return the weights of a training with each hook."""
    L.seed_everything(1)
    return {
        name: training.learned(kind, directory, training.Net(), strategy=strategy)
        for name, strategy in HOOKS.items()
    }


def test_comm_hooks_are_ignored_on_cpu_as_with_stock(tmp_path: Path) -> None:
    """A script with hooks for GPUs trains as with stock."""
    ours, stock = training.on_both(train_with_hooks, tmp_path)
    training.assert_same(ours, stock)


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
    trainer.lightning_module.layers[0].requires_grad_(False)


UNUSED = [  # on rank 1
    f"{layer}.{name}"
    for layer in ("layers.0", *(f"spare.{number}" for number in range(SPARE_LAYERS)))
    for name in ("weight", "bias")
]


def test_unused_parameters_are_named(tmp_path: Path) -> None:
    """The error names the first eight, the number of others, and the option that allows it;
    the other rank also exits. DDP also waits for parameters that were frozen after it was
    built.
    """
    freeze = training.At("on_train_start", freeze_first_layer, ranks=[1])
    first, second = training.fit_on(2, tmp_path, Forgetful(), freeze)
    assert (first.exit_code, second.exit_code) == (1, 1)
    sentence = (
        "a backward pass on rank 1 did not reach these parameters:"
        f" {', '.join(UNUSED[:8])} and {len(UNUSED) - 8} more; DDP waits for their gradients in"
        " each backward pass. If the loss is not to depend on them, choose"
        " strategy='ddp_ext_find_unused_parameters_true', or"
        " DDPExtStrategy(find_unused_parameters=True)\n"
    )
    assert second.failure.message.startswith(sentence), second.failure.message
    assert sentence in first.failure.message, first.failure.message


def fit_in_forked_ranks(rank: int, world_size: int, directory: Path) -> None:
    training.make_trainer("ddp_ext_fork").fit(Forgetful())


def test_the_launching_process_names_unused_parameters(tmp_path: Path) -> None:
    """It has no model in DDP, whose parameters have names, but those of the ranks."""
    [outcome] = launch_ranks(fit_in_forked_ranks, 1, tmp_path)
    assert (
        "a backward pass on rank 1 did not reach these parameters: spare.0.weight, "
        in outcome.failure.message
    ), outcome.story()


@pytest.mark.parametrize(
    ("callbacks", "options"),
    [([], {"accumulate_grad_batches": 2}), ([GradientAccumulationScheduler({0: 2})], {})],
    ids=["the Trainer's option", "a scheduler"],
)
def test_a_static_graph_whose_first_step_accumulates_is_refused(
    callbacks: list[L.Callback], options: dict[str, Any], tmp_path: Path
) -> None:
    """The error comes before the first step, with both remedies; torch's would be internal."""
    for outcome in training.fit_on(
        2, tmp_path, training.Net(), *callbacks, strategy={"static_graph": True}, **options
    ):
        assert message_of(outcome, ConfigurationError).startswith(
            "static_graph=True needs a first step of one batch (got 2, by accumulate_grad_batches);"
            " remove static_graph, or accumulate from the second epoch with"
            " GradientAccumulationScheduler({1: 2})"
        )


def test_a_static_graph_may_accumulate_from_the_second_epoch(tmp_path: Path) -> None:
    """This is the remedy that the error names."""
    output_of_all(
        training.fit_on(
            2,
            tmp_path,
            training.Net(),
            GradientAccumulationScheduler({1: 2}),
            strategy={"static_graph": True},
        )
    )
