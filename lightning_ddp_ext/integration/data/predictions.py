"""Gather the predictions of all ranks, each sample once and in the dataset's order."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch.distributed as dist

from lightning_ddp_ext.data.prediction_rows import REMEDY, PredictedBatch, join_batches
from lightning_ddp_ext.errors import SamplingError
from lightning_ddp_ext.ranks import Ranks, is_gloo
from lightning_ddp_ext.rendezvous.process_context import current

from ..private.lightning_tree import pl

Predicted = list[list[PredictedBatch]]  # by loader

_NO_PREDICTIONS = (
    "trainer has no predictions; first call trainer.predict with data on every rank, using a"
    " strategy that neither spawns nor forks its ranks"
)


def gather_predictions(trainer: Any) -> Any:
    """Gather the ranks' predictions after ``trainer.predict``.

    Collective: every rank must call it.

    This works with any strategy, and in a single process. If a sampler repeats samples,
    the first prediction of each is used. If batches were limited, only the batches that
    were read are included. Predictions are sent in CPU memory.

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
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return _join_ranks([_predicted_here(trainer)])
    # gloo sends from CPU memory, so that rank 0's GPU does not need memory for all
    # predictions.
    if is_gloo("cpu"):
        return _gather(trainer, None)
    context = current()
    if context is not None:
        return _gather(trainer, context.new_group(backend="gloo", purpose="predictions"))
    group = dist.new_group(backend="gloo")
    try:
        return _gather(trainer, group)
    finally:
        dist.destroy_process_group(group)


def _gather(trainer: Any, group: dist.ProcessGroup | None) -> Any:
    """Join the predictions of all ranks on rank 0.

    An error of any rank is raised on all ranks. Collective.
    """
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), group=group)
    own = ranks.on_every_rank(lambda: pickle.dumps(_predicted_here(trainer)), "gather_predictions")
    found = ranks.to_rank_zero(own)

    def join() -> Any:
        return None if found is None else _join_ranks(map(pickle.loads, found))

    return ranks.on_every_rank(join, "gather_predictions")


def _predicted_here(trainer: Any) -> Predicted:
    """Return the batches that this rank predicted."""
    loop = trainer.predict_loop
    iterables = trainer.predict_dataloaders
    if iterables is None:
        raise SamplingError(_NO_PREDICTIONS)
    if not loop.return_predictions:
        raise SamplingError(
            "trainer.predict must keep its predictions (got return_predictions=False); remove that"
            " argument"
        )
    loaders = pl.utilities.CombinedLoader(iterables, "sequential").flattened
    if loop.skip:  # this rank had no data, and its predictions belong to an earlier call
        return [[] for _ in loaders]
    outputs = loop.predictions if len(loaders) > 1 else [loop.predictions]
    found = []
    for number, (loader, of_loader) in enumerate(zip(loaders, outputs, strict=True)):
        # For predict, Lightning wraps batch samplers to record the indices of each batch.
        seen = getattr(getattr(loader, "batch_sampler", None), "seen_batch_indices", [])
        if len(seen) < len(of_loader):
            raise SamplingError(
                f"loader {number} must record the samples of each batch (got"
                f" {type(loader).__name__}, which does not); use a DataLoader with a map-style"
                " dataset"
            )
        # Workers read ahead, so more batches may have been read than predicted.
        found.append(
            [
                PredictedBatch(list(samples), each)
                for samples, each in zip(seen, of_loader, strict=False)
            ]
        )
    return found


def _join_ranks(ranks: Iterable[Predicted]) -> Any:
    """Join each loader's batches, taken from the ranks in turn."""
    joined = []
    for by_rank in zip(*ranks, strict=True):
        in_turn = [batch for step in zip_longest(*by_rank) for batch in step if batch is not None]
        try:
            joined.append(join_batches(in_turn))
        except SamplingError:
            raise
        except Exception as error:
            raise SamplingError(
                f"predictions cannot be joined: {type(error).__name__}: {error}; {REMEDY}"
            ) from error
    if all(each is None for each in joined):
        raise SamplingError(_NO_PREDICTIONS)
    return joined if len(joined) > 1 else joined[0]
