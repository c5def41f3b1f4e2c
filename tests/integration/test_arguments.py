"""The arguments of the strategy and of callbacks have the expected names and defaults, and
wrong values raise in the constructor.
"""

import inspect
import re
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy

from lightning_ddp_ext import (
    ConfigurationError,
    DDPExtError,
    DDPExtStrategy,
    RankConsistency,
    RankDebugger,
    SamplerEpochSeeding,
)

pytestmark = pytest.mark.lowest

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


NOT_POSITIVE = (
    "{0} must be a positive number of seconds, at least 0.001 (got {1!r}); write {0}=60 for a"
    " minute"
)
NOT_A_DURATION = "{0} must be a number of seconds or a timedelta (got {1!r}, of type {2}); write"
NOT_DEVICES = "devices_per_rank must be an integer of at least 1 (got {0!r}); leave it out to"
NOT_A_FILE = "stop_checkpoint must be the name or path of a file, or None (got {0!r}); for example"
# Arguments, and what the error says of them.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"init_method": "tcp://host"}, "init_method 'tcp://host' needs a port (got none)"),
    ({"init_timeout": 0}, NOT_POSITIVE.format("init_timeout", 0)),
    ({"timeout": timedelta(0)}, NOT_POSITIVE.format("timeout", timedelta(0))),
    ({"timeout": True}, NOT_A_DURATION.format("timeout", True, "bool")),
    ({"timeout": "60"}, NOT_A_DURATION.format("timeout", "60", "str")),
    ({"exact_evaluation": 1}, "exact_evaluation must be True or False (got 1)"),
    ({"uneven_inputs": "join"}, "uneven_inputs must be None or 'stop_at_shortest' (got 'join')"),
    ({"resume_data": False}, "resume_data must be 'exact' or 'stock' (got False)"),
    ({"devices_per_rank": 0}, NOT_DEVICES.format(0)),
    ({"devices_per_rank": "2"}, NOT_DEVICES.format("2")),
    ({"stop_checkpoint": True}, NOT_A_FILE.format(True)),
    ({"stop_checkpoint": "runs/"}, NOT_A_FILE.format("runs/")),
    ({"nccl": {"debug": "INFO"}}, "nccl must be an NCCLOptions or None (got {'debug': 'INFO'})"),
    (
        {"interface": ["lo"]},
        "interface must be the name of a network interface or None (got ['lo'])",
    ),
    (
        {"start_method": "thread"},
        "start_method must be 'popen', 'spawn', 'fork' or 'forkserver' (got 'thread')",
    ),
    ({"bucket_cap_mb": "25"}, "bucket_cap_mb must be a number of megabytes or None (got '25')"),
    ({"checkpoint_io": 5}, "checkpoint_io must be a CheckpointIO or None (got 5); write,"),
    (
        {"cluster_environment": "slurm"},
        "cluster_environment must be a ClusterEnvironment or None (got 'slurm')",
    ),
    # Names that the constructor does not have.
    (
        {"find_unused_parameter": True},
        "no argument 'find_unused_parameter'; did you mean find_unused_parameters? Besides its",
    ),
    ({"init_timeot": 1}, "no argument 'init_timeot'; did you mean init_timeout?"),
    ({"module": None}, "no argument 'module'; remove it. Besides its own arguments, it accepts"),
    (
        {"qqq": 1},
        "it accepts those of DistributedDataParallel in torch"
        f" {torch.__version__}: output_device, dim, broadcast_buffers, ",
    ),
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


NOT_STEPS = "every_n_steps must be an integer of at least 1 (got {0})"
NOT_A_SEED = "seed must be an integer of at least 0 (got {0!r})"
OF_CALLBACKS: list[tuple[type[Callback], dict[str, Any], str]] = [
    (RankDebugger, {"rank": "1"}, "rank must be an integer of at least 0 (got '1')"),
    (
        RankDebugger,
        {"rank": 1, "port": 99999},
        "port must be an integer from 1 to 65535 (got 99999)",
    ),
    (RankConsistency, {"every_n_steps": 0}, NOT_STEPS.format(0)),
    (RankConsistency, {"every_n_steps": 2.5}, NOT_STEPS.format(2.5)),
    (SamplerEpochSeeding, {"seed": -1}, NOT_A_SEED.format(-1)),
    (SamplerEpochSeeding, {"seed": "7"}, NOT_A_SEED.format("7")),
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
