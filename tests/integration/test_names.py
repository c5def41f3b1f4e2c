"""The names that `Trainer(strategy=...)` knows once the package is imported."""

from __future__ import annotations

import importlib
import itertools

import pytest
from lightning.pytorch.strategies import StrategyRegistry

import lightning_ddp_ext
from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.integration.strategy import register
from tests.harness.training import make_trainer

pytestmark = pytest.mark.lowest

START_METHODS = {
    "ddp_ext": "popen",
    "ddp_ext_spawn": "spawn",
    "ddp_ext_fork": "fork",
    "ddp_ext_notebook": "fork",
    "ddp_ext_forkserver": "forkserver",
}
SUFFIXES = {"": False, "_find_unused_parameters_false": False, "_find_unused_parameters_true": True}


@pytest.fixture(autouse=True)
def no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Trainer that would start ranks by forkserver warms the server up; it need not here."""
    monkeypatch.setattr("lightning_ddp_ext.integration.launchers._warm_up_forkserver", lambda: None)


@pytest.mark.parametrize(("name", "suffix"), list(itertools.product(START_METHODS, SUFFIXES)))
def test_a_name_stands_for_its_start_method_and_option(name: str, suffix: str) -> None:
    """Each of the fifteen names makes the strategy that it says, in any case of letters."""
    for spelling in (name + suffix, (name + suffix).upper()):
        strategy = make_trainer(spelling).strategy
        assert isinstance(strategy, DDPExtStrategy)
        assert strategy._start_method == START_METHODS[name]
        assert strategy._ddp_kwargs.get("find_unused_parameters", False) is SUFFIXES[suffix]


def test_these_names_are_added_and_no_others() -> None:
    """What Lightning registers itself stays what it was."""
    ours = {name for name in StrategyRegistry.available_strategies() if StrategyRegistry[name]["strategy"] is not None}
    ours = {name for name in ours if issubclass(StrategyRegistry[name]["strategy"], DDPExtStrategy)}
    assert ours == {name + suffix for name, suffix in itertools.product(START_METHODS, SUFFIXES)}
    assert all("start_method=" in StrategyRegistry[name]["description"] for name in ours)
    assert "DDPExtStrategy" not in type(make_trainer("ddp").strategy).__name__


def test_registering_again_is_harmless() -> None:
    """A second import, a reload and a second registration leave the same names behind."""
    before = StrategyRegistry.available_strategies()
    register()
    DDPExtStrategy.register_strategies(StrategyRegistry)
    importlib.reload(lightning_ddp_ext)
    assert StrategyRegistry.available_strategies() == before
    assert isinstance(make_trainer("ddp_ext").strategy, DDPExtStrategy)
