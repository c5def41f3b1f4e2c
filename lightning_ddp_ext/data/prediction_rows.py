"""Join the predictions of batches into one row per sample, in the samples' order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_ddp_ext.errors import SamplingError

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
    first_rows: dict[Any, int] = {}
    for row, sample in enumerate(sample for batch in batches for sample in batch.samples):
        first_rows.setdefault(sample, row)
    rows = [first_rows[sample] for sample in sorted(first_rows)]
    return _join(
        [batch.output for batch in batches],
        [len(batch.samples) for batch in batches],
        rows,
        "predictions",
    )


def _join(parts: list[Any], sizes: list[int], rows: list[int], name: str) -> Any:
    """Join the parts, and return the given rows of the result.

    A part is the output of one step, or an item of that output, and has one row per
    sample of its batch.
    """

    def join_items(key: Any) -> Any:
        return _join([part[key] for part in parts], sizes, rows, f"{name}[{key!r}]")

    first = parts[0]
    found = {_structure(part): None for part in parts}
    if len(found) > 1:
        raise SamplingError(
            f"{name} must have the same structure in all batches (got {' and '.join(found)});"
            f" {REMEDY}"
        )
    if isinstance(first, Mapping):
        return {key: join_items(key) for key in first}
    if isinstance(first, tuple):
        joined = [join_items(index) for index in range(len(first))]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    for part, size in zip(parts, sizes, strict=True):
        has_rows = isinstance(part, list) or (
            isinstance(part, (Tensor, np.ndarray)) and part.ndim > 0
        )
        if not has_rows or len(part) != size:
            raise SamplingError(
                f"{name} must have one row per sample, {size} in this batch (got"
                f" {type(part).__name__}, rows: {len(part) if has_rows else 'none'}); {REMEDY}"
            )
    if isinstance(first, list):
        items = [item for part in parts for item in part]
        return [items[row] for row in rows]
    return torch.cat(parts)[rows] if isinstance(first, Tensor) else np.concatenate(parts)[rows]


def _structure(part: Any) -> str:
    name = type(part).__name__
    if isinstance(part, Mapping):
        return f"{name} with {', '.join(sorted(map(repr, part)))}"
    return f"{name} of {len(part)}" if isinstance(part, tuple) else name
