"""Choose ``lightning`` or ``pytorch_lightning``, and register strategies with both.

The two packages define separate classes, and many environments have both. A Trainer of
one rejects a strategy of the other, so the files of ``integration`` are loaded once for
each package in use: as ``lightning_ddp_ext.integration`` for ``lightning.pytorch``, and
as ``lightning_ddp_ext.pytorch_lightning`` for ``pytorch_lightning``. Everything else,
such as the control channel and the errors, is shared.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The packages as which ``integration`` is loaded, by Lightning tree.
ADAPTERS = {
    "lightning.pytorch": "lightning_ddp_ext.integration",
    "pytorch_lightning": "lightning_ddp_ext.pytorch_lightning",
}


def adapter(name: str) -> Any:
    """Return a module of ``integration`` for the tree of the package's public names."""
    return import_module(f"{ADAPTERS[_chosen]}.{name}")


def register_names() -> None:
    """Register the strategy names with each tree, now or when it is imported."""
    for tree in ADAPTERS:
        if tree in sys.modules:
            _register(tree)
    if _finder not in sys.meta_path:  # a reload calls this again
        sys.meta_path.insert(0, _finder)


def _choose() -> str:
    """Return an imported tree, otherwise an installed one; prefer ``lightning``."""
    imported = [tree for tree in ADAPTERS if tree in sys.modules]
    installed = [
        tree for tree in ADAPTERS if importlib.util.find_spec(tree.partition(".")[0]) is not None
    ]
    return (imported or installed or ["lightning.pytorch"])[0]


def _register(tree: str) -> None:
    # An unsupported version of the other tree must not affect the program.
    with suppress(ImportError):
        import_module(f"{ADAPTERS[tree]}.public")  # importing it registers the names


class _RegisterOnImport(MetaPathFinder):
    """A finder that registers our strategy names once a tree is imported.

    It leaves finding modules to the other finders.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in ADAPTERS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _call_after_import(spec.loader, lambda: _register(name))
        return spec


def _call_after_import(loader: Any, action: Callable[[], None]) -> None:
    """Call ``action`` once after the loader has run a module.

    HACK: Python has no hook for this, so the loader's method is covered by another one.
    """

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # uncovers the class's own method
        loader.exec_module(module)
        action()

    loader.exec_module = exec_module


# Both last until the process exits.
_finder = _RegisterOnImport()
_chosen = _choose()  # the tree whose classes have the package's public names
