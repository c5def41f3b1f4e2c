"""Gather the predictions of all ranks, each sample once and in the dataset's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_ddp_ext.errors import SamplingError
from lightning_ddp_ext.nested import keystr, tree_map_with_path

from ..private.compat import combined_loader_of
from ..strategy_ranks import group_of_small_collectives, ranks_of

_NOT_KNOWN = (
    "trainer must have predictions whose samples are known (got none); first call trainer.predict"
    " on every rank, with return_predictions=True, a strategy that neither spawns nor forks its"
    " ranks, and a DataLoader of a map-style dataset in batches"
)
_REMEDY = (
    "predict_step must return a tensor or array with one row per sample, a list with one item per"
    " sample, or dicts and tuples of these; use the same structure in every batch, and pad rows"
    " whose shapes differ"
)


def gather_predictions(trainer: Any) -> Any:
    """Gather the ranks' predictions after ``trainer.predict``.

    Collective: every rank must call it.

    This works with any strategy, and in a single process. If a sample is predicted
    several times, one of its predictions is used. Samples that were not read, for
    example because batches were limited, are left out.

    Args:
        trainer: a Trainer that has finished ``predict`` and keeps its predictions
            (``return_predictions``).

    Returns:
        On rank 0, the outputs of ``predict_step`` for all samples in the dataset's
        order: tensors and arrays joined along their first dimension, lists with one
        item per sample joined, dicts and tuples item by item. With several loaders, a
        list with one entry per loader, or ``None`` where nothing was read. On other
        ranks, ``None``.

    Raises:
        SamplingError: on every rank: predictions are missing, a loader does not record
            which samples they belong to, they do not have one row per sample, or their
            structures or shapes differ.

    Example::

        trainer.predict(model, loader)
        predictions = gather_predictions(trainer)
        if trainer.is_global_zero:
            torch.save(predictions, "predictions.pt")
    """
    # A group that sends CPU tensors keeps the predictions of all ranks out of GPU memory.
    ranks = replace(ranks_of(trainer.strategy), group=group_of_small_collectives())
    own = ranks.on_every_rank(lambda: _predicted_here(trainer), "gather_predictions")
    by_rank = ranks.to_rank_zero(own) or []  # the other ranks have nothing to join
    joined = ranks.on_every_rank(
        lambda: [_joined(parts).outputs for parts in zip(*by_rank, strict=True)],
        "gather_predictions",
    )
    if not joined:
        return None
    return joined[0] if len(joined) == 1 else joined


class _Predictions(NamedTuple):
    """The predictions of a batch, or all those of a loader on one rank or on all ranks.

    Attributes:
        samples: the samples' numbers in the dataset.
        outputs: the structure that ``predict_step`` returns, with a row for each sample;
            ``None`` if there are no samples.
    """

    samples: list[int]
    outputs: Any


def _predicted_here(trainer: Any) -> list[_Predictions]:
    """Return this rank's predictions of each loader."""
    loop = trainer.predict_loop
    combined = combined_loader_of(loop)
    loaders = combined.flattened if combined is not None and loop.return_predictions else []
    # Those of a single loader are not in a list of loaders.
    outputs_by_loader = [loop.predictions] if len(loaders) == 1 else loop.predictions
    if not loaders or len(outputs_by_loader) != len(loaders):
        raise SamplingError(_NOT_KNOWN)
    return [
        _joined(_batches_of(loader, outputs))
        for loader, outputs in zip(loaders, outputs_by_loader, strict=True)
    ]


def _batches_of(loader: Any, outputs: Sequence[Any]) -> list[_Predictions]:
    """Return the predictions of each batch, from the outputs of a loader's steps."""
    # For `predict`, Lightning wraps a loader's batch sampler, which records the samples of
    # each batch that was read. Those that were only read ahead have no outputs.
    batch_sampler = getattr(loader, "batch_sampler", None)
    samples_read = getattr(batch_sampler, "seen_batch_indices", [])
    if len(samples_read) < len(outputs):
        raise SamplingError(_NOT_KNOWN)
    return [
        _Predictions([int(sample) for sample in samples], output)
        for samples, output in zip(samples_read[: len(outputs)], outputs, strict=True)
    ]


def _joined(parts: Sequence[_Predictions]) -> _Predictions:
    """Return the first prediction of each sample, in the order of the samples."""
    parts = [part for part in parts if part.samples]
    if not parts:
        return _Predictions([], None)
    samples = [sample for part in parts for sample in part.samples]
    in_order, rows = np.unique(samples, return_index=True)  # the first row of each sample

    def join_at(path: Any, *outputs: Any) -> Any:
        for part, output in zip(parts, outputs, strict=True):
            _check_rows(path, output, len(part.samples))
        return _rows_of(outputs, rows)

    try:
        joined = tree_map_with_path(
            join_at,
            *(part.outputs for part in parts),
            is_leaf=lambda output: isinstance(output, list),
        )
    except Exception as error:
        raise SamplingError(
            f"predictions cannot be joined: {type(error).__name__}: {error}; {_REMEDY}"
        ) from error
    return _Predictions(in_order.tolist(), joined)


# A value in the structure that `predict_step` returns: a tensor, an array, or a list with an
# item for each sample.


def _check_rows(path: Any, output: Any, samples: int) -> None:
    """Raise if a value does not have a row for each sample."""
    if len(output) != samples:
        raise ValueError(
            f"predictions{keystr(path)} must have one row per sample, {samples} in a"
            f" batch (got {len(output)})"
        )


def _rows_of(outputs: tuple[Any, ...], rows: Any) -> Any:
    """Join values of one kind, and return these rows of the joined one."""
    if not isinstance(outputs[0], list):
        joined = torch.cat(outputs) if isinstance(outputs[0], Tensor) else np.concatenate(outputs)
        return joined[rows]
    items = list(chain.from_iterable(outputs))
    kept = (items[row] for row in rows)
    # A tensor that is a part of a larger one would be sent with all of it.
    return [item.clone() if isinstance(item, Tensor) else item for item in kept]
