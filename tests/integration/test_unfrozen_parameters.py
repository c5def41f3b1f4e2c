"""DDP averages the gradients of parameters that are frozen or unfrozen during training, from
the first step on that trains them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor

from lightning_ddp_ext import DDPExtError
from tests.harness import training

# A backbone that a callback unfreezes.


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


def resume_finetuning(kind: training.Kind, directory: Path) -> dict[str, Any]:
    """Resume within the epoch that trains the backbone, in a static graph.

    Return the weights of a whole run and of the resumed one, and the warnings of both.
    """
    path = directory / "saved.ckpt"
    save = training.At(
        "on_train_batch_end", lambda trainer: trainer.save_checkpoint(path), earlier=5
    )

    def learned(ckpt_path: Path | None) -> dict[str, Tensor]:
        L.seed_everything(1, verbose=False)
        return training.learned(
            kind,
            directory,
            WithBackbone(),
            ResumableFinetuning(1, verbose=False, backbone_initial_lr=0.01),
            save,
            strategy={"static_graph": True, "gradient_as_bucket_view": True},
            max_epochs=3,
            ckpt_path=ckpt_path,
        )

    with training.warnings_with("has frozen") as warned:
        weights = {"whole": learned(ckpt_path=None), "resumed": learned(ckpt_path=path)}
    return {**weights, "warnings": warned}


def test_a_backbone_can_be_unfrozen_in_a_resumed_run(tmp_path: Path) -> None:
    """With the subclass of the guide, the weights are those of an uninterrupted run, and
    the same on all ranks.
    """
    first, second = training.on_ranks("ours", resume_finetuning, tmp_path)
    training.assert_same(first["whole"], second["whole"])
    for finetuned in (first, second):
        training.assert_same(finetuned["resumed"], finetuned["whole"])
        assert finetuned["warnings"] == []


# Layers that a model unfreezes.

# Which batches train a layer that is otherwise frozen, by the model and the batch's index.


def from_the_second_epoch_on(model: L.LightningModule, index: int) -> bool:
    """It begins with the second batch of that epoch."""
    return (model.current_epoch, index) >= (1, 1)


def in_two_of_four_batches(model: L.LightningModule, index: int) -> bool:
    return index % 4 >= 2


def on_rank_1_only(model: L.LightningModule, index: int) -> bool:
    return model.global_rank == 1 and from_the_second_epoch_on(model, index)


class Unfrozen(training.Net):
    """Trains its first layer in some batches only.

    DDP has only the parameters that train when it is built. With ours, the layer is frozen
    then. Stock has it from the start, so that it averages all gradients, to compare with;
    this takes ``find_unused_parameters=True``.
    """

    def __init__(
        self,
        kind: training.Kind,
        is_trained: Callable[[L.LightningModule, int], bool] = from_the_second_epoch_on,
    ) -> None:
        super().__init__()
        self.is_trained = is_trained
        self.layers[0].requires_grad_(kind == "stock")

    def on_train_start(self) -> None:
        self.layers[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.layers[0].requires_grad_(self.is_trained(self, index))


class Adversarial(Unfrozen):
    """Trains two networks in turn, its first two layers and the others, each while the other
    network is frozen.

    When a batch starts, the second network is frozen; the step itself unfreezes it.
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
    """How a model is made in a rank, and trained.

    Attributes:
        model: makes it, for ours or stock.
        strategy: options of the strategy; stock also finds unused parameters.
        options: of the Trainer.
    """

    model: Callable[[training.Kind], training.Net]
    strategy: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}


CASES = {
    "unfrozen once": Case(Unfrozen),
    "unfrozen once, with accumulated gradients in views": Case(
        Unfrozen, {"gradient_as_bucket_view": True}, {"accumulate_grad_batches": 2}
    ),
    "unfrozen again and again": Case(
        partial(Unfrozen, is_trained=in_two_of_four_batches), FINDS_UNUSED
    ),
    "two networks in turn": Case(Adversarial, FINDS_UNUSED),
}


def train_all(kind: training.Kind, directory: Path) -> dict[str, Any]:
    """Return the weights and optimiser states after each training."""
    learned: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        L.seed_everything(1)
        model = case.model(kind)
        trainer = training.fit(
            kind,
            directory,
            model,
            strategy={**case.strategy, **(FINDS_UNUSED if kind == "stock" else {})},
            max_epochs=4,
            **case.options,
        )
        learned[name] = {
            "weights": dict(model.named_parameters()),
            "states": [optimizer.state_dict()["state"] for optimizer in trainer.optimizers],
        }
    return learned


def test_gradients_are_averaged_from_the_step_on_that_trains_a_layer(tmp_path: Path) -> None:
    """All ranks have the weights and optimiser states of a DDP that averages all
    gradients, to the last bit; gradients accumulated before count. A failure names the case.
    """
    ours, stock = training.on_both(train_all, tmp_path)
    training.assert_same(ours, stock)
    training.assert_same(ours[0], ours[1])


class UnfreezesTooLate(Unfrozen):
    """Unfreezes the layer within a step."""

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        """Leave the layer frozen."""

    def training_step(self, batch: Any, index: int) -> Any:
        self.layers[0].requires_grad_(self.is_trained(self, index))
        return super().training_step(batch, index)


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
            partial(Unfrozen, is_trained=on_rank_1_only),
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
