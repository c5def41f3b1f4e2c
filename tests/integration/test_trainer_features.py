"""`DDPExtStrategy` in place of `ddp`: the same numbers, files and calls, to the last bit.

These are the models, options, loaders and plugins that the programs of
``test_stock_sweep`` do not have.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.utils.data import DataLoader

from lightning_ddp_ext import ConfigurationError, DDPExtStrategy
from tests.harness import training
from tests.harness.environment import skip_because
from tests.harness.ranks import free_port, run_ranks

# Manual optimisation, as Lightning's documentation shows it.


class Accumulates(training.ByHand):
    """Steps after every second batch, and the scheduler at the end of the epoch."""

    def training_step(self, batch: training.Batch, index: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if (index + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()


class WithClosure(training.ByHand):
    """Passes a closure to an optimiser that calls it several times."""

    def training_step(self, batch: training.Batch, index: int) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Case(NamedTuple):
    """A model, options of the Trainer and of the strategy."""

    model: type[training.Net] = training.Net
    trainer: Mapping[str, Any] = {}
    strategy: Mapping[str, Any] = {}


MODEL_AVERAGING = {
    "ddp_comm_state": PostLocalSGDState(None, None, start_localSGD_iter=2),
    "model_averaging_period": 2,
}
SHORT = {"max_epochs": 1}
CASES = {
    "accumulation": Case(trainer={"accumulate_grad_batches": 3}),
    "bf16-mixed": Case(trainer={"precision": "bf16-mixed", **SHORT}),
    "manual accumulation in a static graph": Case(Accumulates, strategy={"static_graph": True}),
    "a closure": Case(WithClosure, SHORT, {"find_unused_parameters": True}),
    "bucket views": Case(
        trainer=SHORT, strategy={"gradient_as_bucket_view": True, "bucket_cap_mb": 1}
    ),
    "own buffers": Case(trainer=SHORT, strategy={"broadcast_buffers": False, "init_sync": False}),
    "model averaging": Case(strategy=MODEL_AVERAGING),
}


def train(kind: training.Kind, directory: Path, case: Case, ranks: int) -> dict[str, Any]:
    L.seed_everything(7)
    model = case.model()
    options = {"devices": ranks, "strategy": case.strategy, "limit_val_batches": 0}
    trainer = training.fit(kind, directory, model, **options, **case.trainer)
    return {
        "weights": training.weights(model),
        "parameters": [*model.parameters()],
        "step": trainer.global_step,
        # Three values are added in another order than by stock.
        "metrics": dict(trainer.callback_metrics) if ranks < 3 else {},
    }


def train_all(kind: training.Kind, directory: Path, ranks: int) -> dict[str, Any]:
    return {name: train(kind, directory, case, ranks) for name, case in CASES.items()}


@pytest.mark.lowest
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_numbers_are_those_of_stock_ddp(ranks: int, tmp_path: Path) -> None:
    """Weights and logged values equal stock's on each rank, to the last bit.

    For three ranks the division by their number is not exact. One Trainer follows another
    in the same processes.
    """
    ours, stock = (
        training.on_ranks(kind, train_all, tmp_path, ranks, world_size=ranks)
        for kind in training.KINDS
    )
    training.assert_same(ours, stock)
    # With torch 2.8, ranks of stock also end with different weights there.
    diverging = {"manual accumulation in a static graph"} if torch.__version__ < "2.9" else set()
    for name in CASES.keys() - diverging:
        for on_rank in ours:
            training.assert_same(on_rank[name]["parameters"], ours[0][name]["parameters"])
        assert ours[0][name]["step"] > 1, name


# Data modules, the best checkpoint, spawned workers and compiled networks.


class Module(L.LightningDataModule):
    """Has its own data, and records the called hooks.

    A spawned worker gets a bound method, and with it this data module and its Trainer.
    """

    def __init__(self, context: str) -> None:
        super().__init__()
        self.context = context
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append("setup")

    def teardown(self, stage: str) -> None:
        self.calls.append("teardown")

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(training.data(16), batch_size=2, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(training.data(8), batch_size=2)

    def test_dataloader(self) -> DataLoader[Any]:
        workers: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": self.context}
        return DataLoader(training.data(8), batch_size=4, collate_fn=self.collate, **workers)

    def collate(self, samples: list[Any]) -> training.Batch:
        x, y = zip(*samples, strict=True)
        return [2 * torch.stack(x), torch.stack(y)]


def fit_and_test_the_best(kind: training.Kind, directory: Path, context: str) -> dict[str, Any]:
    L.seed_everything(7)
    checkpoint = ModelCheckpoint(directory / "files", "{epoch}", monitor="val_loss")
    module = Module(context)
    model = training.Net()
    trainer = training.make_trainer(
        training.make_strategy(kind, directory), callbacks=[checkpoint], enable_checkpointing=True
    )
    trainer.fit(model, datamodule=module)
    return {
        "hooks": [*module.calls],
        "best": Path(checkpoint.best_model_path).name,
        "tested": trainer.test(model, module, ckpt_path="best", verbose=False),
    }


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_a_data_module_is_trained_on_and_the_best_checkpoint_tested(
    context: str, tmp_path: Path
) -> None:
    """Hooks, files and metrics are stock's on each rank, also with spawned workers."""
    ours, stock = training.on_both(fit_and_test_the_best, tmp_path, context)
    assert ours == stock
    assert ours[0]["hooks"] == ["prepare_data", "setup", "teardown"]
    assert ours[1]["hooks"] == ["setup", "teardown"]


class Compiled(training.Net):
    def configure_model(self) -> None:
        self.layers = torch.compile(nn.Linear(4, 1))  # each further kernel takes seconds


def train_compiled(kind: training.Kind, directory: Path) -> dict[str, Any]:
    L.seed_everything(7)
    return training.learned(kind, directory, Compiled(), max_epochs=1, limit_val_batches=0)


@pytest.mark.nightly
def test_a_compiled_network_learns_what_it_learns_with_stock(tmp_path: Path) -> None:
    """This holds for torch's own compiler, inductor."""
    skip_because(
        None if shutil.which(os.environ.get("CXX", "g++")) else "inductor needs a C++ compiler"
    )
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ours, stock = (
        training.on_ranks(kind, train_compiled, tmp_path, env=env) for kind in training.KINDS
    )
    training.assert_same(ours, stock)


# A user's checkpoint IO and cluster environment.


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
    """Train in the user's cluster; return the rank, what the environment has validated, and
    the weights.
    """
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


# A rank with several devices, for a model that spans them.


class Spanning(training.Net):
    """Puts its layers on the devices of its rank in turn; each of them is the CPU."""

    def configure_model(self) -> None:
        devices: list[torch.device] = self.trainer.strategy.rank_devices
        for index, layer in enumerate(self.layers):
            layer.to(devices[index % len(devices)])


def train_and_resume(
    kind: training.Kind, directory: Path, per_rank: int
) -> tuple[list[str], dict[str, Any]]:
    """Train, resume and test on two ranks with this number of devices each.

    Return a rank's devices, and the results that must not depend on their number.
    """
    L.seed_everything(1)
    files = directory / f"{per_rank} per rank"
    model = Spanning()
    checkpoint = ModelCheckpoint(files, save_last=True)
    options = {
        "strategy": {"devices_per_rank": per_rank},
        "devices": 2 * per_rank,
        "sync_batchnorm": True,
        "enable_checkpointing": True,
    }
    training.fit(kind, directory, model, checkpoint, **options)
    resumed = {"max_epochs": 3, "ckpt_path": files / "last.ckpt", **options}
    trainer = training.fit(kind, directory, model, checkpoint, **resumed)
    results = {
        "world size": trainer.world_size,
        "weights": training.weights(model),
        "steps": trainer.global_step,
        "tested": trainer.test(model, verbose=False),
    }
    return [str(device) for device in trainer.strategy.rank_devices], results


def test_two_devices_a_rank_learn_as_one_does(tmp_path: Path) -> None:
    """With four devices, two ranks train: sampling, SyncBatchNorm, checkpoints and
    metrics equal those of two ranks with one device each.
    """
    ones = training.on_ranks("ours", train_and_resume, tmp_path, 1)
    twos = training.on_ranks("ours", train_and_resume, tmp_path, 2)
    assert [devices for devices, _ in ones] == [["cpu"]] * 2
    assert [devices for devices, _ in twos] == [["cpu", "cpu"]] * 2
    results = [results for _, results in ones]
    training.assert_same(results, [results for _, results in twos])
    assert results[0]["world size"] == 2


def test_a_parameter_on_another_device_than_its_ranks_is_named() -> None:
    """The error names the parameter, its device, and the devices to choose from."""
    strategy = DDPExtStrategy(
        devices_per_rank=2, parallel_devices=[torch.device("cuda", number) for number in range(2)]
    )
    strategy.cluster_environment = LightningEnvironment()
    strategy.connect(training.Net())
    message = (
        r"layers\.0\.weight is on cpu; put it on one of self\.trainer\.strategy\.rank_devices"
        r" \(cuda:0, cuda:1\)"
    )
    with pytest.raises(ConfigurationError, match=message):
        strategy.model_to_device()


@pytest.mark.lowest
@pytest.mark.parametrize(("devices", "valid"), [(7, 6), (1, 2)])
def test_devices_that_cannot_be_divided_are_refused(devices: int, valid: int) -> None:
    """The error names a valid number of devices."""
    message = rf"multiple of devices_per_rank=2 \(got {devices}\); write, .*devices={valid}"
    with pytest.raises(ConfigurationError, match=message):
        training.make_trainer(DDPExtStrategy(devices_per_rank=2), devices=devices)
