"""The examples in docstrings are what happens."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import lightning_ddp_ext

MODULES = [module.name for module in pkgutil.walk_packages(lightning_ddp_ext.__path__, "lightning_ddp_ext.")]


def has_examples(name: str) -> bool:
    found = doctest.DocTestFinder().find(importlib.import_module(name))
    return any(test.examples for test in found)


WITH_EXAMPLES = [name for name in MODULES if not name.endswith("__main__") and has_examples(name)]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_are_right(name: str) -> None:
    """Each example prints what the docstring says."""
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted > 0
    assert failed == 0
