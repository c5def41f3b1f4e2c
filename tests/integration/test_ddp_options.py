"""Options of DDP's and what is built on them: comm hooks, unused and unfrozen
parameters, several devices a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.integration.data.positions import training_generators
from lightning_ddp_ext.reductions.gradients import average_gradients
from lightning_ddp_ext.rendezvous.process_context import current
from tests.harness import ranks, training
from tests.harness.training import Net


def mean_over_ranks(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return default_hooks.allreduce_hook(None, bucket)


HOOKS: dict[str, dict[str, Any]] = {
    "none": {},
    "power_sgd": {
        "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
        "ddp_comm_state": powerSGD_hook.PowerSGDState(process_group=None),
    },
    "fp16_compress": {"ddp_comm_hook": default_hooks.fp16_compress_hook},
    "wrapped": {
        "ddp_comm_hook": mean_over_ranks,
        "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
    },
}


# As fp16 allows.
LOOSE = {"rtol": 2e-2, "atol": 2e-2}
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def train_with_hooks(kind: training.Kind, directory: Path) -> dict[str, dict[str, Tensor]]:
    """Return the parameters that a rank learns with each hook."""
    found = {}
    for name, options in HOOKS.items():
        L.seed_everything(1)
        model = Net()
        training.fit(kind, directory, model, strategy=options, devices=3, precision="64-true")
        found[name] = {key: value.detach() for key, value in model.named_parameters()}
    return found


def test_a_comm_hook_averages_the_gradients(tmp_path: Path) -> None:
    """The averages are as exact as its number format allows, and the same on every
    rank.
    """
    first, *others = training.on_ranks("ours", train_with_hooks, tmp_path, world_size=3)
    for other in others:
        training.assert_same(other, first)
    torch.testing.assert_close(first["power_sgd"], first["none"], **EXACT)
    for name in ("wrapped", "fp16_compress"):
        torch.testing.assert_close(first[name], first["none"], **LOOSE)
        weight = "layers.0.weight"
        assert not torch.allclose(first[name][weight], first["none"][weight], **EXACT)


SPARE = tuple(f"spare.{number}" for number in range(6))


class Forgetful(Net):
    """Leaves layers out of the loss on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.ModuleList(nn.Linear(1, 1) for _ in range(6))

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.global_rank == 0:
            loss = loss + sum(layer(batch[1]).mean() for layer in self.spare)
        return loss


def freeze_first_layer(trainer: L.Trainer) -> None:
    model: Any = trainer.lightning_module
    model.layers[0].requires_grad_(False)


FREEZE = training.At("on_train_start", freeze_first_layer)
NAMES = [f"{layer}.{name}" for layer in ("layers.0", *SPARE) for name in ("weight", "bias")]


@pytest.mark.parametrize(
    ("callbacks", "named", "more"),
    [
        # Ten of the twelve parameters of spare layers.
        pytest.param([], NAMES[2:12], 2, id="unused"),
        # Ten of these and of the two that are frozen.
        pytest.param([FREEZE], NAMES[:10], 4, id="unused and frozen"),
    ],
)
def test_unused_parameters_are_named(
    callbacks: list[L.Callback], named: list[str], more: int, tmp_path: Path
) -> None:
    """The error names the first ten, their number and the option that allows it; the
    other rank also exits.

    DDP counts the parameters that were trainable when it was built, and also waits for
    those that were frozen since.
    """
    first, second = training.fit_on(2, tmp_path, Forgetful(), *callbacks)
    assert (first.exit_code, second.exit_code) == (1, 1)
    assert second.failure.message.startswith(
        "rank 1 did not use these parameters to compute the loss that training_step returned:"
        f" {', '.join(named)} and {more} more; DDP waits for their gradients. If this is intended,"
        " choose strategy='ddp_ext_find_unused_parameters_true', or"
        " DDPExtStrategy(find_unused_parameters=True)\n"
    ), second.failure.message


class WithBackbone(Net):
    """Has the attribute that `BackboneFinetuning` needs; updates running means at the
    start and end of each step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.layers[0]
        self.means: list[Tensor] = []

    def training_step(self, batch: Any, index: int) -> Any:
        self.means.append(self.layers[1].running_mean.clone())
        return super().training_step(batch, index)

    def on_train_batch_end(self, *_: Any) -> None:
        self.means.append(self.layers[1].running_mean.clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Finetuning(NamedTuple):
    """Options of the strategy, and the batches of an optimiser step."""

    strategy: dict[str, Any]
    accumulation: int = 1


FINETUNED = {
    "accumulated": Finetuning({}, 2),
    # torch has no static graphs with accumulation.
    "static graph": Finetuning({"static_graph": True, "gradient_as_bucket_view": True}),
    "own buffers": Finetuning({"forward_sync_buffers": False}),
}


class Backbone(NamedTuple):
    """Weights of the backbone, and the running means that the model has recorded."""

    frozen: Tensor  # after the first epoch
    trained: Tensor
    means: list[Tensor]


def finetune(kind: training.Kind, directory: Path, name: str) -> Backbone:
    L.seed_everything(1)
    model = WithBackbone()
    frozen: list[Tensor] = []
    keep = training.At(
        "on_train_epoch_end", lambda _: frozen.append(model.backbone.weight.detach().clone())
    )
    finetuning = BackboneFinetuning(
        unfreeze_backbone_at_epoch=1, verbose=False, backbone_initial_lr=0.01
    )
    strategy, accumulation = FINETUNED[name]
    training.fit(
        kind,
        directory,
        model,
        finetuning,
        keep,
        strategy=strategy,
        max_epochs=3,
        accumulate_grad_batches=accumulation,
    )
    return Backbone(frozen[0], model.backbone.weight.detach(), model.means)


@pytest.mark.parametrize("name", FINETUNED)
def test_unfrozen_parameters_are_the_same_on_all_ranks(name: str, tmp_path: Path) -> None:
    """This holds with `BackboneFinetuning` and any options of DDP."""
    first, second = training.on_ranks("ours", finetune, tmp_path, name)
    assert torch.equal(first.trained, second.trained)
    for rank in (first, second):
        assert not torch.equal(rank.trained, rank.frozen)
    if name == "own buffers":
        # A step begins with the running means with which the step before ended.
        ends = second.means[1:-1:2]
        begins = second.means[2::2]
        assert all(map(torch.equal, ends, begins))


class Toggled(Net):
    """Trains its first layer only where a rule says so; with stock, DDP is built before
    it is frozen.

    With stock DDP thus averages its gradients, which takes
    `find_unused_parameters=True`.
    """

    def __init__(
        self, kind: training.Kind, is_trained: Callable[[int, int], bool], *, within: bool = False
    ) -> None:
        super().__init__()
        self.is_trained = is_trained
        self.within = within
        self.layers[0].requires_grad_(kind == "stock")

    def on_train_start(self) -> None:
        self.layers[0].requires_grad_(False)

    def toggle(self, index: int) -> None:
        self.layers[0].requires_grad_(self.is_trained(self.current_epoch, index))

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if not self.within:
            self.toggle(index)

    def training_step(self, batch: Any, index: int) -> Any:
        if self.within:
            self.toggle(index)
        return super().training_step(batch, index)

    def on_after_backward(self) -> None:
        self.layers[0].requires_grad_(self.layers[0].weight.requires_grad and not self.within)


class Partly(Toggled):
    """Uses the toggled layer on rank 1 only."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.global_rank == 1:
            return loss
        x = nn.functional.linear(
            batch[0], self.layers[0].weight.detach(), self.layers[0].bias.detach()
        )
        return nn.functional.mse_loss(self.layers[1:](x), batch[1])


class Adversarial(Net):
    """Trains two networks in turn, each with the other one frozen."""

    def __init__(self, kind: training.Kind) -> None:
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
        parts = (self.layers[:2], self.layers[2:])
        return [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in parts]


def by_epoch(epoch: int, index: int) -> bool:
    return epoch % 2 == 1


def by_step(epoch: int, index: int) -> bool:
    return index % 2 == 1


TOGGLED: dict[str, tuple[Callable[[training.Kind], Net], dict[str, Any]]] = {
    "by epoch": (lambda kind: Toggled(kind, by_epoch), {}),
    "by step": (lambda kind: Toggled(kind, by_step), {}),
    "within steps": (lambda kind: Toggled(kind, by_step, within=True), {}),
    "accumulated": (lambda kind: Toggled(kind, by_epoch), {"accumulate_grad_batches": 2}),
    "on one rank": (lambda kind: Partly(kind, by_step), {}),
    "adversarial": (Adversarial, {}),
}


def toggle(kind: training.Kind, directory: Path) -> dict[str, Any]:
    found = {}
    for name, (make, options) in TOGGLED.items():
        L.seed_everything(1)
        model = make(kind)
        is_needed = kind == "stock" or name == "adversarial"
        strategy = {"find_unused_parameters": is_needed}
        trainer = training.fit(kind, directory, model, strategy=strategy, max_epochs=4, **options)
        states = [each.state_dict()["state"] for each in trainer.optimizers]
        found[name] = {"weights": dict(model.named_parameters()), "states": states}
    return found


def test_gradients_are_averaged_however_layers_are_frozen_and_unfrozen(tmp_path: Path) -> None:
    """Weights and optimiser states are those of a DDP that averages all gradients, on
    each rank, to the last bit.
    """
    ours, stock = training.on_both(toggle, tmp_path)
    for mine, theirs in zip(ours, stock, strict=True):
        training.assert_same(mine, theirs)
        training.assert_same(mine, ours[0])


def average_sparse(rank: int, world_size: int) -> Tensor:
    """Average a gradient of which each rank has the row of its number."""
    table = nn.Parameter(torch.zeros(3, 2))
    table.grad = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1, 2), (3, 2))
    dist.init_process_group("gloo")
    average_gradients([table])
    dist.destroy_process_group()
    return table.grad


def test_sparse_gradients_are_averaged() -> None:
    """A row that one of two ranks has counts by half."""
    for gradient in ranks.run_ranks(average_sparse, 2, env=ranks.by_hand_env(2, ranks.free_port())):
        assert gradient.is_sparse
        assert gradient.to_dense().tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]


class Alone(NamedTuple):
    """The calls of the module's forward hook, and the weights that it learns."""

    calls: int
    weights: dict[str, Tensor]


def train_alone(kind: training.Kind, directory: Path) -> Alone:
    L.seed_everything(1)
    model = Net()
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("forward"))
    training.fit(kind, directory, model, devices=1)
    return Alone(len(calls), training.weights(model))


def test_a_single_rank_trains_as_with_stock(tmp_path: Path) -> None:
    """Its training step also takes DDP's forward pass, which calls hooks."""
    (ours,) = training.on_ranks("ours", train_alone, tmp_path, world_size=1)
    (stock,) = training.on_ranks("stock", train_alone, tmp_path, world_size=1)
    assert ours.calls == stock.calls > 0
    training.assert_same(ours.weights, stock.weights)


class Parts(Net):
    """Puts its layers on the devices of its rank in turn; on the CPU every device is
    the CPU.
    """

    def __init__(self, per_rank: int) -> None:
        super().__init__()
        self.per_rank = per_rank

    def configure_model(self) -> None:
        devices: list[torch.device] = self.trainer.strategy.rank_devices
        assert [str(device) for device in devices] == ["cpu"] * self.per_rank
        for index, layer in enumerate(self.layers):
            layer.to(devices[index % self.per_rank])


def use_several_devices(kind: training.Kind, directory: Path, per_rank: int) -> dict[str, Any]:
    L.seed_everything(1)
    files = directory / str(per_rank)
    model = Parts(per_rank)
    checkpoint = ModelCheckpoint(files, save_last=True)
    options = {"devices": 2 * per_rank, "enable_checkpointing": True, "callbacks": [checkpoint]}

    def trainer(**more: Any) -> L.Trainer:
        strategy = training.make_strategy(kind, directory, devices_per_rank=per_rank)
        return training.make_trainer(strategy, sync_batchnorm=True, **options, **more)

    trainer().fit(model)
    again = trainer(max_epochs=3)
    again.fit(model, ckpt_path=files / "last.ckpt")
    assert again.world_size == 2
    tested = again.test(model, verbose=False)
    context = current()
    assert context is not None
    assert context.groups.request.has_one_device is (per_rank == 1)
    return {"weights": training.weights(model), "step": again.global_step, "tested": tested}


def test_two_devices_a_rank_learn_as_one_does(tmp_path: Path) -> None:
    """Four devices are two ranks: sampling, SyncBatchNorm, checkpoints and metrics are
    those of two ranks.
    """
    two, one = (
        training.on_ranks("ours", use_several_devices, tmp_path, per_rank) for per_rank in (2, 1)
    )
    training.assert_same(two, one)


def test_a_part_that_is_on_no_device_of_its_rank_is_named() -> None:
    """The error has the parameter, its device, and the devices to choose from."""
    strategy = with_gpus(2)
    strategy.connect(Net())
    words = (
        r"layers\.0\.weight is on cpu; put it on one of self\.trainer\.strategy\.rank_devices"
        r" \(cuda:0, cuda:1\)"
    )
    with pytest.raises(ConfigurationError, match=words):
        strategy.model_to_device()


def with_gpus(count: int, *, local_rank: int = 0) -> DDPExtStrategy:
    """Return the strategy of a rank with two of so many GPUs."""
    gpus = [torch.device("cuda", number) for number in range(count)]
    strategy = DDPExtStrategy(devices_per_rank=2, parallel_devices=gpus)
    strategy.cluster_environment = LightningEnvironment()
    strategy.cluster_environment.local_rank = lambda: local_rank
    return strategy


def test_random_states_of_all_devices_of_a_rank_are_recorded() -> None:
    """A part of the model on a rank's second GPU draws from that GPU's generator."""
    generators = tuple(torch.Generator() for _ in range(4))
    with patch.object(torch.cuda, "default_generators", generators):
        found = training_generators(with_gpus(4, local_rank=1), with_loaders=False)
    assert [generators.index(each) for each in found] == [2, 3]
