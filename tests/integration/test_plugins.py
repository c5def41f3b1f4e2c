"""`Trainer(strategy="ddp_ext", plugins=[...])` takes what `strategy="ddp"` takes, and refuses what it refuses."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins import (
    AsyncCheckpointIO,
    CheckpointIO,
    ClusterEnvironment,
    LayerSync,
    MixedPrecision,
    Precision,
    TorchCheckpointIO,
    TorchSyncBatchNorm,
)
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_ddp_ext import DDPExtStrategy, RankZeroCheckpointIO
from tests.harness.ranks import free_port, run_ranks
from tests.harness.training import Kind, Net, assert_same, make_strategy, make_trainer, on_both, weights

STRATEGIES = pytest.mark.parametrize("strategy", [DDPStrategy, DDPExtStrategy])


class CountingIO(TorchCheckpointIO):
    """A user's checkpoint IO."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("save")
        super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("load")
        return super().load_checkpoint(*args, **kwargs)


class HouseEnvironment(ClusterEnvironment):
    """A user's cluster, which tells a process its place by variables of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.settings: list[tuple[int, int]] = []

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return int(os.environ["HOUSE_PORT"])

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return 2

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return int(os.environ["HOUSE_RANK"])

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return self.global_rank()

    def node_rank(self) -> int:
        return 0

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        self.settings.append((num_devices, num_nodes))


class OwnPort(LightningEnvironment):
    """The usual environment, with a port that the user has chosen."""

    @property
    def main_port(self) -> int:
        return int(os.environ["HOUSE_PORT"])


@STRATEGIES
def test_plugins_are_the_ones_that_work(strategy: type[DDPStrategy], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given in `plugins` is what the strategy uses, the very objects, as with stock."""
    monkeypatch.setenv("HOUSE_RANK", "1")
    io, environment, precision = CountingIO(), HouseEnvironment(), MixedPrecision("bf16-mixed", "cpu")
    used = make_trainer(strategy(), plugins=[io, environment, precision]).strategy
    assert isinstance(used, DDPStrategy)
    assert used.checkpoint_io is io
    assert used.cluster_environment is environment
    assert used.precision_plugin is precision


@STRATEGIES
@pytest.mark.parametrize(
    "plugin",
    [
        lambda: {"plugins": [AsyncCheckpointIO()]},
        lambda: {"plugins": AsyncCheckpointIO(CountingIO())},
        lambda: {"plugins": [TorchSyncBatchNorm()]},
        lambda: {"sync_batchnorm": True},
        lambda: {"plugins": [Precision()]},
        lambda: {"precision": "64-true"},
        lambda: {"plugins": [LightningEnvironment()]},
    ],
)
def test_other_plugins_are_accepted(strategy: type[DDPStrategy], plugin: Callable[[], dict[str, Any]]) -> None:
    """Anything that a Trainer takes beside stock is taken beside ours."""
    assert isinstance(make_trainer(strategy(), **plugin()).strategy, strategy)


@pytest.mark.parametrize(
    ("argument", "plugin"),
    [
        ("checkpoint_io", CountingIO),
        ("precision_plugin", lambda: MixedPrecision("bf16-mixed", "cpu")),
        ("cluster_environment", LightningEnvironment),
    ],
)
def test_a_plugin_goes_to_the_strategy_or_to_the_trainer_but_not_to_both(
    argument: str, plugin: Callable[[], Any]
) -> None:
    """A contradiction is refused in stock's words; either place alone is right."""
    assert make_trainer(DDPExtStrategy(), plugins=[plugin()])
    assert make_trainer(DDPExtStrategy(**{argument: plugin()}))
    refusals = []
    for strategy in (DDPExtStrategy, DDPStrategy):
        with pytest.raises(L.pytorch.utilities.exceptions.MisconfigurationException) as caught:
            make_trainer(strategy(**{argument: plugin()}), plugins=[plugin()])
        refusals.append(str(caught.value))
    assert refusals[0] == refusals[1]


def with_sync_batchnorm(kind: Kind, directory: Path) -> dict[str, Any]:
    model = Net()
    trainer = make_trainer(make_strategy(kind, directory), sync_batchnorm=True)
    if kind == "stock":
        with pytest.raises(ValueError, match="SyncBatchNorm"):
            trainer.fit(model)
    else:
        trainer.fit(model)
    return {"steps": trainer.global_step, "statistics": model.layers[1].running_mean}


def test_sync_batchnorm_trains_on_cpus_where_stock_cannot(tmp_path: Path) -> None:
    """`sync_batchnorm=True` means our layer, on all ranks alike; torch's, which stock takes, refuses the CPU."""
    ours, stock = on_both(with_sync_batchnorm, tmp_path)
    assert [result["steps"] for result in (*ours, *stock)] == [8, 8, 0, 0]
    assert_same(*ours)


class UsersLayers(LayerSync):
    """A user's way to convert layers."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def apply(self, model: nn.Module) -> nn.Module:
        self.calls.append("apply")
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        self.calls.append("revert")
        return model


def with_layer_sync(kind: Kind, directory: Path) -> list[str]:
    plugin = UsersLayers()
    make_trainer(make_strategy(kind, directory), plugins=[plugin]).fit(Net())
    return plugin.calls


def test_a_users_own_way_to_convert_layers_is_kept(tmp_path: Path) -> None:
    """A plugin that is not torch's is called as with stock."""
    ours, stock = on_both(with_layer_sync, tmp_path)
    assert ours == stock == [["apply", "revert"]] * 2


class SaveAtTheEnd(L.Callback):
    """Saves what there is when training ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def with_checkpoint_io(kind: Kind, directory: Path, in_background: bool) -> dict[str, Any]:
    L.seed_everything(1)
    io = CountingIO()
    plugin: CheckpointIO = AsyncCheckpointIO(io) if in_background else io
    path = directory / "it.ckpt"
    trainer = make_trainer(make_strategy(kind, directory), plugins=[plugin], callbacks=[SaveAtTheEnd(path)])
    trainer.fit(Net())
    trainer.strategy.barrier()  # rank 0 has written its file
    model = Net()
    make_trainer(make_strategy(kind, directory), plugins=[plugin], max_epochs=3).fit(model, ckpt_path=path)
    return {"calls": io.calls, "weights": weights(model)}


@pytest.mark.parametrize("in_background", [False, True])
def test_checkpoints_go_through_a_users_own_io(in_background: bool, tmp_path: Path) -> None:
    """A user's checkpoint IO writes on rank 0 and reads on every rank, as with stock."""
    ours, stock = on_both(with_checkpoint_io, tmp_path, in_background)
    assert [result["calls"] for result in ours] == [["save", "load"], ["load"]]
    assert_same([result["weights"] for result in ours], [result["weights"] for result in stock])


def wrapped(kind: Kind, directory: Path) -> list[str]:
    plugin = AsyncCheckpointIO(RankZeroCheckpointIO())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = directory / "it.ckpt"
        make_trainer(make_strategy(kind, directory), plugins=[plugin], callbacks=[SaveAtTheEnd(path)]).fit(Net())
        plugin.teardown()
    return [str(each.message) for each in caught if "AsyncCheckpointIO" in str(each.message)]


def test_a_wrapper_that_is_not_needed_is_named(tmp_path: Path) -> None:
    """Lightning's AsyncCheckpointIO around our IO works, and rank 0 is told what to use instead."""
    for told in on_both(wrapped, tmp_path):
        assert [len(each) for each in told] == [1, 0]
        assert told[0][0].endswith("use RankZeroCheckpointIO(background=True) alone")


def in_the_house(rank: int, world_size: int, strategy: type[DDPStrategy]) -> dict[str, Any]:
    L.seed_everything(1)
    model, environment = Net(), HouseEnvironment()
    trainer = make_trainer(strategy(), plugins=[environment])
    trainer.fit(model)
    return {"rank": trainer.global_rank, "asked": environment.settings, "weights": weights(model)}


def test_a_users_cluster_environment_says_who_is_who_and_where_to_meet() -> None:
    """Rank, address and port come from it, and it is asked whether devices and nodes are right."""
    env = {"HOUSE_RANK": str, "HOUSE_PORT": str(free_port())}
    ours = run_ranks(in_the_house, 2, DDPExtStrategy, env=env)
    stock = run_ranks(in_the_house, 2, DDPStrategy, env={**env, "HOUSE_PORT": str(free_port())})
    assert_same(ours, stock)
    assert [result["rank"] for result in ours] == [0, 1]
    assert ours[0]["asked"] == [(2, 1)]


class Port(L.Callback):
    """Reports where a started rank was told to go."""

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        module.log("port", float(os.environ["MASTER_PORT"]))


def forked_in_the_house(rank: int, world_size: int) -> float:
    trainer = make_trainer(DDPExtStrategy(start_method="fork"), plugins=[OwnPort()], callbacks=[Port()])
    trainer.fit(Net())
    return float(trainer.callback_metrics["port"])


def test_started_ranks_meet_where_a_users_environment_says() -> None:
    """An environment that starts no processes, but says a port, is one for the launchers, too."""
    port = free_port()
    assert run_ranks(forked_in_the_house, 1, env={"HOUSE_PORT": str(port)}) == [port]
