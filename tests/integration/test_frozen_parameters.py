"""Gradients of parameters that are unfrozen after DDP was built are averaged."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn

from lightning_ddp_ext.reductions.gradients import average_gradients
from tests.harness import training
from tests.harness.training import Kind, Net, on_ranks


class WithBackbone(Net):
    """Has the attribute that ``BackboneFinetuning`` needs."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.layers[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def finetune(kind: Kind, directory: Path) -> Tensor:
    """Return how much the weight of the backbone, unfrozen in epoch 1, has changed."""
    model = WithBackbone()
    before = model.backbone.weight.detach().clone()
    unfreeze = BackboneFinetuning(
        unfreeze_backbone_at_epoch=1, verbose=False, backbone_initial_lr=0.01
    )
    strategy = {"static_graph": True, "gradient_as_bucket_view": True}
    training.fit(kind, directory, model, unfreeze, strategy=strategy, max_epochs=3)
    return model.backbone.weight.detach() - before


def test_a_finetuned_backbone_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    """Lightning's ``BackboneFinetuning`` unfreezes it, also in a static graph."""
    first, second = on_ranks("ours", finetune, tmp_path)
    assert first.any()
    assert torch.equal(first, second)


class ResumableFinetuning(BackboneFinetuning):
    """Unfreezes the backbone as docs/guides/resuming.md shows."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch >= self.unfreeze_backbone_at_epoch:
            self.make_trainable(pl_module.backbone)


class Finetuned(NamedTuple):
    """The weights of a whole run and of a resumed one, and the warnings of both."""

    whole: dict[str, Tensor]
    resumed: dict[str, Tensor]
    warnings: list[str]


def resume_finetuning(
    kind: Kind, directory: Path, finetuning: type[BackboneFinetuning], hook: str, calls: int
) -> Finetuned:
    """Resume from a checkpoint that is saved in a hook after some earlier calls."""
    path = directory / "saved.ckpt"
    save = training.At(hook, lambda trainer: trainer.save_checkpoint(path), earlier=calls)

    def learned(ckpt_path: Path | None) -> dict[str, Tensor]:
        L.seed_everything(1, verbose=False)
        model = WithBackbone()
        unfreeze = finetuning(1, verbose=False, backbone_initial_lr=0.01)
        options = {"max_epochs": 3, "ckpt_path": ckpt_path}
        training.fit(kind, directory, model, unfreeze, save, **options)
        return training.weights(model)

    with training.warnings_with("has frozen") as warned:
        whole = learned(ckpt_path=None)
        resumed = learned(ckpt_path=path)
    return Finetuned(whole, resumed, warned)


AFTER_EPOCH = ("on_train_epoch_end", 1)
WITHIN_EPOCH = ("on_train_batch_end", 5)


def test_a_backbone_that_a_resume_freezes_again_is_named(tmp_path: Path) -> None:
    """Rank 0 warns of what Lightning's callback does, with one of the parameters."""
    first, second = on_ranks("ours", resume_finetuning, tmp_path, BackboneFinetuning, *AFTER_EPOCH)
    assert first.warnings == [
        "BackboneFinetuning has frozen 2 parameters that the optimisers of the resumed run have,"
        " such as layers.0.weight; call its make_trainable in on_train_start"
    ]
    assert second.warnings == []


@pytest.mark.parametrize("moment", [AFTER_EPOCH, WITHIN_EPOCH], ids=str)
def test_a_backbone_can_be_unfrozen_in_a_resumed_run(
    moment: tuple[str, int], tmp_path: Path
) -> None:
    """With the subclass of the guide, the weights are those of an uninterrupted run."""
    for finetuned in on_ranks("ours", resume_finetuning, tmp_path, ResumableFinetuning, *moment):
        training.assert_same(finetuned.resumed, finetuned.whole)
        assert finetuned.warnings == []


class Toggled(Net):
    """Trains its first layer in two of four batches only.

    Stock builds DDP before the layer is frozen. It then averages all gradients, which
    takes ``find_unused_parameters=True``.
    """

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.layers[0].requires_grad_(kind == "stock")

    def on_train_start(self) -> None:
        self.layers[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.toggle(index)

    def toggle(self, index: int) -> None:
        self.layers[0].requires_grad_(index % 4 >= 2)


class ToggledWithinSteps(Toggled):
    """Unfreezes its first layer for the forward and backward pass only."""

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        """Leave the layer frozen."""

    def training_step(self, batch: Any, index: int) -> Any:
        self.toggle(index)
        return super().training_step(batch, index)

    def on_after_backward(self) -> None:
        self.layers[0].requires_grad_(False)


class ToggledOnOneRank(Toggled):
    """Trains the toggled layer on rank 1 only."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.global_rank == 1:
            return loss
        x, y = batch
        first: Any = self.layers[0]
        hidden = nn.functional.linear(x, first.weight.detach(), first.bias.detach())
        return nn.functional.mse_loss(self.layers[1:](hidden), y)


class Adversarial(Net):
    """Trains two networks in turn, each with the other one frozen."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers[0].requires_grad_(kind == "stock")

    def training_step(self, batch: Any, index: int) -> None:
        self.layers[0].requires_grad_(True)
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        networks = (self.layers[:2], self.layers[2:])
        return [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in networks]


class Case(NamedTuple):
    """A model, which is made in the rank, and how it is trained."""

    model: Callable[[Kind], Net]
    options: Mapping[str, Any] = {}
    finds_unused: bool = False  # also with ours


CASES = {
    "by batch": Case(Toggled),
    "accumulated": Case(Toggled, {"accumulate_grad_batches": 2}),
    "within steps": Case(ToggledWithinSteps),
    "on one rank": Case(ToggledOnOneRank),
    "adversarial": Case(Adversarial, finds_unused=True),
}


def train_all(kind: Kind, directory: Path) -> dict[str, Any]:
    """Return the weights and optimiser states after each training."""
    learned = {}
    for name, case in CASES.items():
        L.seed_everything(1)
        model = case.model(kind)
        strategy = {"find_unused_parameters": kind == "stock" or case.finds_unused}
        options = {"strategy": strategy, "max_epochs": 4, **case.options}
        trainer = training.fit(kind, directory, model, **options)
        states = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
        learned[name] = {"weights": dict(model.named_parameters()), "states": states}
    return learned


def test_gradients_are_averaged_however_layers_are_frozen_and_unfrozen(tmp_path: Path) -> None:
    """All ranks have the weights and optimiser states of a DDP that averages all
    gradients, to the last bit.
    """
    ours, stock = training.on_both(train_all, tmp_path)
    training.assert_same(ours, stock)
    training.assert_same(ours[0], ours[1])


def average_sparse(kind: Kind, directory: Path) -> Tensor:
    """Average a gradient of three rows, of which each rank has the one of its number."""
    table = nn.Parameter(torch.zeros(3, 2))
    own_row = torch.tensor([[dist.get_rank()]])
    table.grad = torch.sparse_coo_tensor(own_row, torch.ones(1, 2), (3, 2))
    average_gradients([table])
    return table.grad


def average_complex(kind: Kind, directory: Path) -> list[Tensor | None]:
    """Average a gradient that rank 1 has, and one that no rank has."""
    used, unused = (nn.Parameter(torch.zeros(2, dtype=torch.complex64)) for _ in range(2))
    if dist.get_rank() == 1:
        used.grad = torch.full((2,), 2j)
    average_gradients([used, unused])
    return [used.grad, unused.grad]


def test_complex_gradients_are_averaged(tmp_path: Path) -> None:
    """A gradient that one of two ranks has counts by half; without any, there is none."""
    for used, unused in on_ranks("stock", average_complex, tmp_path):
        assert used.tolist() == [1j, 1j]
        assert unused is None


def test_sparse_gradients_are_averaged(tmp_path: Path) -> None:
    """A row that one of two ranks has counts by half."""
    for gradient in on_ranks("stock", average_sparse, tmp_path):
        assert gradient.is_sparse
        assert gradient.to_dense().tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]
