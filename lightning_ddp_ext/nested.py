"""Read and rebuild nested dicts, lists and tuples, by torch's ``pytree``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils._pytree import keystr, tree_leaves, tree_map, tree_map_with_path

__all__ = ["keystr", "tree_map", "tree_map_with_path", "values_of"]


def values_of(nested: Any) -> list[Any]:
    """Return the values in nested dicts, lists and tuples.

    >>> values_of({"x": [1, 2], "y": (3,)})
    [1, 2, 3]
    """
    # torch takes other mappings, such as BatchEncoding of transformers, for one value.
    return tree_leaves(dict(nested) if isinstance(nested, Mapping) else nested)
