"""The names that `Trainer(strategy=...)` knows once the package is imported."""

from __future__ import annotations

import importlib

import pytest
from lightning.pytorch.strategies import StrategyRegistry

import lightning_ddp_ext
from lightning_ddp_ext import DDPExtStrategy
from tests.harness.training import make_trainer

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
    """Fifteen names are added, and no others; a reload changes nothing; Lightning's own stay what they were."""
    expected = {
        name + suffix: {"start_method": start_method, **options}
        for name, start_method in START_METHODS.items()
        for suffix, options in SUFFIXES.items()
    }
    importlib.reload(lightning_ddp_ext)
    ours = {name: entry["init_params"] for name, entry in StrategyRegistry.items() if _is_ours(entry["strategy"])}
    assert ours == expected
    assert isinstance(make_trainer("DDP_EXT_Fork").strategy, DDPExtStrategy)
    assert not isinstance(make_trainer("ddp").strategy, DDPExtStrategy)


def _is_ours(strategy: object) -> bool:
    return isinstance(strategy, type) and issubclass(strategy, DDPExtStrategy)
