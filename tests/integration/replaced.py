"""Which methods and classes of a Trainer's objects are not those that they were written with."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata
from torch import nn
from torchmetrics import Metric

# Whose objects are looked into.
FAMILIES = ("lightning", "pytorch_lightning", "lightning_ddp_ext", "torch.utils.data", "torchdata", "tests")
OURS = "lightning_ddp_ext"
DATA = ("loader", "fetcher", "result", "iter", "_maxsize", "_minsize", "_sequential")  # in the names of classes


def replaced(*roots: Any) -> list[str]:
    """All that is replaced in objects that can be reached from these: "_FitLoop.run", or "class of _FitLoop"."""
    objects = list(reachable(roots))
    classes = {each for thing in objects for each in type(thing).__mro__}
    found = [f"{_name(thing)}.{name}" for thing in objects for name in shadowed(thing)]
    found += [f"class of {_name(thing)}" for thing in objects if not _is_written(type(thing))]
    found += [f"{each.__qualname__}.{name}" for each in classes if _is_theirs(each) for name in _ours_in(vars(each))]
    found += [f"{name}: {each}" for name, module in _their_modules() for each in _ours_in(vars(module))]
    return sorted(found)


def of_data(names: Iterable[str]) -> list[str]:
    """Those that belong to a loader, an iterator over loaders, a fetcher or a result."""
    owners = {name: name.removeprefix("class of ").partition(".")[0].lower() for name in names}
    return [name for name, owner in owners.items() if any(word in owner for word in DATA)]


def shadowed(thing: Any) -> list[str]:
    """Attributes of an object that stand before methods of a class that is not ours."""
    names = [name for name, value in getattr(thing, "__dict__", {}).items() if callable(value)]
    return [name for name in names if _is_method(type(thing), name) and not _is_their_own_doing(thing, name)]


def _is_method(kind: type, name: str) -> bool:
    owner = next((each for each in kind.__mro__ if name in vars(each)), None)
    return owner is not None and not owner.__module__.startswith(OURS) and callable(getattr(kind, name))


def _is_their_own_doing(thing: Any, name: str) -> bool:
    """What is the same with stock: metrics wrap two methods, and ``forward`` is put back as it was found."""
    if isinstance(thing, Metric) and name in ("update", "compute"):
        return getattr(getattr(thing, name), "__wrapped__", None) is not None
    if isinstance(thing, LightningModule) and name == "forward":
        return getattr(thing.forward, "__func__", None) is type(thing).forward
    return isinstance(thing, _Metadata) and name == "reduce_fx"


def reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """Objects of these families that hang on the roots by their attributes, in containers or without."""
    seen: set[int] = set()
    left = list(roots)
    while left:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Mapping):
            left += list(thing.values())
        elif isinstance(thing, (list, tuple, set, frozenset)):
            left += list(thing)
        if not isinstance(thing, (type, ModuleType, FunctionType)) and _is_looked_into(thing):
            left += list(getattr(thing, "__dict__", {}).values())
            yield thing


def _is_looked_into(thing: Any) -> bool:
    """Layers are not: converting them is what some callbacks are for. Optimizers are classes of Lightning's making."""
    if isinstance(thing, (nn.Module, LightningOptimizer)):
        return isinstance(thing, (LightningModule, Metric))
    return any(each.__module__.startswith(FAMILIES) for each in type(thing).__mro__)


def _is_written(kind: type) -> bool:
    """Whether a class stands in its module, and was not made while the program ran; those of tests may be local."""
    place: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        place = getattr(place, name, None)
    return place is kind or kind.__module__.startswith("tests")


def _is_theirs(kind: type) -> bool:
    return kind.__module__.startswith(FAMILIES) and not kind.__module__.startswith((OURS, "tests"))


def _their_modules() -> list[tuple[str, ModuleType]]:
    families = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "torch.utils.data")
    return [(name, module) for name, module in list(sys.modules.items()) if name.startswith(families)]


def _ours_in(names: Mapping[str, Any]) -> list[str]:
    return [name for name, value in list(names.items()) if _is_our_function(value)]


def _is_our_function(value: Any) -> bool:
    function = getattr(value, "__func__", value)
    return isinstance(function, FunctionType) and function.__module__.startswith(OURS)


def _name(thing: Any) -> str:
    return type(thing).__qualname__
