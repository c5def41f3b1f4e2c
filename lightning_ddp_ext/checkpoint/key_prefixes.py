"""Ignore the prefixes of wrapped models' weights, and recognise plain state dicts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

_COMPILED = "_orig_mod."
_WRAPPED = "module."


def is_plain_state_dict(content: Any) -> bool:
    """Whether the content is what ``torch.save(model.state_dict(), path)`` writes."""
    return (
        isinstance(content, Mapping)
        and any(isinstance(value, Tensor) for value in content.values())
        and all(isinstance(key, str) for key in content)
        and "state_dict" not in content
        and "pytorch-lightning_version" not in content
    )


def canonical(name: str) -> str:
    """Return a name without the prefixes of DDP and ``torch.compile``.

    >>> canonical("module._orig_mod.net._orig_mod.weight")
    'net.weight'
    """
    name = name.replace(_COMPILED, "")
    while name.startswith(_WRAPPED):
        name = name[len(_WRAPPED) :]
    return name


def names_in_model(file_names: Iterable[str], model_names: Iterable[str]) -> dict[str, str]:
    """Map the file's names to the model's if they differ only in prefixes.

    Names found in both, and names with more than one candidate, are left out.

    >>> names_in_model(["module.net.weight"], ["net.weight"])
    {'module.net.weight': 'net.weight'}
    """
    in_file = set(file_names)
    in_model = set(model_names)
    left_over = _unambiguous(in_file - in_model)
    missing = _unambiguous(in_model - in_file)
    return {name: missing[short] for short, name in left_over.items() if short in missing}


def _unambiguous(names: Iterable[str]) -> dict[str, str]:
    """Return the names whose canonical name is unique, by that canonical name."""
    by_canonical: dict[str, list[str]] = {}
    for name in names:
        by_canonical.setdefault(canonical(name), []).append(name)
    return {short: found[0] for short, found in by_canonical.items() if len(found) == 1}


def renamed(weights: Mapping[str, Any], names: Mapping[str, str]) -> OrderedDict[str, Any]:
    """Return the weights, with their module versions, under the model's names."""
    result = OrderedDict((names.get(name, name), value) for name, value in weights.items())
    metadata = getattr(weights, "_metadata", None)
    if isinstance(metadata, Mapping):
        modules = {
            name.rpartition(".")[0]: target.rpartition(".")[0] for name, target in names.items()
        }
        kept = OrderedDict(
            (modules.get(module, module), value) for module, value in metadata.items()
        )
        result._metadata = kept  # type: ignore[attr-defined] # where load_state_dict looks for it
    return result
