"""Parameters that are unfrozen during training are averaged over the ranks; stock `ddp` leaves them out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor

from tests.harness.training import (
    KINDS,
    At,
    Kind,
    Net,
    assert_same,
    make_strategy,
    make_trainer,
    on_both,
    on_ranks,
    weights,
)

UNFREEZE_AT = 2
# Options of the strategy, and batches that are accumulated; torch has no static graphs with accumulation.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "accumulation": ({}, 2),
    "static graph": ({"static_graph": True}, 1),
    "bucket views": ({"gradient_as_bucket_view": True}, 1),
    "looking for unused ones": ({"find_unused_parameters": True}, 1),
}


class Forget(L.Callback):
    """Has the same effect without freezing anything: the first layer's gradients are dropped until that step."""

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, _: Any) -> None:
        if trainer.global_step < UNFREEZE_AT:
            for parameter in module.layers[0].parameters():
                parameter.grad = None


def first_layer(requires_grad: bool) -> Callable[[L.Trainer], object]:
    return lambda trainer: trainer.lightning_module.layers[0].requires_grad_(requires_grad)  # type: ignore[operator]


def train(kind: Kind, directory: Path) -> dict[str, Any]:
    found = {}
    for name, (options, accumulation) in CASES.items():
        L.seed_everything(1)
        unfreeze = At("on_train_batch_start", first_layer(True), earlier=UNFREEZE_AT * accumulation)
        callbacks = [Forget()] if kind == "stock" else [At("setup", first_layer(False)), unfreeze]
        model, strategy = Net(), make_strategy(kind, directory, **options)
        make_trainer(strategy, callbacks=callbacks, accumulate_grad_batches=accumulation).fit(model)
        found[name] = weights(model)
    return found


def test_unfrozen_parameters_are_averaged(tmp_path: Path) -> None:
    """The weights are those of a stock run that had nothing frozen, and dropped the first gradients."""
    ours, stock = on_both(train, tmp_path)
    assert_same(ours, stock)


class WithBackbone(Net):
    """Is called as `BackboneFinetuning` wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.layers[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def finetune(kind: Kind, directory: Path) -> Tensor:
    L.seed_everything(1)
    model = WithBackbone()
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False, backbone_initial_lr=0.01)
    make_trainer(make_strategy(kind, directory), callbacks=[finetuning], max_epochs=3).fit(model)
    return model.backbone.weight.detach()


def test_a_finetuned_backbone_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    """With `BackboneFinetuning`; when stock's is, too, forming DDP anew can go."""
    equal = {kind: torch.equal(*on_ranks(kind, finetune, tmp_path)) for kind in KINDS}
    assert equal == {"ours": True, "stock": False}
