"""A user's checkpoint IO and cluster environment do what they do with stock ``ddp``."""

import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy

from lightning_ddp_ext import DDPExtStrategy
from tests.harness import training
from tests.harness.ranks import free_port, run_ranks


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


def save_and_resume(kind: training.Kind, directory: Path) -> dict[str, Any]:
    """Return the calls of the user's IO on this rank, and the weights of the resumed run."""
    L.seed_everything(1)
    io = CountingIO()
    path = directory / "end.ckpt"
    plugins = [AsyncCheckpointIO(io)]
    save = training.At("on_train_end", lambda trainer: trainer.save_checkpoint(path))
    trainer = training.fit(kind, directory, training.Net(), save, plugins=plugins)
    trainer.strategy.barrier()  # rank 0 has written its file
    model = training.Net()
    training.fit(kind, directory, model, ckpt_path=path, plugins=plugins, max_epochs=3)
    return {"calls": io.calls, "weights": training.weights(model)}


def test_a_users_checkpoint_io_writes_on_rank_zero_and_reads_on_every_rank(tmp_path: Path) -> None:
    """An IO inside Lightning's AsyncCheckpointIO gets the same calls as with stock, and the
    resumed training ends with stock's weights.
    """
    ours, stock = training.on_both(save_and_resume, tmp_path)
    assert [rank["calls"] for rank in ours] == [["save", "load"], ["load"]]
    assert [rank["calls"] for rank in stock] == [["save", "load"], ["load"]]
    training.assert_same([rank["weights"] for rank in ours], [rank["weights"] for rank in stock])


class HouseEnvironment(LightningEnvironment):
    """A user's cluster, which sets a process's place in its own variables."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[tuple[int, int]] = []

    @property
    def main_port(self) -> int:
        return int(os.environ["HOUSE_PORT"])

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return 2

    def global_rank(self) -> int:
        return int(os.environ["HOUSE_RANK"])

    local_rank = global_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        self.validated.append((num_devices, num_nodes))


def train_in_the_house(rank: int, world_size: int, strategy: type[DDPStrategy]) -> dict[str, Any]:
    """Return the rank, what the environment has validated, and the weights."""
    L.seed_everything(1)
    model = training.Net()
    environment = HouseEnvironment()
    trainer = training.make_trainer(strategy(), plugins=[environment])
    trainer.fit(model)
    return {
        "rank": trainer.global_rank,
        "validated": environment.validated,
        "weights": training.weights(model),
    }


def test_a_users_cluster_environment_sets_ranks_and_port() -> None:
    """Rank and port are its own, and it validates devices and nodes."""
    ours, stock = (
        run_ranks(
            train_in_the_house, 2, strategy, env={"HOUSE_RANK": str, "HOUSE_PORT": str(free_port())}
        )
        for strategy in (DDPExtStrategy, DDPStrategy)
    )
    training.assert_same(ours, stock)
    assert [trained["rank"] for trained in ours] == [0, 1]
    assert [trained["validated"] for trained in ours] == [[(2, 1)]] * 2
