"""The strategy can be chosen by its name, and used without a running Trainer. Its arguments
and those of callbacks have the expected names, types and defaults, and wrong values raise
immediately.
"""

import importlib
import inspect
import re
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import lightning_ddp_ext
from lightning_ddp_ext import (
    ConfigurationError,
    DDPExtError,
    DDPExtStrategy,
    RankConsistency,
    RankDebugger,
    SamplerEpochSeeding,
)
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


def test_a_name_stands_for_its_start_method_and_option() -> None:
    """Importing the package again adds no name, and no finder, which would look for
    Lightning by the first one, and that by the new one.
    """
    expected = {
        name + suffix: {"start_method": start_method, **options}
        for name, start_method in START_METHODS.items()
        for suffix, options in SUFFIXES.items()
    }
    finders = [*sys.meta_path]
    importlib.reload(lightning_ddp_ext)
    assert sys.meta_path == finders
    registered = {
        name: entry["init_params"]
        for name, entry in StrategyRegistry.items()
        if entry["strategy"] is DDPExtStrategy
    }
    assert registered == expected


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


# Arguments.


OURS = inspect.signature(DDPExtStrategy).parameters


def test_arguments_of_stock_have_stocks_defaults() -> None:
    """``DDPExtStrategy`` has every named argument of ``ddp``."""
    stock = inspect.signature(DDPStrategy).parameters
    named = stock.keys() - {"kwargs"}
    assert {name: OURS[name].default for name in named} == {
        name: stock[name].default for name in named
    }


def test_every_argument_is_explained_in_the_docstring() -> None:
    """The explanations are in the order of the arguments."""
    section = (inspect.getdoc(DDPExtStrategy) or "").partition("Args:\n")[2].partition("\n\n")[0]
    as_written = [str(parameter).partition(":")[0] for parameter in OURS.values()]
    assert re.findall(r"^    (\**\w+): \S", section, re.MULTILINE) == as_written


NOT_POSITIVE = "{0} must be a positive number of seconds, at least 0.001 (got {1!r}); write {0}=60"
NOT_A_DURATION = "{0} must be a number of seconds or a timedelta (got {1!r}, of type "
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"init_method": "tcp://host"}, "init_method 'tcp://host' needs a port (got none)"),
    ({"init_timeout": 0}, NOT_POSITIVE.format("init_timeout", 0)),
    ({"timeout": timedelta(0)}, NOT_POSITIVE.format("timeout", timedelta(0))),
    ({"timeout": True}, NOT_A_DURATION.format("timeout", True)),
    ({"timeout": "60"}, NOT_A_DURATION.format("timeout", "60")),
    ({"exact_evaluation": 1}, "exact_evaluation must be True or False (got 1)"),
    ({"uneven_inputs": "join"}, "uneven_inputs must be None or 'stop_at_shortest' (got 'join')"),
    (
        {"resume_data": False},
        "resume_data must be 'exact' or 'stock' (got False)",
    ),
    ({"devices_per_rank": 0}, "devices_per_rank must be an integer of at least 1 (got 0); leave"),
    ({"devices_per_rank": "2"}, "devices_per_rank must be an integer of at least 1 (got '2')"),
    ({"stop_checkpoint": True}, "stop_checkpoint must be the name or path of a file, or None"),
    ({"stop_checkpoint": "runs/"}, "stop_checkpoint must be the name or path of a file, or None"),
    ({"nccl": {"debug": "INFO"}}, "nccl must be an NCCLOptions or None (got {'debug': 'INFO'})"),
    ({"interface": ["lo"]}, "interface must be the name of a network interface or None (got ['"),
    (
        {"start_method": "thread"},
        "start_method must be 'popen', 'spawn', 'fork' or 'forkserver' (got 'th",
    ),
    (
        {"find_unused_parameter": True},
        "no argument 'find_unused_parameter'; did you mean find_unused_parameters? Besides",
    ),
    ({"init_timeot": 1}, "no argument 'init_timeot'; did you mean init_timeout?"),
    ({"module": None}, "no argument 'module'; remove it. Besides its own"),
    ({"qqq": 1}, f"torch {torch.__version__}: output_device, dim, broadcast_buffers, "),
    ({"bucket_cap_mb": "25"}, "bucket_cap_mb must be a number of megabytes or None (got '25')"),
    ({"checkpoint_io": 5}, "checkpoint_io must be a CheckpointIO or None (got 5); write"),
    ({"cluster_environment": "slurm"}, "cluster_environment must be a ClusterEnvironment or"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_a_value_that_is_not_allowed_is_refused(arguments: dict[str, Any], message: str) -> None:
    """The message names the field, the rule and the value, or a similar name."""
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        DDPExtStrategy(**arguments)


def test_a_wrong_value_in_a_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constructor raises, and the error names the variable."""
    monkeypatch.setenv("DDPX_INIT_METHOD", "tcp://host")
    with pytest.raises(ConfigurationError, match="DDPX_INIT_METHOD"):
        DDPExtStrategy()


def test_an_interface_that_the_host_does_not_have_is_refused(tmp_path: Path) -> None:
    """The error is gloo's, and names the interface."""
    outcome, *_ = training.fit_on(2, tmp_path, training.Net(), strategy={"interface": "eth99"})
    assert "Unable to find address for: eth99" in outcome.failure.message, outcome.story()


class Coloured(DDPExtStrategy):
    """A user's strategy with an additional argument."""

    def __init__(self, colour: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.colour = colour


def test_a_subclass_may_take_further_arguments() -> None:
    """A name that no class takes is refused; the error only suggests names that exist."""
    assert Coloured("red", find_unused_parameters=True).colour == "red"
    with pytest.raises(ConfigurationError, match="did you mean find_unused_parameters"):
        Coloured("red", find_unused=True)
    with pytest.raises(ConfigurationError, match="no argument 'ddp_kwargs'; remove it"):
        DDPExtStrategy(ddp_kwargs={"bucket_cap_mb": 50})


def test_a_task_of_srun_may_start_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an interactive job, it unsets SLURM_STEP_NUM_TASKS, as the error says."""
    variables = {**environment_of(0, by_srun()), "SLURM_JOB_NAME": "bash"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    environment: Any = training.make_trainer(
        DDPExtStrategy(), devices=2
    ).strategy.cluster_environment
    assert not environment.creates_processes_externally


NOT_STEPS = "every_n_steps must be an integer of at least 1"
OF_CALLBACKS: list[tuple[type[Callback], dict[str, Any], str]] = [
    (RankDebugger, {"rank": "1"}, "rank must be an integer of at least 0 (got '1')"),
    (RankDebugger, {"rank": 1, "port": 99999}, "port must be an integer from 1 to 65535 (got 99"),
    (RankConsistency, {"every_n_steps": 0}, NOT_STEPS),
    (RankConsistency, {"every_n_steps": 2.5}, NOT_STEPS),
    (SamplerEpochSeeding, {"seed": -1}, "seed must be"),
    (SamplerEpochSeeding, {"seed": "7"}, "seed must be"),
]


@pytest.mark.parametrize(("callback", "arguments", "message"), OF_CALLBACKS)
def test_a_value_that_a_callback_does_not_allow_is_refused(
    callback: type[Callback], arguments: dict[str, Any], message: str
) -> None:
    """The constructor raises; the message names the argument, the allowed values and
    the value received.
    """
    with pytest.raises(DDPExtError, match=re.escape(message)):
        callback(**arguments)
