"""Find the BatchNorm layers of a model, and select those to convert."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
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
class LayerChoice:
    """A user's choice of BatchNorm layers; by default all of them.

    Attributes:
        include: convert only layers that one of these selects; ``None`` for all.
        exclude: do not convert layers that one of these selects.
    """

    include: Sequence[Selector] | None = None
    exclude: Sequence[Selector] = ()

    @staticmethod
    def of(include: Selection, exclude: Selection) -> LayerChoice:
        """Return the choice for a user's arguments.

        Raises:
            ConfigurationError: a selector is neither a pattern nor a class.
        """
        return LayerChoice(
            None if include is None else _selectors_of(include, "include"),
            () if exclude is None else _selectors_of(exclude, "exclude"),
        )

    def reasons_against(self, model: Module) -> dict[Module, str]:
        """Return the BatchNorm layers that are not chosen, with the reasons.

        Raises:
            ConfigurationError: a selector matches no layer.
        """
        included = _selected(model, self.include or (), "include")
        excluded = _selected(model, self.exclude, "exclude")
        reasons: dict[Module, str] = {}
        for layer in batchnorm_layers(model):
            if self.include is not None and layer not in included:
                reasons[layer] = "not in include"
            elif layer in excluded:
                reasons[layer] = "in exclude"
        return reasons


def _selectors_of(selection: Any, field: str) -> tuple[Selector, ...]:
    """Return the selectors in an argument, which may be an iterator."""
    is_one = isinstance(selection, (str, type)) or not isinstance(selection, Iterable)
    selectors = (selection,) if is_one else tuple(selection)
    for selector in selectors:
        if not isinstance(selector, (str, type)):
            raise ConfigurationError(
                f"{field} takes patterns of layer names and classes of layers (got {selector!r}); "
                "for any other choice, pass a list of names"
            )
    return selectors


def _selected(model: Module, selectors: Iterable[Selector], field: str) -> set[Module]:
    """Return the modules that the selectors match, and the modules inside them."""
    return set().union(*(_selected_by(selector, model, field) for selector in selectors))


def _selected_by(selector: Selector, model: Module, field: str) -> set[Module]:
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
