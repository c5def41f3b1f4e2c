"""`Trainer(strategy="ddp_ext", plugins=[...])` takes what `strategy="ddp"` takes, and refuses what it refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy

from lightning_ddp_ext import DDPExtStrategy
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


class HouseEnvironment(LightningEnvironment):
    """A user's cluster, which sets a process's place in its own variables."""

    def __init__(self) -> None:
        super().__init__()
        self.settings: list[tuple[int, int]] = []

    @property
    def main_port(self) -> int:
        return int(os.environ["HOUSE_PORT"])

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


def with_plugins(kind: Kind, directory: Path) -> dict[str, Any]:
    L.seed_everything(1)
    io, path = CountingIO(), directory / "it.ckpt"
    plugins = [AsyncCheckpointIO(io)]
    save = At("on_train_end", lambda trainer: trainer.save_checkpoint(path))
    trainer = make_trainer(make_strategy(kind, directory), plugins=plugins, callbacks=[save])
    trainer.fit(Net())
    trainer.strategy.barrier()  # rank 0 has written its file
    model = Net()
    make_trainer(make_strategy(kind, directory), plugins=plugins, max_epochs=3).fit(model, ckpt_path=path)
    return {"io": io.calls, "weights": weights(model)}


def test_a_users_own_checkpoint_io_does_what_it_does_with_stock(tmp_path: Path) -> None:
    """It writes on rank 0 and reads on every rank, also in Lightning's AsyncCheckpointIO."""
    ours, stock = on_both(with_plugins, tmp_path)
    assert_same([result.pop("weights") for result in ours], [result.pop("weights") for result in stock])
    assert ours == stock
    assert [result["io"] for result in ours] == [["save", "load"], ["load"]]


def in_the_house(rank: int, world_size: int, strategy: type[DDPStrategy]) -> dict[str, Any]:
    L.seed_everything(1)
    model, environment = Net(), HouseEnvironment()
    trainer = make_trainer(strategy(), plugins=[environment])
    trainer.fit(model)
    return {"rank": trainer.global_rank, "asked": environment.settings, "weights": weights(model)}


def test_a_users_cluster_environment_sets_ranks_and_address() -> None:
    """Rank, address and port are its own, and it validates devices and nodes."""
    ours, stock = (
        run_ranks(in_the_house, 2, strategy, env={"HOUSE_RANK": str, "HOUSE_PORT": str(free_port())})
        for strategy in (DDPExtStrategy, DDPStrategy)
    )
    assert_same(ours, stock)
    assert [result["rank"] for result in ours] == [0, 1]
    assert ours[0]["asked"] == [(2, 1)]
