"""Where the layers of a model stand, and which of them were asked for."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.nn import Module

from lightning_ddp_ext.batchnorm.replacing import is_replacement
from lightning_ddp_ext.errors import ConversionError

Selector = str | type
Selection = Selector | Iterable[Selector] | None
Predicate = Callable[[str, Module], bool]


def check_predicate(predicate: object) -> None:
    """Refuse what cannot be asked about a layer.

    Raises:
        ConversionError: it is neither ``None`` nor a function.
    """
    if predicate is not None and not callable(predicate):
        raise ConversionError(
            f"predicate must be a function of a layer's name and the layer (got {predicate!r}); "
            "for patterns there are include= and exclude="
        )


class Places:
    """Where the layers of a model stand: a layer that is shared stands in several places."""

    def __init__(self, module: Module, is_layer: Callable[[Module], bool]) -> None:
        self._modules = dict(module.named_modules(remove_duplicate=False))
        self.names: dict[Any, list[str]] = {}
        for name, layer in self._modules.items():
            if is_layer(layer):
                self.names.setdefault(layer, []).append(name)

    @property
    def layers(self) -> list[Any]:
        """Each once, in the model's order."""
        return list(self.names)

    def around(self, layer: Module) -> Iterator[tuple[str, Module]]:
        """The layer and the modules that it is in, by name."""
        for name in self.names[layer]:
            yield name, layer
            while name:
                name = name.rpartition(".")[0]
                yield name, self._modules[name]

    def put(self, new: Module, old: Module) -> Any:
        """Put a module where another one stands; returns the whole."""
        for name in self.names[old]:
            above, _, last = name.rpartition(".")
            if name:
                setattr(self._modules[above], last, new)
            else:
                self._modules[""] = new
        return self._modules[""]


def not_chosen(places: Places, include: Selection, exclude: Selection, predicate: Predicate | None) -> dict[Any, str]:
    """The layers that are not to be converted, and why."""
    included, excluded = _selectors(include, "include"), _selectors(exclude, "exclude")
    for field, selectors in (("include", included), ("exclude", excluded)):
        for selector in selectors:
            _refuse_one_that_fits_nothing(field, selector, places)
    why_not = {}
    for layer in places.layers:
        around = list(places.around(layer))
        if any(is_replacement(module) for _, module in around):
            why_not[layer] = "synchronises already"
        elif include is not None and not any(_fits(selector, around) for selector in included):
            why_not[layer] = "not in include"
        elif any(_fits(selector, around) for selector in excluded):
            why_not[layer] = "in exclude"
        elif predicate is not None and not predicate(places.names[layer][0], layer):
            why_not[layer] = "predicate says no"
    return why_not


def _selectors(selection: Selection, field: str) -> list[Selector]:
    if selection is None:
        return []
    is_several = isinstance(selection, Iterable) and not isinstance(selection, (str, type))
    chosen: list[Any] = list(selection) if is_several else [selection]  # type: ignore[arg-type]
    for selector in chosen:
        if not isinstance(selector, (str, type)):
            raise ConversionError(
                f"{field} takes patterns of layer names and classes of layers (got {selector!r}); "
                "for anything else there is predicate="
            )
    return chosen


def _refuse_one_that_fits_nothing(field: str, selector: Selector, places: Places) -> None:
    if places.layers and not any(_fits(selector, list(places.around(layer))) for layer in places.layers):
        names = ", ".join(places.names[layer][0] or "the module" for layer in places.layers[:5])
        more = ", …" if len(places.layers) > 5 else ""
        wanted = repr(selector) if isinstance(selector, str) else selector.__name__
        raise ConversionError(
            f"{field}={wanted} fits no BatchNorm layer; choose among {names}{more}, or modules that they are in"
        )


def _fits(selector: Selector, around: list[tuple[str, Module]]) -> bool:
    if isinstance(selector, str):
        return any(fnmatch.fnmatchcase(name, selector) for name, _ in around if name)
    return any(isinstance(module, selector) for _, module in around)
