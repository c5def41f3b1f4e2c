"""All ranks get the whole content of a file that they resume or evaluate from, whether
it is mapped or sent.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_ddp_ext import RankZeroCheckpointIO
from tests.harness import training
from tests.integration import checkpointing
from tests.integration.checkpointing import Keeper, Net


class TwoOptimizers(Net):
    """SGD for one weight and Adam for the others, stepped by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        return torch.optim.SGD([first], lr=0.01, momentum=0.9), torch.optim.Adam(others, lr=0.01)


class Resumed(NamedTuple):
    """A resumed run."""

    state: dict[str, Any]  # at the start of training
    last_step: int


def resumed(
    kind: training.Kind, directory: Path, path: Path, is_mapped: bool, model: Any
) -> Resumed:
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
    options = {"max_epochs": 2, "devices": int(os.environ["WORLD_SIZE"]), "plugins": plugins}
    trainer = checkpointing.trainer_for(
        kind, directory, RankZeroCheckpointIO(), [Keeper()], **options
    )
    path = checkpointing.reachable(path, directory, is_mapped=is_mapped)
    state = checkpointing.fit_from(trainer, path, model())
    return Resumed(state, trainer.global_step)


@pytest.mark.lowest
@pytest.mark.parametrize(
    ("kind", "world_size", "is_mapped", "model"),
    [
        pytest.param("ours", 2, True, Net, id="ours, mapped"),
        pytest.param("stock", 2, True, TwoOptimizers, id="stock, mapped, two optimisers"),
        pytest.param("ours", 4, False, Net, id="ours, sent to four ranks"),
    ],
)
def test_a_run_continues_with_all_that_was_saved(
    kind: training.Kind, world_size: int, is_mapped: bool, model: Any, tmp_path: Path
) -> None:
    """Each rank has the same weights, optimisers, schedules, scaler, progress and every
    kind of tensor as before.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=12.0)
    before = checkpointing.train_and_save(
        tmp_path / "it.ckpt", model(), [MixedPrecision("16-mixed", "cpu", scaler)]
    )
    results = training.on_ranks(
        kind, resumed, tmp_path, tmp_path / "it.ckpt", is_mapped, model, world_size=world_size
    )
    steps_of_an_epoch = len(before["optimizers"]) * 8 // world_size
    for rank in results:
        training.assert_same(rank.state, before)
        assert rank.last_step == before["step"] + steps_of_an_epoch


class SwapsWeights(Net):
    """Reads and changes the content before it is loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        loaded = checkpoint["state_dict"]
        self.seen = loaded["layers.3.weight"].clone()
        self.kept = loaded["layers.0.bias"]
        loaded["layers.3.weight"] = loaded["layers.3.weight"].flip(1)
        loaded["layers.0.bias"] = torch.zeros(8)


class Lenient(Net):
    """Loads the keys that it finds, and has a key that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.extra = nn.Linear(2, 2)


class Evaluated(NamedTuple):
    """The results of a model with a hook, and the weights of a lenient one."""

    weights: dict[str, Tensor]  # of the model with a hook
    seen: Tensor  # by the hook
    kept: Tensor  # by the hook
    lenient: dict[str, Tensor]  # the weights of the lenient model


def evaluated(kind: training.Kind, directory: Path, path: Path, is_mapped: bool) -> Evaluated:
    swaps = SwapsWeights()
    lenient = Lenient()
    extra = lenient.extra.weight.detach().clone()
    path = checkpointing.reachable(path, directory, is_mapped=is_mapped)
    for model in (swaps, lenient):
        checkpointing.trainer_for(kind, directory, RankZeroCheckpointIO()).test(
            model, ckpt_path=path, verbose=False
        )
    training.assert_same(lenient.extra.weight.detach(), extra)
    return Evaluated(training.weights(swaps), swaps.seen, swaps.kept, training.weights(lenient))


@checkpointing.MAPPED_AND_SENT
def test_hooks_and_models_choose_what_is_loaded(
    kind: training.Kind, is_mapped: bool, tmp_path: Path
) -> None:
    """`on_load_checkpoint` reads, changes and keeps the file's content; with
    `strict_loading = False` keys may be missing.
    """
    before = checkpointing.train_and_save(tmp_path / "it.ckpt")["weights"]
    for rank in training.on_ranks(kind, evaluated, tmp_path, tmp_path / "it.ckpt", is_mapped):
        training.assert_same(rank.seen, before["layers.3.weight"])
        training.assert_same(rank.kept, before["layers.0.bias"])
        training.assert_same(rank.weights["layers.3.weight"], before["layers.3.weight"].flip(1))
        assert not rank.weights["layers.0.bias"].any()
        training.assert_same({name: rank.lenient[name] for name in before}, before)


def on_own_devices(kind: training.Kind, directory: Path, path: Path) -> dict[str, Any]:
    """Resume with tensors on each rank's own device, and return the state at the start."""
    io = RankZeroCheckpointIO(map_location="rank")
    trainer = checkpointing.trainer_for(kind, directory, io, [Keeper()], max_epochs=2)
    return checkpointing.fit_from(trainer, path)


@pytest.mark.parametrize("kind", training.KINDS)
def test_a_file_from_a_gpu_is_resumed_on_each_ranks_own_device(
    kind: training.Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``map_location="rank"``, CPU ranks resume a file whose tensors were on cuda:1."""
    path = tmp_path / "it.ckpt"
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:1")
        before = checkpointing.train_and_save(path, plugins=[RankZeroCheckpointIO()])
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(path)
    for state in training.on_ranks(kind, on_own_devices, tmp_path, path):
        training.assert_same(state, before)


def use_the_plugin_alone(kind: training.Kind, directory: Path, path: Path) -> None:
    """Have a Trainer with only the plugin test, save to a file, train, and save to
    another store.
    """
    alone, remote = (
        training.make_trainer(
            training.make_strategy(kind, directory), plugins=[RankZeroCheckpointIO()]
        )
        for _ in range(2)
    )
    alone.test(Net(), ckpt_path=path, verbose=False)
    alone.save_checkpoint(directory / "alone.ckpt")
    remote.fit(Net())
    remote.save_checkpoint("memory://checkpoints/it.ckpt")


def test_the_plugin_serves_a_stock_strategy_alone(tmp_path: Path) -> None:
    """`Trainer(strategy="ddp", plugins=[RankZeroCheckpointIO()])` tests, trains and
    saves, also to other stores.

    What it saves is what `load_from_checkpoint` takes.
    """
    path = tmp_path / "it.ckpt"
    checkpointing.train_and_save(path)
    training.on_ranks("stock", use_the_plugin_alone, tmp_path, path)
    alone = Net.load_from_checkpoint(tmp_path / "stock" / "alone.ckpt")
    training.assert_same(training.weights(alone), torch.load(path)["state_dict"])
