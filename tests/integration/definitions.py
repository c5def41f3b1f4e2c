"""What Lightning's and torch's modules and classes define at a moment, and what has become of it."""

from __future__ import annotations

import sys
import warnings
from types import FunctionType
from typing import Any

LIBRARIES = ("lightning", "lightning_fabric", "pytorch_lightning", "torch", "torchmetrics")
KINDS = (FunctionType, type, property, classmethod, staticmethod)


def definitions() -> dict[str, Any]:
    """Functions and classes of the modules that are imported, and the methods and properties of these classes."""
    warnings.simplefilter("ignore", FutureWarning)  # of torch's module attributes
    found: dict[str, Any] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in LIBRARIES:
            found |= defined_in(module, module_name)
            for name, cls in list(vars(module).items()):
                if isinstance(cls, type) and cls.__module__ == module_name:
                    found |= defined_in(cls, f"{module_name}.{name}")
    return found


def defined_in(owner: Any, name: str) -> dict[str, Any]:
    return {f"{name}.{key}": value for key, value in list(vars(owner).items()) if isinstance(value, KINDS)}


def changed(before: dict[str, Any]) -> list[str]:
    """The names of what is no longer what it was."""
    now = definitions()
    return sorted(name for name, value in before.items() if now.get(name) is not value)
