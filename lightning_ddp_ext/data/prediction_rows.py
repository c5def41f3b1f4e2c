"""Join the predictions of batches into one row per sample, in the samples' order."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_ddp_ext.errors import SamplingError
from lightning_ddp_ext.nested import keystr, tree_map, tree_map_with_path

REMEDY = (
    "predict_step must return a tensor or array with one row per sample, a list with one item per"
    " sample, or dicts and tuples of these; use the same structure in every batch, and pad rows"
    " whose shapes differ"
)


class PredictedBatch(NamedTuple):
    """The output of one step, and the samples of its batch."""

    samples: list[Any]
    output: Any


def join_batches(batches: list[PredictedBatch]) -> Any:
    """Return the first prediction of each sample, in the order of the samples.

    The result is ``None`` if ``batches`` is empty.

    >>> join_batches([PredictedBatch([2, 0], ["c", "a"]), PredictedBatch([1, 2], ["b", "again"])])
    ['a', 'b', 'c']

    Raises:
        SamplingError: an output does not have one row per sample.
    """
    if not batches:
        return None
    outputs = [_with_plain_dicts(batch.output) for batch in batches]
    first, *others = [_structure_of(output) for output in outputs]
    for other in others:
        if other != first:
            raise SamplingError(
                f"predictions must have the same structure in all batches (got {first}"
                f" and {other}); {REMEDY}"
            )
    sizes = [len(batch.samples) for batch in batches]
    rows = _rows_in_order([sample for batch in batches for sample in batch.samples])

    def join(path: Any, *parts: Any) -> Any:
        _check_rows(parts, sizes, f"predictions{keystr(path)}")
        return _join(parts, rows)

    return tree_map_with_path(join, *outputs, is_leaf=_is_list)


def _with_plain_dicts(output: Any) -> Any:
    """Return an output with dicts in place of other mappings, into which torch does not look."""
    return tree_map(
        lambda part: _with_plain_dicts(dict(part)) if isinstance(part, Mapping) else part,
        output,
        is_leaf=_is_list,
    )


def _is_list(part: Any) -> bool:
    return isinstance(part, list)


def _structure_of(output: Any) -> Any:
    """Return an output with the class name in place of each tensor, array and list."""
    return tree_map(lambda part: type(part).__name__, output, is_leaf=_is_list)


def _rows_in_order(samples: list[Any]) -> list[int]:
    """Return the first row of each sample, in the order of the samples."""
    first_rows: dict[Any, int] = {}
    for row, sample in enumerate(samples):
        # A user's sampler may yield tensors, of which no two are equal as keys.
        first_rows.setdefault(sample.item() if isinstance(sample, Tensor) else sample, row)
    return [first_rows[sample] for sample in sorted(first_rows)]


def _check_rows(parts: tuple[Any, ...], sizes: list[int], name: str) -> None:
    """Raise if a part does not have one row for each sample of its batch."""
    for part, size in zip(parts, sizes, strict=True):
        is_array = isinstance(part, (Tensor, np.ndarray)) and part.ndim > 0
        rows = len(part) if is_array or isinstance(part, list) else "none"
        if rows != size:
            raise SamplingError(
                f"{name} must have one row per sample, {size} in this batch (got"
                f" {type(part).__name__}, rows: {rows}); {REMEDY}"
            )


def _join(parts: tuple[Any, ...], rows: list[int]) -> Any:
    """Join tensors, arrays or lists, and return the given rows of the result."""
    if isinstance(parts[0], list):
        items = list(chain.from_iterable(parts))
        return [items[row] for row in rows]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)[rows]
    return np.concatenate(parts)[rows]
