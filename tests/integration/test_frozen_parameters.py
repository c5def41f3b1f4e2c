"""Gradients of parameters that are unfrozen before a step are averaged; DDP is built again
for them.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lightning_ddp_ext import DDPExtError
from tests.harness import training
from tests.harness.training import Kind, Net, on_ranks


class WithBackbone(Net):
    """Has the attribute that ``BackboneFinetuning`` needs."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.layers[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Manual(WithBackbone):
    """Trains in manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def finetune(kind: Kind, directory: Path, make_model: Callable[[], WithBackbone]) -> Tensor:
    """Return how much the weight of the backbone, unfrozen in epoch 1, has changed."""
    model = make_model()
    before = model.backbone.weight.detach().clone()
    unfreeze = BackboneFinetuning(
        unfreeze_backbone_at_epoch=1, verbose=False, backbone_initial_lr=0.01
    )
    strategy = {"static_graph": True, "gradient_as_bucket_view": True}
    training.fit(kind, directory, model, unfreeze, strategy=strategy, max_epochs=3)
    return model.backbone.weight.detach() - before


@pytest.mark.parametrize("make_model", [WithBackbone, Manual])
def test_a_finetuned_backbone_is_the_same_on_all_ranks(
    make_model: Callable[[], WithBackbone], tmp_path: Path
) -> None:
    """Lightning's ``BackboneFinetuning`` unfreezes it, also in a static graph."""
    first, second = on_ranks("ours", finetune, tmp_path, make_model)
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


class Unfrozen(Net):
    """Trains its first layer in some batches only.

    Stock has the layer in DDP from the start, and so averages all gradients, which takes
    ``find_unused_parameters=True``.
    """

    def __init__(self, kind: Kind) -> None:
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


class ToggledOnOneRank(Toggled):
    """Uses the toggled layer on rank 1 only."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.global_rank == 1:
            return loss
        x, y = batch
        first: Any = self.layers[0]
        hidden = nn.functional.linear(x, first.weight.detach(), first.bias.detach())
        return nn.functional.mse_loss(self.layers[1:](hidden), y)


class Adversarial(Unfrozen):
    """Trains two networks in turn, each with the other one frozen."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        self.automatic_optimization = False

    def is_trained(self, index: int) -> bool:
        return True

    def training_step(self, batch: Any, index: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        networks = (self.layers[:2], self.layers[2:])
        return [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in networks]


class FrozenBetweenSteps(Adversarial):
    """Leaves the second network frozen between steps, as when a step ends with the first."""

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        super().on_train_batch_start(batch, index)
        self.layers[2:].requires_grad_(False)

    def training_step(self, batch: Any, index: int) -> None:
        self.layers[2:].requires_grad_(True)
        super().training_step(batch, index)


def count_hook_calls(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    state.append(bucket.index())
    return default_hooks.allreduce_hook(None, bucket)


class WithOwnHook(Unfrozen):
    """Registers a comm hook with DDP by itself."""

    def on_train_start(self) -> None:
        super().on_train_start()
        self.calls: list[int] = []
        self.trainer.model.register_comm_hook(self.calls, count_hook_calls)


FINDS_UNUSED = {"find_unused_parameters": True}


class Case(NamedTuple):
    """A model, which is made in the rank, and how it is trained."""

    model: Callable[[Kind], Net]
    strategy: Mapping[str, Any] = {}  # stock also finds unused parameters
    options: Mapping[str, Any] = {}


CASES = {
    "once": Case(Unfrozen),
    "with own hook": Case(WithOwnHook),
    "accumulated": Case(Unfrozen, options={"accumulate_grad_batches": 2}),
    "accumulated in views": Case(
        Unfrozen, {"gradient_as_bucket_view": True}, {"accumulate_grad_batches": 2}
    ),
    "toggled": Case(Toggled, FINDS_UNUSED),
    "on one rank": Case(ToggledOnOneRank, FINDS_UNUSED),
    "adversarial": Case(Adversarial, FINDS_UNUSED),
    "frozen between steps": Case(FrozenBetweenSteps, FINDS_UNUSED),
}


def train_all(kind: Kind, directory: Path) -> dict[str, Any]:
    """Return the weights and optimiser states after each training."""
    learned: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        L.seed_everything(1)
        model = case.model(kind)
        strategy = {**case.strategy, **(FINDS_UNUSED if kind == "stock" else {})}
        options = {"strategy": strategy, "max_epochs": 4, **case.options}
        trainer = training.fit(kind, directory, model, **options)
        states = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
        learned[name] = {"weights": dict(model.named_parameters()), "states": states}
        learned[name]["calls"] = len(getattr(model, "calls", ()))
    return learned


def test_gradients_are_averaged_from_the_step_on_that_trains_a_layer(tmp_path: Path) -> None:
    """All ranks have the weights and optimiser states of a DDP that averages all
    gradients, to the last bit; gradients accumulated before count, and a comm hook stays.
    """
    ours, stock = training.on_both(train_all, tmp_path)
    training.assert_same(ours, stock)
    training.assert_same(ours[0], ours[1])


POWER_SGD = {
    "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
    "ddp_comm_state": powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2),
}


def train_with_power_sgd(kind: Kind, directory: Path) -> dict[str, Tensor]:
    L.seed_everything(1)
    model = Unfrozen(kind)
    model.layers.append(nn.Linear(1, 1))
    trainer = training.fit(kind, directory, model, strategy=POWER_SGD, max_epochs=3)
    assert trainer.strategy.model is model
    return dict(model.named_parameters())


def test_power_sgd_compresses_the_gradients_of_unfrozen_parameters(tmp_path: Path) -> None:
    """It goes on with the buckets of the new DDP, alike on all ranks."""
    first, second = on_ranks("ours", train_with_power_sgd, tmp_path)
    training.assert_same(first, second)


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


class UnfreezesAnotherLayer(Unfrozen):
    """Unfreezes one parameter on rank 0 and another on rank 1."""

    def is_trained(self, index: int) -> bool:
        return False

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        first: Any = self.layers[0]
        (first.weight, first.bias)[self.global_rank].requires_grad_(True)


WITHIN = "layers.0.weight, layers.0.bias must be unfrozen before a training step, because DDP"
TRAINS = "began a step that trains the unfrozen"


@pytest.mark.parametrize(
    ("model", "options", "messages"),
    [
        pytest.param(UnfreezesTooLate, {}, [WITHIN, "in on_train_batch_start"], id="within"),
        pytest.param(
            UnfreezesOnOneRank,
            {},
            [f"rank 1 {TRAINS} layers.0.weight, layers.0.bias", "rank 0", "on every rank"],
            id="on one rank",
        ),
        pytest.param(
            UnfreezesAnotherLayer,
            {},
            [f"{TRAINS} layers.0.weight", f"{TRAINS} layers.0.bias", "on every rank"],
            id="another",
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
    model: Callable[[Kind], Net],
    options: dict[str, Any],
    messages: list[str],
    tmp_path: Path,
) -> None:
    """All ranks raise, and the error has the remedy."""
    for error in on_ranks("ours", fail, tmp_path, model, options):
        for message in messages:
            assert message in error


def fail(
    kind: Kind, directory: Path, make_model: Callable[[Kind], Net], options: dict[str, Any]
) -> str:
    with pytest.raises(DDPExtError) as raised:
        training.fit(kind, directory, make_model(kind), **options)
    return str(raised.value)
