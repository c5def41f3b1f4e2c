"""The strategy can be chosen by its name in scripts, notebooks and interactive jobs, and used
without a running Trainer.

``test_arguments`` shows the arguments of its constructor.
"""

import importlib
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry
from torch.distributed import ReduceOp

import lightning_ddp_ext
from lightning_ddp_ext import DDPExtStrategy
from tests.harness import training
from tests.harness.environment import by_srun, environment_of
from tests.harness.ranks import launch_ranks

pytestmark = pytest.mark.lowest

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


def registered_names() -> dict[str, dict[str, Any]]:
    """Return the arguments for which each name stands."""
    return {
        name: entry["init_params"]
        for name, entry in StrategyRegistry.items()
        if entry["strategy"] is DDPExtStrategy
    }


def test_a_name_stands_for_its_start_method_and_option() -> None:
    """Each start method has a name, with Lightning's suffixes for an option of DDP."""
    assert registered_names() == {
        name + suffix: {"start_method": start_method, **options}
        for name, start_method in START_METHODS.items()
        for suffix, options in SUFFIXES.items()
    }


def test_importing_the_package_again_changes_nothing() -> None:
    """Names are the same. A second finder would find Lightning through the first one, and
    that through the second one.
    """
    finders = [*sys.meta_path]
    names = registered_names()
    importlib.reload(lightning_ddp_ext)
    assert sys.meta_path == finders
    assert registered_names() == names


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


def reduce_values(kind: training.Kind, directory: Path) -> dict[str, Any]:
    """Reduce values of two ranks, of which rank 0 has the smaller ones."""
    trainer = training.make_trainer(training.make_strategy(kind, directory))
    trainer.test(training.Net(), verbose=False)
    rank = trainer.global_rank
    reduce: Any = trainer.strategy.reduce
    in_place = torch.tensor(float(rank))
    reduce(in_place, reduce_op="mean")
    reduced = {
        f"{op}": reduce(torch.tensor([1 + rank, 4]), reduce_op=op)
        for op in ("mean", "sum", "min", ReduceOp.SUM)
    }
    return {
        **reduced,
        "in place": in_place,
        "number": reduce(3.0),
        "half": reduce(torch.tensor(0.5 * rank, dtype=torch.half)),
    }


def test_tensors_that_are_not_logged_are_reduced_as_with_stock(tmp_path: Path) -> None:
    """``Strategy.reduce`` returns what stock's does, and changes the same tensors."""
    ours, stock = training.on_both(reduce_values, tmp_path)
    training.assert_same(ours, stock)


def train_with_all_warnings(rank: int, world_size: int, directory: Path) -> None:
    warnings.simplefilter("always")
    training.fit("ours", directory, training.Net(), max_epochs=1)


def test_a_run_uses_nothing_deprecated(tmp_path: Path) -> None:
    """No library warns of a call in this package, in any tested version of torch."""
    for outcome in launch_ranks(train_with_all_warnings, 2, tmp_path):
        assert outcome.exit_code == 0, outcome.story()
        assert not re.search(r"lightning_ddp_ext/\S+\.py:\d+: ", outcome.output), outcome.story()


def test_an_interface_that_the_host_does_not_have_is_refused(tmp_path: Path) -> None:
    """The error is gloo's, and names the interface."""
    outcome, *_ = training.fit_on(2, tmp_path, training.Net(), strategy={"interface": "eth99"})
    assert "Unable to find address for: eth99" in outcome.failure.message, outcome.story()


def test_a_task_of_srun_may_start_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an interactive job, it unsets SLURM_STEP_NUM_TASKS, as the error says."""
    for name, value in {**environment_of(0, by_srun()), "SLURM_JOB_NAME": "bash"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    environment: Any = training.make_trainer(
        DDPExtStrategy(), devices=2
    ).strategy.cluster_environment
    assert not environment.creates_processes_externally
