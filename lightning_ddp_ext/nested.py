"""Read and rebuild nested mappings, lists and tuples.

The package uses torch's functions for this, which are private, through this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils._pytree import keystr, tree_iter, tree_map_with_path

__all__ = ["keystr", "tree_map_with_path", "values_of"]


def values_of(nested: Any) -> Iterator[Any]:
    """Yield the values in nested mappings, lists and tuples.

    >>> list(values_of({"x": [1, 2], "y": (3,)}))
    [1, 2, 3]
    """
    for value in tree_iter(nested):
        # torch takes other mappings, such as BatchEncoding of transformers, for one value.
        if isinstance(value, Mapping):
            yield from values_of(dict(value))
        else:
            yield value
