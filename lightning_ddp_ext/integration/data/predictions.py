"""Gather the predictions of all ranks, each sample once and in the dataset's order."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_ddp_ext.errors import SamplingError
from lightning_ddp_ext.nested import keystr, tree_map_with_path

from ..private.compat import combined_loader_of
from ..strategy_ranks import group_of_small_collectives, ranks_of

_Rows = tuple[list[Any], Any]  # the numbers of samples, and outputs with a row for each

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
    by_rank = ranks.to_rank_zero(
        ranks.on_every_rank(lambda: _predicted_here(trainer), "gather_predictions")
    )

    def join_ranks() -> list[Any] | None:
        # On rank 0 only; the others have no predictions.
        return by_rank and [_join_samples(parts)[1] for parts in zip(*by_rank, strict=True)]

    joined = ranks.on_every_rank(join_ranks, "gather_predictions")
    return joined[0] if joined and len(joined) == 1 else joined


def _predicted_here(trainer: Any) -> list[_Rows]:
    """Return this rank's predictions of each loader."""
    loop = trainer.predict_loop
    combined = combined_loader_of(loop)
    loaders = combined.flattened if combined is not None and loop.return_predictions else []
    # For `predict`, Lightning wraps a loader's batch sampler, which records the samples of
    # each batch that was read, perhaps ahead.
    batch_samplers = [getattr(loader, "batch_sampler", None) for loader in loaders]
    samples_by_loader = [getattr(each, "seen_batch_indices", []) for each in batch_samplers]
    outputs_by_loader = loop.predictions if len(loaders) > 1 else [loop.predictions]
    by_loader = list(zip(samples_by_loader, outputs_by_loader, strict=False))
    if not by_loader or any(len(samples) < len(outputs) for samples, outputs in by_loader):
        raise SamplingError(
            "trainer must have predictions whose samples are known (got none); first call"
            " trainer.predict on every rank, with return_predictions=True, a strategy that neither"
            " spawns nor forks its ranks, and a DataLoader of a map-style dataset in batches"
        )
    # Samples that were only read ahead have no outputs.
    return [_join_samples(tuple(zip(*loader, strict=False))) for loader in by_loader]


def _join_samples(parts: tuple[_Rows, ...]) -> _Rows:
    """Return the first row of each sample, in the order of the samples."""
    parts = tuple(part for part in parts if len(part[0]) > 0)
    if not parts:
        return [], None
    batches, outputs_of_batches = zip(*parts, strict=True)
    samples = [int(sample) for batch in batches for sample in batch]
    in_order, rows = np.unique(samples, return_index=True)

    def join_outputs(path: Any, *outputs: Any) -> Any:
        for batch, output in zip(batches, outputs, strict=True):
            if len(output) != len(batch):
                raise ValueError(
                    f"predictions{keystr(path)} must have one row per sample, {len(batch)} in a"
                    f" batch (got {len(output)})"
                )
        if isinstance(outputs[0], list):
            items = list(chain.from_iterable(outputs))
            # A tensor that is a part of a larger one would be sent with all of it.
            kept = (items[row] for row in rows)
            return [item.clone() if isinstance(item, Tensor) else item for item in kept]
        joined = torch.cat(outputs) if isinstance(outputs[0], Tensor) else np.concatenate(outputs)
        return joined[rows]

    try:
        joined = tree_map_with_path(
            join_outputs, *outputs_of_batches, is_leaf=lambda part: isinstance(part, list)
        )
    except Exception as error:
        raise SamplingError(
            f"predictions cannot be joined: {type(error).__name__}: {error}; {_REMEDY}"
        ) from error
    return in_order.tolist(), joined
