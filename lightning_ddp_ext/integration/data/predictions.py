"""Gather the predictions of all ranks, each sample once and in the dataset's order."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.data.prediction_rows import REMEDY, PredictedBatch, join_batches
from lightning_ddp_ext.errors import SamplingError
from lightning_ddp_ext.nested import tree_map
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
    with _cpu_group() as group:
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), group=group)
        return _gather(trainer, ranks)


@contextmanager
def _cpu_group() -> Iterator[dist.ProcessGroup | None]:
    """Return a group that sends from CPU memory; ``None`` for the default group.

    Rank 0's GPU then does not need memory for all predictions.
    """
    if is_gloo("cpu"):
        yield None
        return
    context = current()
    if context is not None:
        # It is kept for later predictions, and closes with the default group.
        yield context.new_group(backend="gloo", purpose="predictions")
        return
    group = dist.new_group(backend="gloo")
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _gather(trainer: Any, ranks: Ranks) -> Any:
    """Join the predictions of all ranks on rank 0.

    An error of any rank is raised on all ranks. Collective.
    """
    pickled = ranks.on_every_rank(
        lambda: pickle.dumps(tree_map(_copied, _predicted_here(trainer))), "gather_predictions"
    )
    pickled_by_rank = ranks.to_rank_zero(pickled)

    def join() -> Any:
        if pickled_by_rank is None:
            return None
        return _join_ranks(map(pickle.loads, pickled_by_rank))

    return ranks.on_every_rank(join, "gather_predictions")


def _copied(part: Any) -> Any:
    """Copy a tensor that is a part of a larger one, of which pickle would send all."""
    if isinstance(part, MutableMapping):  # such as UserDict; torch looks into dicts itself
        copied = copy.copy(part)
        copied.update({name: tree_map(_copied, value) for name, value in part.items()})
        return copied
    if not isinstance(part, Tensor) or part.layout != torch.strided:
        return part
    return part.clone() if part.untyped_storage().nbytes() > part.nbytes else part


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
    outputs_by_loader = loop.predictions if len(loaders) > 1 else [loop.predictions]
    return [
        _predicted_batches(loader, outputs, f"loader {number}")
        for number, (loader, outputs) in enumerate(zip(loaders, outputs_by_loader, strict=True))
    ]


def _predicted_batches(loader: Any, outputs: list[Any], name: str) -> list[PredictedBatch]:
    # For predict, Lightning wraps batch samplers to record the indices of each batch.
    batch_sampler = getattr(loader, "batch_sampler", None)
    samples_by_batch = getattr(batch_sampler, "seen_batch_indices", [])
    if len(samples_by_batch) < len(outputs):
        raise SamplingError(
            f"{name} must record the samples of each batch (got {type(loader).__name__}, which does"
            " not); use a DataLoader with a map-style dataset"
        )
    # Workers read ahead, so more batches may have been read than predicted.
    pairs = zip(samples_by_batch, outputs, strict=False)
    return [PredictedBatch(list(samples), output) for samples, output in pairs]


def _join_ranks(ranks: Iterable[Predicted]) -> Any:
    """Return each loader's predictions, joined."""
    joined = [_join_in_turn(by_rank) for by_rank in zip(*ranks, strict=True)]
    if all(predictions is None for predictions in joined):
        raise SamplingError(_NO_PREDICTIONS)
    return joined if len(joined) > 1 else joined[0]


def _join_in_turn(by_rank: tuple[list[PredictedBatch], ...]) -> Any:
    """Join the batches of a loader, taken from the ranks in turn.

    Of a repeated sample, the prediction of the earliest step is used.
    """
    steps = zip_longest(*by_rank)
    batches = [batch for step in steps for batch in step if batch is not None]
    try:
        return join_batches(batches)
    except SamplingError:
        raise
    except Exception as error:
        raise SamplingError(
            f"predictions cannot be joined: {type(error).__name__}: {error}; {REMEDY}"
        ) from error
