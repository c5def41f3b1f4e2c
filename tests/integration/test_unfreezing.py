"""Parameters that are unfrozen during training are averaged over the ranks; stock `ddp` leaves them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning

from tests.harness.training import Kind, Net, assert_same, make_strategy, make_trainer, on_both, on_ranks, weights

UNFREEZE_AT = 2
# Options of the strategy, and batches that are accumulated; torch has no static graphs with accumulation.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 1),
    "accumulation": ({}, 2),
    "static graph": ({"static_graph": True}, 1),
    "bucket views": ({"gradient_as_bucket_view": True}, 2),
    "looking for unused ones": ({"find_unused_parameters": True}, 1),
}


class Unfreeze(L.Callback):
    """Freezes the first layer until a step."""

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        module.layers[0].requires_grad_(False)

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == UNFREEZE_AT:
            module.layers[0].requires_grad_(True)


class Forget(L.Callback):
    """Has the same effect without freezing anything: the first layer's gradients are dropped until that step."""

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, _: Any) -> None:
        if trainer.global_step < UNFREEZE_AT:
            for parameter in module.layers[0].parameters():
                parameter.grad = None


def train(kind: Kind, directory: Path) -> dict[str, Any]:
    found = {}
    for name, (options, accumulation) in CASES.items():
        L.seed_everything(1)
        model, callback = Net(), Unfreeze() if kind == "ours" else Forget()
        strategy = make_strategy(kind, directory, **options)
        make_trainer(strategy, callbacks=[callback], accumulate_grad_batches=accumulation).fit(model)
        found[name] = weights(model)
    return found


def test_unfrozen_parameters_are_averaged(tmp_path: Path) -> None:
    """The weights are those of a stock run that had nothing frozen, and dropped the first gradients."""
    ours, stock = on_both(train, tmp_path)
    assert_same(ours, stock)
    assert ours[0].keys() == CASES.keys()


class WithBackbone(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        return torch.nn.functional.mse_loss(self.head(self.backbone(x).relu()), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    train_dataloader = Net.train_dataloader


def finetune(kind: Kind, directory: Path) -> dict[str, Any]:
    L.seed_everything(1)
    model = WithBackbone()
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False, backbone_initial_lr=0.01)
    make_trainer(make_strategy(kind, directory), callbacks=[finetuning], max_epochs=3).fit(model)
    return weights(model)


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_a_finetuned_backbone_is_the_same_on_all_ranks(kind: Kind, tmp_path: Path) -> None:
    """With `BackboneFinetuning`; when stock's is, too, forming DDP anew can go."""
    first, second = on_ranks(kind, finetune, tmp_path)
    if kind == "ours":
        assert_same(first, second)
    else:
        assert not torch.equal(first["backbone.weight"], second["backbone.weight"])
