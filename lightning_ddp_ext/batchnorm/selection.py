"""Find the BatchNorm layers of a model, and select those to convert."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from lightning_ddp_ext.batchnorm.layer import BatchNorm
from lightning_ddp_ext.errors import ConfigurationError

Selector = str | type
Selection = Selector | Iterable[Selector] | None


def batchnorm_layers(model: Module) -> dict[BatchNorm, str]:
    """Return the BatchNorm layers of a model with their names, each layer once."""
    return {layer: name for name, layer in model.named_modules() if isinstance(layer, BatchNorm)}


@dataclass(frozen=True)
class Choice:
    """A user's choice of BatchNorm layers; by default all of them."""

    include: Selection = None
    exclude: Selection = None

    def __post_init__(self) -> None:
        for field in ("include", "exclude"):
            selection = getattr(self, field)
            if isinstance(selection, Iterator):  # can be read once, but each fit reads it
                object.__setattr__(self, field, tuple(selection))

    def reasons_against(self, model: Module) -> dict[Module, str]:
        """Return the BatchNorm layers that are not chosen, with the reasons.

        Raises:
            ConfigurationError: a selector matches no layer, or is neither a pattern nor
                a class.
        """
        included = _selected(model, self.include, "include")
        excluded = _selected(model, self.exclude, "exclude")
        reasons: dict[Module, str] = {}
        for layer in batchnorm_layers(model):
            if self.include is not None and layer not in included:
                reasons[layer] = "not in include"
            elif layer in excluded:
                reasons[layer] = "in exclude"
        return reasons


def _selected(model: Module, selection: Selection, field: str) -> set[Module]:
    """Return the modules that match a selection, and the modules inside them."""
    if selection is None:
        return set()
    is_one = isinstance(selection, (str, type)) or not isinstance(selection, Iterable)
    selectors: Iterable[Any] = [selection] if is_one else selection  # type: ignore[assignment]
    return set().union(*(_selected_by(selector, model, field) for selector in selectors))


def _selected_by(selector: Any, model: Module, field: str) -> set[Module]:
    if not isinstance(selector, (str, type)):
        raise ConfigurationError(
            f"{field} takes patterns of layer names and classes of layers (got {selector!r}); "
            "for any other choice, pass a list of names"
        )
    selected: set[Module] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if _matches(selector, name, module):
            selected.update(module.modules())
    layers = batchnorm_layers(model)
    if layers and selected.isdisjoint(layers):
        names = ", ".join(name or "the module" for name in list(layers.values())[:5])
        more = ", …" if len(layers) > 5 else ""
        shown = repr(selector) if isinstance(selector, str) else selector.__name__
        raise ConfigurationError(
            f"{field}={shown} matches no BatchNorm layer; choose among {names}{more}, or modules"
            " that contain them"
        )
    return selected


def _matches(selector: Selector, name: str, module: Module) -> bool:
    if isinstance(selector, str):
        return fnmatch.fnmatchcase(name, selector)
    return isinstance(module, selector)
