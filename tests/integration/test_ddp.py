"""DDP averages the gradients of all parameters that train, also of those that are frozen or
unfrozen during training, and names parameters that a backward pass does not reach.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, GradientAccumulationScheduler
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
)

from lightning_ddp_ext import ConfigurationError, DDPExtError
from tests.harness import training
from tests.harness.ranks import launch_ranks, message_of, output_of_all

# Comm hooks.

HOOKS: list[dict[str, Any]] = [
    {"ddp_comm_hook": default_hooks.fp16_compress_hook},
    {
        "ddp_comm_hook": post_localSGD_hook.post_localSGD_hook,
        "ddp_comm_state": post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=2),
        "model_averaging_period": 100,
    },
]


def train_with_hooks(kind: training.Kind, directory: Path) -> list[dict[str, Tensor]]:
    """Return the weights of a training with each hook."""
    L.seed_everything(1)
    return [
        training.learned(kind, directory, training.Net(), strategy=strategy) for strategy in HOOKS
    ]


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
    scheduler = GradientAccumulationScheduler({1: 2})
    output_of_all(
        training.fit_on(2, tmp_path, training.Net(), scheduler, strategy={"static_graph": True})
    )


# Frozen parameters.


class WithBackbone(training.Net):
    """Has the attribute that ``BackboneFinetuning`` needs."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.layers[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class ResumableFinetuning(BackboneFinetuning):
    """Unfreezes the backbone as docs/guides/resuming.md shows."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch >= self.unfreeze_backbone_at_epoch:
            self.make_trainable(pl_module.backbone)


def resume_finetuning(
    kind: training.Kind, directory: Path, finetuning: type[BackboneFinetuning]
) -> dict[str, Any]:
    """Resume within the epoch that trains the backbone, in a static graph.

    Return the weights of a whole run and of the resumed one, and the warnings of both.
    """
    path = directory / "saved.ckpt"
    save = training.At(
        "on_train_batch_end", lambda trainer: trainer.save_checkpoint(path), earlier=5
    )

    def learned(ckpt_path: Path | None) -> dict[str, Tensor]:
        L.seed_everything(1, verbose=False)
        unfreeze = finetuning(1, verbose=False, backbone_initial_lr=0.01)
        return training.learned(
            kind,
            directory,
            WithBackbone(),
            unfreeze,
            save,
            strategy={"static_graph": True, "gradient_as_bucket_view": True},
            max_epochs=3,
            ckpt_path=ckpt_path,
        )

    with training.warnings_with("has frozen") as warned:
        whole = learned(ckpt_path=None)
        resumed = learned(ckpt_path=path)
    return {"whole": whole, "resumed": resumed, "warnings": warned}


def test_a_backbone_can_be_unfrozen_in_a_resumed_run(tmp_path: Path) -> None:
    """With the subclass of the guide, the weights are those of an uninterrupted run, and
    the same on all ranks.
    """
    first, second = training.on_ranks("ours", resume_finetuning, tmp_path, ResumableFinetuning)
    training.assert_same(first["whole"], second["whole"])
    for finetuned in (first, second):
        training.assert_same(finetuned["resumed"], finetuned["whole"])
        assert finetuned["warnings"] == []


class Unfrozen(training.Net):
    """Trains its first layer in some batches only.

    Stock has the layer in DDP from the start, and so averages all gradients, which takes
    ``find_unused_parameters=True``.
    """

    def __init__(self, kind: training.Kind) -> None:
        super().__init__()
        self.layers[0].requires_grad_(kind == "stock")

    def on_train_start(self) -> None:
        self.layers[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.layers[0].requires_grad_(self.is_trained(index))

    def is_trained(self, index: int) -> bool:
        """Return true from the second batch of the second epoch on."""
        return (self.current_epoch, index) >= (1, 1)


class Toggled(Unfrozen):
    """Freezes and unfreezes the layer within each epoch."""

    def is_trained(self, index: int) -> bool:
        return index % 4 >= 2


class Adversarial(Unfrozen):
    """Trains two networks in turn, each while the other one is frozen. Between two steps,
    the second one is frozen.
    """

    automatic_optimization = False

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.layers[:2].requires_grad_(True)
        self.layers[2:].requires_grad_(False)

    def training_step(self, batch: Any, index: int) -> None:
        self.layers[2:].requires_grad_(True)
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
            for network in (self.layers[:2], self.layers[2:])
        ]


FINDS_UNUSED = {"find_unused_parameters": True}


class Case(NamedTuple):
    """A model, which is made in the rank, and how it is trained."""

    model: Callable[[training.Kind], training.Net]
    strategy: Mapping[str, Any] = {}  # stock also finds unused parameters
    options: Mapping[str, Any] = {}


CASES = {
    "once": Case(Unfrozen),
    "accumulated in views": Case(
        Unfrozen, {"gradient_as_bucket_view": True}, {"accumulate_grad_batches": 2}
    ),
    "toggled": Case(Toggled, FINDS_UNUSED),
    "adversarial": Case(Adversarial, FINDS_UNUSED),
}


def train_all(kind: training.Kind, directory: Path) -> dict[str, Any]:
    """Return the weights and optimiser states after each training."""
    learned: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        L.seed_everything(1)
        model = case.model(kind)
        strategy = {**case.strategy, **(FINDS_UNUSED if kind == "stock" else {})}
        trainer = training.fit(
            kind, directory, model, strategy=strategy, max_epochs=4, **case.options
        )
        learned[name] = {
            "weights": dict(model.named_parameters()),
            "states": [optimizer.state_dict()["state"] for optimizer in trainer.optimizers],
        }
    return learned


def test_gradients_are_averaged_from_the_step_on_that_trains_a_layer(tmp_path: Path) -> None:
    """All ranks have the weights and optimiser states of a DDP that averages all
    gradients, to the last bit; gradients accumulated before count.
    """
    ours, stock = training.on_both(train_all, tmp_path)
    training.assert_same(ours, stock)
    training.assert_same(ours[0], ours[1])


class UnfreezesTooLate(Unfrozen):
    """Unfreezes the layer within a step."""

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        """Leave the layer frozen."""

    def training_step(self, batch: Any, index: int) -> Any:
        self.layers[0].requires_grad_(self.is_trained(index))
        return super().training_step(batch, index)


class UnfreezesOnOneRank(Unfrozen):
    """Unfreezes the layer on rank 1 only."""

    def is_trained(self, index: int) -> bool:
        return super().is_trained(index) and self.global_rank == 1


@pytest.mark.parametrize(
    ("model", "options", "messages"),
    [
        pytest.param(
            UnfreezesTooLate,
            {},
            [
                "layers.0.weight, layers.0.bias must be unfrozen before a training step, because"
                " DDP",
                "in on_train_batch_start",
            ],
            id="within",
        ),
        pytest.param(
            UnfreezesOnOneRank,
            {},
            [
                "rank 1 began a step that trains the unfrozen layers.0.weight, layers.0.bias",
                "rank 0",
                "on every rank",
            ],
            id="on one rank",
        ),
        pytest.param(
            Unfrozen,
            {"accumulate_grad_batches": 2, "strategy": FINDS_UNUSED},
            ["must be unfrozen before the first batch whose gradients are accumulated"],
            id="accumulated",
        ),
    ],
)
def test_a_layer_that_cannot_be_averaged_is_named(
    model: Callable[[training.Kind], training.Net],
    options: dict[str, Any],
    messages: list[str],
    tmp_path: Path,
) -> None:
    """All ranks raise, and the error has the remedy."""
    for outcome in training.fit_on(2, tmp_path, model("ours"), **options):
        assert isinstance(outcome.failure.exception, DDPExtError), outcome.story()
        for message in messages:
            assert message in outcome.failure.message
