"""A private name of Lightning's that changes is noticed when Lightning is imported; ruff
refuses private names in modules that pyproject.toml does not list.
"""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_ddp_ext
from lightning_ddp_ext.integration.private.replaced_methods import ReplacedMethods

ROOT = Path(lightning_ddp_ext.__file__).parent


class Owner:
    """An object of Lightning's without any private name."""


@pytest.mark.lowest
def test_a_private_name_that_lightning_removed_is_named() -> None:
    """The error names the class, the name, the version and the remedy, and nothing is
    replaced.
    """
    owner = Owner()
    message = r"needs .*Owner\.forget, which \S+ \d\S* does not .*; install"
    with pytest.raises(ImportError, match=message):
        ReplacedMethods().replace(owner, "forget", lambda: None)
    assert not hasattr(owner, "forget")


def adapters() -> Iterator[type]:
    """Yield the classes of ``integration``."""
    for path in (ROOT / "integration").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        module = importlib.import_module(name.removesuffix(".__init__"))
        yield from (value for value in vars(module).values() if isinstance(value, type))


def test_overridden_private_methods_are_checked_when_lightning_is_imported() -> None:
    """Without a check, Lightning would stop calling a method of ours that it renamed,
    without an error.
    """
    overridden = {
        name
        for adapter in adapters()
        if adapter.__module__.startswith("lightning_ddp_ext")
        for name in vars(adapter)
        if re.match("_(?!_|abc_)", name)
        for base in adapter.__mro__
        if base.__module__.startswith("lightning.") and name in vars(base)
    }
    source = (ROOT / "integration/private/lightning_tree.py").read_text()
    assert overridden
    assert overridden <= set(re.findall(r'"(_\w+)"', source))
