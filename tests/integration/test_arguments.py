"""The arguments of `DDPExtStrategy`, all of `ddp`'s and ours, and those of callbacks:
wrong ones raise immediately.
"""

from __future__ import annotations

import inspect
import re
import typing
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy

from lightning_ddp_ext import DDPExtStrategy, HangWatchdog, RankConsistency, SamplerEpochSeeding
from lightning_ddp_ext.errors import ConfigurationError, DDPExtError
from tests.harness.ranks import by_hand_env, free_port, launch_ranks
from tests.harness.training import Net, make_trainer

pytestmark = pytest.mark.lowest

TCP = "tcp://127.0.0.1:29500"


def test_every_option_of_lightning_is_a_typed_and_explained_argument() -> None:
    """A default is the same here as in stock ``ddp``; what DDP takes is passed on to
    it.
    """
    ours = inspect.signature(DDPExtStrategy).parameters
    stock = inspect.signature(DDPStrategy).parameters
    assert [
        name for name in stock.keys() - {"kwargs"} if ours[name].default != stock[name].default
    ] == []
    assert typing.get_type_hints(DDPExtStrategy.__init__).keys() - {"return"} == ours.keys()
    section = (inspect.getdoc(DDPExtStrategy) or "").partition("Args:\n")[2].partition("\n\n")[0]
    shown = [str(each).partition(":")[0] for each in ours.values()]
    assert re.findall(r"^    (\**\w+): \S", section, re.MULTILINE) == shown
    assert len(ours) <= 30


NOT_POSITIVE = "{0} must be a positive number of seconds, at least 0.001 (got {1!r}); write {0}=60"
NO_DURATION = "{0} must be a number of seconds or a timedelta (got {1!r}, of type "
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"init_method": "tcp://host"}, "init_method 'tcp://host' needs a port (got none)"),
    ({"init_timeout": 0}, NOT_POSITIVE.format("init_timeout", 0)),
    ({"timeout": timedelta(0)}, NOT_POSITIVE.format("timeout", timedelta(0))),
    ({"timeout": True}, NO_DURATION.format("timeout", True)),
    ({"timeout": "60"}, NO_DURATION.format("timeout", "60")),
    ({"sampler": "fast"}, "sampler must be 'torch' or 'scalable' (got 'fast')"),
    ({"exact_evaluation": 1}, "exact_evaluation must be True or False (got 1)"),
    ({"uneven_inputs": "join"}, "uneven_inputs must be None or 'stop_at_shortest' (got 'join')"),
    (
        {"resume_data": False},
        "resume_data must be 'exact' or 'strict' or 'epoch' or 'stock' (got False)",
    ),
    ({"devices_per_rank": 0}, "devices_per_rank must be at least 1 (got 0)"),
    (
        {"start_method": "thread"},
        "start_method must be 'popen' or 'spawn' or 'fork' or 'forkserver' (got 'th",
    ),
    (
        {"find_unused_parameter": True},
        "no argument 'find_unused_parameter'; did you mean find_unused_parameters? Besides",
    ),
    ({"init_timeot": 1}, "no argument 'init_timeot'; did you mean init_timeout?"),
    ({"module": None}, "no argument 'module'; remove it. Besides its own"),
    ({"qqq": 1}, f"torch {torch.__version__}: output_device, dim, broadcast_buffers, "),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    """The message names the field, the rule, the value and the remedy, or the nearest
    allowed value.
    """
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        DDPExtStrategy(**arguments)


def test_a_wrong_variable_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """At construction, before anything is started."""
    monkeypatch.setenv("DDPX_INIT_METHOD", "tcp://host")
    with pytest.raises(ConfigurationError, match="DDPX_INIT_METHOD"):
        DDPExtStrategy()


def start_on_an_interface(rank: int, world_size: int) -> None:
    make_trainer(DDPExtStrategy(interface="eth99")).fit(Net())


def test_an_interface_that_the_host_does_not_have_is_refused() -> None:
    """The error of gloo names it."""
    outcome, *_ = launch_ranks(start_on_an_interface, 2, env=by_hand_env(2, free_port()))
    assert "Unable to find address for: eth99" in outcome.failure.message, outcome.story()


def start_with_another_version(rank: int, world_size: int) -> None:
    torch.__version__ = f"{torch.__version__}.{rank}"
    make_trainer(DDPExtStrategy(), max_epochs=1).fit(Net())


def test_another_installation_is_refused() -> None:
    """Every rank names the package that differs, and the versions by rank."""
    for outcome in launch_ranks(start_with_another_version, 2, env=by_hand_env(2, free_port())):
        assert outcome.failure.message.startswith(
            "the version of torch must be the same on all ranks: rank 0 ("
        )


def test_a_subclass_may_take_further_arguments() -> None:
    """Only names that no class takes are refused; DDP gets the options that were given."""

    class Mine(DDPExtStrategy):
        def __init__(self, colour: str, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.colour = colour

    for options in ({}, {"find_unused_parameters": False}, {"find_unused_parameters": True}):
        mine = Mine("red", **options)
        assert (mine.colour, mine._ddp_kwargs) == ("red", DDPStrategy(**options)._ddp_kwargs)
    with pytest.raises(ConfigurationError, match="find_unused"):
        Mine("red", find_unused=True)


def test_devices_that_disagree_with_variables_or_devices_per_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The Trainer refuses processes that do not match its devices and nodes, and names
    the source of the number.
    """
    with pytest.raises(
        ConfigurationError, match=r"multiple of devices_per_rank=2 \(got 7\); choose 6 or 8 devices"
    ):
        make_trainer(DDPExtStrategy(devices_per_rank=2), devices=7)
    with pytest.raises(
        ConfigurationError, match=r"multiple of devices_per_rank=2 \(got 1\); choose 2 devices"
    ):
        make_trainer(DDPExtStrategy(devices_per_rank=2), devices=1)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    for devices in (1, 3):
        message = (
            rf"^devices \* num_nodes must equal world_size \(got devices={devices} .*=2, from RANK"
        )
        with pytest.raises(ConfigurationError, match=message):
            make_trainer(DDPExtStrategy(TCP), devices=devices)


NO_STEPS = "every_n_steps must be an integer of at least 1"
OF_CALLBACKS: list[tuple[type[Callback], dict[str, Any], str]] = [
    (HangWatchdog, {"timeout": 0}, "timeout must be a positive number of seconds"),
    (
        HangWatchdog,
        {"timeout": 9, "on_hang": "stop"},
        "on_hang must be 'abort' or 'continue' (got 'stop')",
    ),
    (
        HangWatchdog,
        {"timeout": 9, "directory": "s3://a"},
        "directory must be local (got 's3://a'); pass a local path",
    ),
    (RankConsistency, {"every_n_steps": 0}, NO_STEPS),
    (RankConsistency, {"every_n_steps": 2.5}, NO_STEPS),
    (SamplerEpochSeeding, {"seed": -1}, "seed must be"),
    (SamplerEpochSeeding, {"seed": "7"}, "seed must be"),
    (SamplerEpochSeeding, {"each_sample": True}, "each_sample=True needs a seed"),
]


@pytest.mark.parametrize(("callback", "arguments", "message"), OF_CALLBACKS)
def test_what_a_callback_cannot_take_is_refused(
    callback: type[Callback], arguments: dict[str, Any], message: str
) -> None:
    """The constructor raises; the message names the argument, the allowed values and
    the value received.
    """
    with pytest.raises(DDPExtError, match=re.escape(message)):
        callback(**arguments)
