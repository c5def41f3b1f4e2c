"""The strategy works by name and as an object, in either Lightning, and takes the
plugins that ddp takes.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import lightning_ddp_ext
from lightning_ddp_ext import DDPExtStrategy, World
from lightning_ddp_ext.integration.private.replaced_methods import ReplacedMethods
from tests.harness import ranks, training
from tests.harness.scripts import run_script
from tests.harness.training import Net

START_METHODS = {
    "ddp_ext": "popen",
    "ddp_ext_spawn": "spawn",
    "ddp_ext_fork": "fork",
    "ddp_ext_notebook": "fork",
    "ddp_ext_forkserver": "forkserver",
}
SUFFIXES = {
    "": {},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
}


@pytest.mark.lowest
def test_a_name_stands_for_its_start_method_and_option() -> None:
    """Fifteen names are added, and Lightning's own names are unchanged.

    A reload changes nothing.
    """
    expected = {
        name + suffix: {"start_method": start_method, **options}
        for name, start_method in START_METHODS.items()
        for suffix, options in SUFFIXES.items()
    }
    importlib.reload(lightning_ddp_ext)
    ours = {
        name: entry["init_params"]
        for name, entry in StrategyRegistry.items()
        if _is_ours(entry["strategy"])
    }
    assert ours == expected
    assert isinstance(training.make_trainer("DDP_EXT_Fork").strategy, DDPExtStrategy)
    assert not isinstance(training.make_trainer("ddp").strategy, DDPExtStrategy)


def _is_ours(strategy: object) -> bool:
    return isinstance(strategy, type) and issubclass(strategy, DDPExtStrategy)


@pytest.mark.lowest
def test_a_notebook_may_fork_ranks_and_do_nothing_else() -> None:
    """Lightning refuses every other start method in an interactive session."""
    is_compatible = {
        "ddp_ext_notebook": True,
        "ddp_ext_fork": True,
        "ddp_ext": False,
        "ddp_ext_spawn": False,
    }
    for name, expected in is_compatible.items():
        launcher: Any = training.make_trainer(name).strategy.launcher
        assert launcher.is_interactive_compatible is expected, name


class Used(NamedTuple):
    """A strategy's values before and after a run, and whether rank 1 was at the barrier
    before.
    """

    worlds: list[World]
    copies: list[str]  # their init methods
    barrier_waited: bool


def use_strategy(kind: training.Kind, directory: Path) -> Used:
    strategy = training.make_strategy("ours", directory, find_unused_parameters=True)
    assert isinstance(strategy, DDPExtStrategy)
    waited: list[bool] = []

    def work(trainer: L.Trainer) -> None:
        if trainer.global_rank == 1:
            (directory / "rank 1 was here").touch()
        strategy.barrier("a name")
        waited.append((directory / "rank 1 was here").exists())

    trainer = training.make_trainer(strategy, callbacks=[training.At("on_train_start", work)])
    worlds = [strategy.world]
    copies = [pickle.loads(pickle.dumps(strategy))]
    trainer.fit(Net())
    worlds.append(strategy.world)
    copies.append(pickle.loads(pickle.dumps(strategy)))
    return Used(worlds, [str(copy.rendezvous.init_method) for copy in copies], waited[0])


def test_the_strategy_serves_its_user(tmp_path: Path) -> None:
    """`world` is right as soon as the strategy has a Trainer, and `barrier` works.

    The strategy can be pickled.
    """
    for rank, found in enumerate(training.on_ranks("ours", use_strategy, tmp_path)):
        counts = {"world_size": 2, "local_world_size": 2, "node_rank": 0}
        world = World(
            rank=rank, local_rank=rank, source="RANK, WORLD_SIZE and LOCAL_RANK", **counts
        )
        assert found.worlds == [world, world]
        assert found.copies == [f"file://{tmp_path}/ours/store"] * 2
        assert found.barrier_waited


def open_by_hand(kind: training.Kind, directory: Path) -> tuple[Any, ...]:
    """Open a group before a run, with a backend that is registered after the strategy
    is made; use it, also with a module without a Trainer; return errors.
    """
    strategy = training.make_strategy(kind, directory, process_group_backend="later")
    dist.Backend.register_backend(
        "later", lambda *options: dist.ProcessGroupGloo(*options), devices=["cpu"]
    )
    trainer = training.make_trainer(strategy)
    strategy.setup_environment()
    backend = dist.get_backend()
    strategy.connect(Net())
    strategy.setup_environment()
    sent = strategy.broadcast(trainer.global_rank)
    decisions = [
        strategy.reduce_boolean_decision(trainer.is_global_zero, all=each) for each in (True, False)
    ]
    trainer.fit(Net())
    error = RuntimeError(
        "Expected to have finished reduction in the prior iteration before starting a new one."
    )
    strategy.on_exception(error)
    return backend, sent, decisions, trainer.global_step, str(error)


def test_the_strategy_is_used_by_hand_as_stock_is(tmp_path: Path) -> None:
    """`setup_environment` works without a module or Trainer, and a backend may come late.

    Lightning's hints appear.
    """
    ours, stock = training.on_both(open_by_hand, tmp_path)
    assert [facts[0] for facts in ours] == ["later", "later"]
    assert [facts[1:] for facts in ours] == [facts[1:] for facts in stock]


class Owner:
    """An object of Lightning's without any private name."""


@pytest.mark.lowest
def test_a_private_name_that_lightning_removed_is_named() -> None:
    """The error names the class, the name, the version and the remedy.

    Nothing is replaced.
    """
    owner = Owner()
    needs = r"needs .*Owner\.{}, which \S+ \d\S* does not .*; install"
    with pytest.raises(ImportError, match=needs.format("forget")):
        ReplacedMethods().replace(owner, "forget", lambda: None)
    assert not hasattr(owner, "forget")


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


def with_plugins(kind: training.Kind, directory: Path) -> dict[str, Any]:
    L.seed_everything(1)
    io = CountingIO()
    path = directory / "it.ckpt"
    plugins = [AsyncCheckpointIO(io)]
    save = training.At("on_train_end", lambda trainer: trainer.save_checkpoint(path))
    trainer = training.fit(kind, directory, Net(), save, plugins=plugins)
    trainer.strategy.barrier()  # rank 0 has written its file
    model = Net()
    training.fit(kind, directory, model, ckpt_path=path, plugins=plugins, max_epochs=3)
    return {"io": io.calls, "weights": training.weights(model)}


def test_a_users_own_checkpoint_io_does_what_it_does_with_stock(tmp_path: Path) -> None:
    """A user's checkpoint IO writes on rank 0 and reads on every rank.

    It does so also in Lightning's AsyncCheckpointIO.
    """
    ours, stock = training.on_both(with_plugins, tmp_path)
    training.assert_same(
        [result.pop("weights") for result in ours], [result.pop("weights") for result in stock]
    )
    assert ours == stock
    assert [result["io"] for result in ours] == [["save", "load"], ["load"]]


def in_the_house(rank: int, world_size: int, strategy: type[DDPStrategy]) -> dict[str, Any]:
    L.seed_everything(1)
    model = Net()
    environment = HouseEnvironment()
    trainer = training.make_trainer(strategy(), plugins=[environment])
    trainer.fit(model)
    return {
        "rank": trainer.global_rank,
        "asked": environment.settings,
        "weights": training.weights(model),
    }


def test_a_users_cluster_environment_sets_ranks_and_address() -> None:
    """Rank, address and port are its own, and it validates devices and nodes."""
    ours, stock = (
        ranks.run_ranks(
            in_the_house, 2, strategy, env={"HOUSE_RANK": str, "HOUSE_PORT": str(ranks.free_port())}
        )
        for strategy in (DDPExtStrategy, DDPStrategy)
    )
    training.assert_same(ours, stock)
    assert [result["rank"] for result in ours] == [0, 1]
    assert ours[0]["asked"] == [(2, 1)]


OTHER_TREE = """
    import json
    import os
    import sys

    import pytorch_lightning as pl
    from pytorch_lightning.demos.boring_classes import BoringModel
    import lightning_ddp_ext

    if __name__ == "__main__":
        rank = str(int(os.fork() == 0))
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        os.environ["DDPX_INIT_METHOD"] = f"file://{sys.argv[2]}"
        pl.seed_everything(1)
        options = dict(
            strategy="ddp_ext", devices=2, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        consistency = lightning_ddp_ext.RankConsistency()
        trainer = pl.Trainer(max_steps=2, callbacks=[consistency], **options)
        trainer.fit(BoringModel())
        trainer.save_checkpoint(sys.argv[1])
        trainer = pl.Trainer(max_steps=4, **options)
        model = BoringModel()
        trainer.fit(model, ckpt_path=sys.argv[1])
        trainer.predict(model)
        predictions = lightning_ddp_ext.gather_predictions(trainer)
        report = {
            "rank": trainer.global_rank,
            "world": trainer.world_size,
            "steps": trainer.global_step,
            "predictions": None if predictions is None else len(predictions),
            "is of this tree": isinstance(trainer.strategy, pl.strategies.DDPStrategy),
            "weights": model.layer.weight.sum().item().hex(),
            "other tree": sorted(
                name for name in sys.modules if name.partition(".")[0] == "lightning"
            ),
        }
        import lightning as L
        from lightning.pytorch.demos.boring_classes import BoringModel as LightningModel

        trainer = L.Trainer(max_steps=1, **options)
        trainer.fit(LightningModel())
        report["steps with lightning"] = trainer.global_step
        sys.stdout.write(json.dumps(report) + "\\n")
        sys.stdout.flush()
        if rank == "0":
            sys.exit(os.wait()[1])
"""


def test_the_other_tree_trains(tmp_path: Path) -> None:
    """The Trainer of `pytorch_lightning` trains, resumes and predicts.

    `lightning` is not imported. Where the script imports it later, its Trainer trains
    on the same ranks.
    """
    done = run_script(OTHER_TREE, str(tmp_path / "it.ckpt"), str(tmp_path / "store"))
    assert done.exit_code == 0, done.output
    told = [json.loads(line) for line in done.output.splitlines() if line[:1] == "{"]
    reports = sorted(told, key=lambda report: report["rank"])
    assert [(report["rank"], report["world"], report["steps"]) for report in reports] == [
        (0, 2, 4),
        (1, 2, 4),
    ]
    assert [report["predictions"] for report in reports] == [64, None]
    assert len({report["weights"] for report in reports}) == 1
    assert all(report["is of this tree"] for report in reports)
    assert not any(report["other tree"] for report in reports)
    assert [report["steps with lightning"] for report in reports] == [1, 1]


def give_other_callback(rank: int, world_size: int) -> str:
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel

    from lightning_ddp_ext.errors import ConfigurationError
    from lightning_ddp_ext.pytorch_lightning import HangWatchdog

    class Mine(HangWatchdog):
        pass

    trainer = L.Trainer(
        strategy="ddp_ext", devices=1, accelerator="cpu", callbacks=[Mine(60)], logger=False
    )
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(BoringModel())
    return str(caught.value)


def test_a_callback_of_the_other_tree_is_refused() -> None:
    """The error names its tree, and the right import."""
    assert ranks.run_ranks(give_other_callback, 1) == [
        "HangWatchdog is made for pytorch_lightning, but this Trainer is from lightning; "
        "write 'from lightning_ddp_ext.lightning import HangWatchdog'"
    ]


def train_with_all_warnings(rank: int, world_size: int, directory: Path) -> None:
    warnings.simplefilter("always")
    training.fit("ours", directory, Net(), max_epochs=1)


def test_a_run_uses_nothing_deprecated(tmp_path: Path) -> None:
    """No library warns of a call in this package, in any tested version of torch."""
    for outcome in ranks.launch_ranks(train_with_all_warnings, 2, tmp_path):
        assert outcome.exit_code == 0, outcome.story()
        warned = re.findall(r"lightning_ddp_ext/\S+\.py:\d+: .*", outcome.output)
        assert warned == [], outcome.story()
