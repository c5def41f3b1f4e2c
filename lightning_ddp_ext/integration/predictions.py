"""Bring together what ``trainer.predict`` has predicted on all ranks: each sample once, in the dataset's order."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.data.loader import DistributedLoader
from lightning_ddp_ext.errors import SamplingError
from lightning_ddp_ext.ranks import is_gloo, on_every_rank

from .lightning_tree import pl

_REMEDY = (
    "have predict_step return a tensor or array with a row for each sample, a list with an item for each, or dicts and "
    "tuples of these, alike in every batch, and padded where shapes differ"
)
_NO_PREDICTIONS = (
    "trainer has no predictions; call trainer.predict on every rank first, with data, and by a strategy that neither "
    "spawns nor forks its ranks"
)


class _Batch(NamedTuple):
    """What one step has returned, and the samples that it was for."""

    loader: int
    samples: list[Any]
    output: Any


def gather_predictions(trainer: Any) -> Any:
    """Bring together what the ranks have predicted, after ``trainer.predict``. Collective: every rank must call it.

    Works with any strategy, and on one process. Where a sampler repeats samples, the first prediction of each is
    taken; where batches were limited, there is no more than what was read. Predictions travel in CPU memory.

    Args:
        trainer: a Trainer that has finished ``predict`` and keeps its predictions (``return_predictions``).

    Returns:
        On rank 0 what ``predict_step`` returns, for all samples in the dataset's order: tensors and arrays joined along
        their first dimension, lists with an item a sample joined, dicts and tuples item by item. With several loaders a
        list with one entry each, which is ``None`` where nothing was read. On other ranks ``None``.

    Raises:
        SamplingError: on every rank: there are no predictions, or it is not known which samples they are for, or
            they have no first dimension by sample, or their structures or shapes differ.

    Example::

        trainer.predict(model, loader)
        predictions = gather_predictions(trainer)
        if trainer.is_global_zero:
            torch.save(predictions, "predictions.pt")
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return _join_loaders(*_own_batches(trainer))
    # In CPU memory, so that rank 0's GPU need not hold what it receives.
    group = None if is_gloo("cpu") else dist.new_group(backend="gloo")
    try:
        return _gather(trainer, group)
    finally:
        if group is not None:
            dist.destroy_process_group(group)


def _gather(trainer: Any, group: dist.ProcessGroup | None) -> Any:
    """Join the predictions of all ranks on rank 0; what goes wrong on one rank is raised on all. Collective."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def gather(value: Any) -> list[Any]:
        values = [None] * world_size
        dist.all_gather_object(values, value, group=group)
        return values

    def on_all(work: Callable[[], Any], problem: str) -> Any:
        return on_every_rank(partial(_explained, work, problem), rank=rank, gather=gather, what="gather_predictions")

    own = on_all(lambda: pickle.dumps(_own_batches(trainer)), "predictions must be picklable to be gathered")
    found: list[Any] | None = [None] * world_size if rank == 0 else None
    dist.gather_object(own, found, group=group)
    return on_all(lambda: None if found is None else _join_ranks(found), "predictions cannot be joined")


def _explained(work: Callable[[], Any], problem: str) -> Any:
    try:
        return work()
    except SamplingError:
        raise
    except Exception as error:
        raise SamplingError(f"{problem}: {type(error).__name__}: {error}; {_REMEDY}") from error


def _own_batches(trainer: Any) -> tuple[int, list[_Batch]]:
    """Return the number of loaders, and the batches that this rank has predicted."""
    loop, iterables = trainer.predict_loop, trainer.predict_dataloaders
    if iterables is None:
        raise SamplingError(_NO_PREDICTIONS)
    if not loop.return_predictions:
        raise SamplingError(
            "trainer.predict must keep its predictions (got return_predictions=False); leave the argument out"
        )
    loaders = pl.utilities.CombinedLoader(iterables, "sequential").flattened
    if loop.skip:  # this rank had nothing to read, and its predictions are those of an earlier call
        return len(loaders), []
    outputs = loop.predictions if len(loaders) > 1 else [loop.predictions]
    batches = []
    for number, (loader, of_loader) in enumerate(zip(loaders, outputs, strict=True)):
        seen = getattr(getattr(loader, "batch_sampler", None), "seen_batch_indices", [])
        if len(seen) < len(of_loader):
            name = type(loader.source if isinstance(loader, DistributedLoader) else loader).__name__
            raise SamplingError(
                f"loader {number} must tell which samples a batch holds (got {name}, which does not); "
                "use a DataLoader over a dataset with indices"
            )
        # A loader may have read more than was predicted: workers read ahead.
        batches += [_Batch(number, list(samples), output) for samples, output in zip(seen, of_loader, strict=False)]
    return len(loaders), batches


def _join_ranks(pickled: list[bytes]) -> Any:
    ranks = [pickle.loads(each) for each in pickled]
    steps = zip_longest(*(batches for _, batches in ranks))
    return _join_loaders(ranks[0][0], [batch for step in steps for batch in step if batch is not None])


def _join_loaders(loaders: int, batches: list[_Batch]) -> Any:
    if not batches:
        raise SamplingError(_NO_PREDICTIONS)
    joined = [_join_batches([batch for batch in batches if batch.loader == number]) for number in range(loaders)]
    return joined if loaders > 1 else joined[0]


def _join_batches(batches: list[_Batch]) -> Any:
    if not batches:
        return None
    first_rows: dict[Any, int] = {}
    for row, sample in enumerate(sample for batch in batches for sample in batch.samples):
        first_rows.setdefault(sample, row)
    rows = [first_rows[sample] for sample in sorted(first_rows)]
    return _join([batch.output for batch in batches], [len(batch.samples) for batch in batches], rows, "predictions")


def _join(parts: list[Any], sizes: list[int], rows: list[int], name: str) -> Any:
    """Return the rows, in this order, of what the parts hold together.

    A part is what one batch's step has returned, or an item of that; it has a row for each sample of its batch.
    """

    def join_items(key: Any) -> Any:
        return _join([part[key] for part in parts], sizes, rows, f"{name}[{key!r}]")

    first = parts[0]
    if isinstance(first, Mapping):
        return {key: join_items(key) for key in first}
    if isinstance(first, tuple):
        joined = [join_items(index) for index in range(len(first))]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    for part, size in zip(parts, sizes, strict=True):
        has_rows = isinstance(part, list) or (isinstance(part, (Tensor, np.ndarray)) and part.ndim > 0)
        if not has_rows or len(part) != size or type(part) is not type(first):
            raise SamplingError(
                f"{name} must have a first dimension by sample, {size} in this batch (got {type(part).__name__}, "
                f"rows: {len(part) if has_rows else 'none'}); {_REMEDY}"
            )
    if isinstance(first, list):
        items = [item for part in parts for item in part]
        return [items[row] for row in rows]
    return torch.cat(parts)[rows] if isinstance(first, Tensor) else np.concatenate(parts)[rows]
