"""The strategy can be chosen by its name, and used without a running Trainer."""

import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import lightning_ddp_ext
from lightning_ddp_ext import DDPExtStrategy
from tests.harness import training
from tests.harness.ranks import launch_ranks

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
    """Importing the package again does not add names or raise."""
    expected = {
        name + suffix: {"start_method": start_method, **options}
        for name, start_method in START_METHODS.items()
        for suffix, options in SUFFIXES.items()
    }
    importlib.reload(lightning_ddp_ext)
    registered = {
        name: entry["init_params"]
        for name, entry in StrategyRegistry.items()
        if entry["strategy"] is DDPExtStrategy
    }
    assert registered == expected


@pytest.mark.lowest
def test_a_trainer_finds_the_strategy_by_its_name() -> None:
    """Capital letters do not matter, and ``ddp`` still is Lightning's own strategy."""
    assert type(training.make_trainer("DDP_EXT_Fork").strategy) is DDPExtStrategy
    assert type(training.make_trainer("ddp").strategy) is DDPStrategy


@pytest.mark.lowest
@pytest.mark.parametrize(
    ("name", "is_compatible"),
    [
        ("ddp_ext_notebook", True),
        ("ddp_ext_fork", True),
        ("ddp_ext", False),
        ("ddp_ext_spawn", False),
    ],
)
def test_a_notebook_may_only_fork_ranks(name: str, is_compatible: bool) -> None:
    """Lightning refuses every other start method in an interactive session."""
    launcher: Any = training.make_trainer(name).strategy.launcher
    assert launcher.is_interactive_compatible is is_compatible


def use_by_hand(kind: training.Kind, directory: Path) -> dict[str, Any]:
    """Form a group and call methods of the strategy, and then train."""
    strategy = training.make_strategy(kind, directory)
    trainer = training.make_trainer(strategy)
    strategy.setup_environment()  # without a module
    strategy.connect(training.Net())
    strategy.setup_environment()  # with a module that has no Trainer
    results = {
        "broadcast": strategy.broadcast(trainer.global_rank),
        "all": strategy.reduce_boolean_decision(trainer.is_global_zero, all=True),
        "any": strategy.reduce_boolean_decision(trainer.is_global_zero, all=False),
    }
    trainer.fit(training.Net())
    return {**results, "steps": trainer.global_step}


def test_the_strategy_is_used_by_hand_as_stock_is(tmp_path: Path) -> None:
    """Methods work before a run and without a module."""
    ours, stock = training.on_both(use_by_hand, tmp_path)
    assert ours == stock


def train_with_all_warnings(rank: int, world_size: int, directory: Path) -> None:
    warnings.simplefilter("always")
    training.fit("ours", directory, training.Net(), max_epochs=1)


def test_a_run_uses_nothing_deprecated(tmp_path: Path) -> None:
    """No library warns of a call in this package, in any tested version of torch."""
    for outcome in launch_ranks(train_with_all_warnings, 2, tmp_path):
        assert outcome.exit_code == 0, outcome.story()
        warned = re.findall(r"lightning_ddp_ext/\S+\.py:\d+: .*", outcome.output)
        assert warned == [], outcome.story()
