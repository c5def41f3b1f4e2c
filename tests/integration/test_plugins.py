"""`Trainer(strategy="ddp_ext", plugins=[...])` takes what `strategy="ddp"` takes, and refuses what it refuses."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins import (
    AsyncCheckpointIO,
    LayerSync,
    MixedPrecision,
    TorchCheckpointIO,
)
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_ddp_ext import DDPExtStrategy, RankZeroCheckpointIO
from tests.harness.ranks import free_port, run_ranks
from tests.harness.training import At, Kind, Net, assert_same, make_strategy, make_trainer, on_both, weights


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


class OwnPort(LightningEnvironment):
    """The usual environment, with a port that the user has chosen."""

    @property
    def main_port(self) -> int:
        return int(os.environ["HOUSE_PORT"])


class HouseEnvironment(OwnPort):
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

    def world_size(self) -> int:
        return 2

    def global_rank(self) -> int:
        return int(os.environ["HOUSE_RANK"])

    local_rank = global_rank

    def set_world_size(self, size: int) -> None: ...

    def set_global_rank(self, rank: int) -> None: ...

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        self.settings.append((num_devices, num_nodes))


def test_plugins_are_the_ones_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given in `plugins` is what the strategy uses, the very objects."""
    monkeypatch.setenv("HOUSE_RANK", "1")
    io, environment, precision = CountingIO(), HouseEnvironment(), MixedPrecision("bf16-mixed", "cpu")
    used = make_trainer(DDPExtStrategy(), plugins=[io, environment, precision]).strategy
    assert isinstance(used, DDPExtStrategy)
    assert used.checkpoint_io is io
    assert used.cluster_environment is environment
    assert used.precision_plugin is precision


@pytest.mark.parametrize(
    ("argument", "plugin"), [("checkpoint_io", TorchCheckpointIO), ("cluster_environment", LightningEnvironment)]
)
def test_a_plugin_goes_to_the_strategy_or_to_the_trainer_but_not_to_both(argument: str, plugin: type[Any]) -> None:
    """A contradiction is refused in stock's words; the strategy alone is right, too."""
    assert make_trainer(DDPExtStrategy(**{argument: plugin()}))
    refusals = []
    for strategy in (DDPExtStrategy, DDPStrategy):
        with pytest.raises(L.pytorch.utilities.exceptions.MisconfigurationException) as caught:
            make_trainer(strategy(**{argument: plugin()}), plugins=[plugin()])
        refusals.append(str(caught.value))
    assert refusals[0] == refusals[1]


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


def with_plugins(kind: Kind, directory: Path) -> dict[str, Any]:
    L.seed_everything(1)
    io, layers, path = CountingIO(), UsersLayers(), directory / "it.ckpt"
    plugins = [AsyncCheckpointIO(io), layers]
    save = At("on_train_end", lambda trainer: trainer.save_checkpoint(path))
    trainer = make_trainer(make_strategy(kind, directory), plugins=plugins, callbacks=[save])
    trainer.fit(Net())
    trainer.strategy.barrier()  # rank 0 has written its file
    model = Net()
    make_trainer(make_strategy(kind, directory), plugins=plugins, max_epochs=3).fit(model, ckpt_path=path)
    return {"io": io.calls, "layers": layers.calls, "weights": weights(model)}


def test_a_users_own_plugins_do_what_they_do_with_stock(tmp_path: Path) -> None:
    """A checkpoint IO writes on rank 0 and reads on every rank; a way to convert layers is called twice a run."""
    ours, stock = on_both(with_plugins, tmp_path)
    assert_same([result.pop("weights") for result in ours], [result.pop("weights") for result in stock])
    assert ours == stock
    assert [result["io"] for result in ours] == [["save", "load"], ["load"]]
    assert ours[0]["layers"] == ["apply", "revert"] * 2


def wrapped(kind: Kind, directory: Path) -> list[str]:
    plugin = AsyncCheckpointIO(RankZeroCheckpointIO())
    save = At("on_train_end", lambda trainer: trainer.save_checkpoint(directory / "it.ckpt"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(make_strategy(kind, directory), plugins=[plugin], callbacks=[save]).fit(Net())
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
    ours, stock = (
        run_ranks(in_the_house, 2, strategy, env={"HOUSE_RANK": str, "HOUSE_PORT": str(free_port())})
        for strategy in (DDPExtStrategy, DDPStrategy)
    )
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
