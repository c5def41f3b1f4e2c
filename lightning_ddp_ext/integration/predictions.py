"""Bring together what ``trainer.predict`` has predicted on all ranks: each sample once, in the dataset's order."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.data.loader import DistributedLoader
from lightning_ddp_ext.errors import ExactEvaluationError
from lightning_ddp_ext.integration.lightning_tree import CombinedLoader
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.supervision.rank_zero import on_every_rank

T = TypeVar("T")

_REMEDY = (
    "have predict_step return a tensor or array with a row for each sample, a list with an item for each, or dicts and "
    "tuples of these"
)
_NO_PREDICTIONS = (
    "trainer has no predictions; call trainer.predict on every rank first, with data, and by a strategy that neither "
    "spawns nor forks its ranks"
)


@dataclass(frozen=True)
class _Batch:
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
        their first dimension, lists with an item a sample joined, dicts and tuples item by item, and lists of tensors
        or arrays with a row a sample, too. With several loaders a list with one entry each, which is ``None`` where
        nothing was read. On other ranks ``None``.

    Raises:
        ExactEvaluationError: on every rank: there are no predictions, or it is not known which samples they are for, or
            they have no first dimension by sample, or their structures or shapes differ.

    Example::

        trainer.predict(model, loader)
        predictions = gather_predictions(trainer)
        if trainer.is_global_zero:
            torch.save(predictions, "predictions.pt")
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return _join_loaders(*_own_batches(trainer))
    with _cpu_group() as group:
        loaders, batches = _on_every_rank(lambda: _own_batches(trainer), group, "predictions cannot be read")
        problem = "predictions must be picklable to be gathered"
        pickled = _on_every_rank(lambda: [pickle.dumps(batch) for batch in batches], group, problem)
        gathered = _to_rank_zero(pickled, group)

        def join() -> Any:
            return _join_loaders(loaders, [pickle.loads(each) for each in gathered]) if dist.get_rank() == 0 else None

        return _on_every_rank(join, group, "predictions cannot be joined")


def _own_batches(trainer: Any) -> tuple[int, list[_Batch]]:
    """Return the number of loaders, and the batches that this rank has predicted."""
    loop, iterables = trainer.predict_loop, trainer.predict_dataloaders
    if iterables is None:
        raise ExactEvaluationError(_NO_PREDICTIONS)
    if not loop.return_predictions:
        raise ExactEvaluationError(
            "trainer.predict must keep its predictions (got return_predictions=False); leave the argument out"
        )
    loaders = CombinedLoader(iterables, "sequential").flattened
    if loop.skip:  # this rank had nothing to read, and its predictions are those of an earlier call
        return len(loaders), []
    outputs = loop.predictions if len(loaders) > 1 else [loop.predictions]
    batches = []
    for number, (loader, of_loader) in enumerate(zip(loaders, outputs, strict=True)):
        seen = getattr(getattr(loader, "batch_sampler", None), "seen_batch_indices", [])
        if len(seen) < len(of_loader):
            name = type(loader.source if isinstance(loader, DistributedLoader) else loader).__name__
            raise ExactEvaluationError(
                f"loader {number} must tell which samples a batch holds (got {name}, which does not); "
                "use a DataLoader over a dataset with indices"
            )
        # A loader may have read more than was predicted: workers read ahead.
        batches += [_Batch(number, list(samples), output) for samples, output in zip(seen, of_loader, strict=False)]
    return len(loaders), batches


# Among the ranks.


@contextmanager
def _cpu_group() -> Iterator[dist.ProcessGroup | None]:
    """Yield a group of all ranks with messages in CPU memory, so that rank 0's GPU need not hold what it receives."""
    context = current()
    if dist.get_backend() == "gloo":
        yield None
    elif context is not None:
        yield context.side_group()
    else:
        group = dist.new_group(backend="gloo")
        try:
            yield group
        finally:
            dist.destroy_process_group(group)


def _on_every_rank(work: Callable[[], T], group: dist.ProcessGroup | None, problem: str) -> T:
    """Run ``work`` on each rank; what goes wrong on one rank is raised on all. Collective."""

    def explained() -> T:
        try:
            return work()
        except ExactEvaluationError:
            raise
        except Exception as error:
            raise ExactEvaluationError(f"{problem}: {type(error).__name__}: {error}") from error

    gather = partial(_all_gather, group=group)
    return on_every_rank(explained, rank=dist.get_rank(), gather=gather, what="gathering predictions")


def _all_gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks, by rank. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def _to_rank_zero(pickled: list[bytes], group: dist.ProcessGroup | None) -> list[bytes]:
    """Return the batches of all ranks, by rank, on rank 0, and none on other ranks. Collective.

    One batch of each rank travels at a time, so that memory holds them once.
    """
    steps: list[list[Any]] = []
    for number in range(max(_all_gather(len(pickled), group))):
        received = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(pickled[number] if number < len(pickled) else None, received, group=group)
        steps.append(received or [])
    return [each for of_rank in zip(*steps, strict=True) for each in of_rank if each is not None]


# Joining.


def _join_loaders(loaders: int, batches: list[_Batch]) -> Any:
    """Join what the batches of each loader hold."""
    if not batches:
        raise ExactEvaluationError(_NO_PREDICTIONS)
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

    _check_alike(parts, lambda part: type(part).__name__, f"{name} must be of one type in every batch")
    first = parts[0]
    if isinstance(first, Mapping):
        _check_alike(parts, lambda part: sorted(map(str, part)), f"{name} must have the same keys in every batch")
        return {key: join_items(key) for key in first}
    if isinstance(first, tuple) or _are_structures(parts, sizes):
        _check_alike(parts, len, f"{name} must have one length in every batch")
        joined = [join_items(index) for index in range(len(first))]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    for part, size in zip(parts, sizes, strict=True):
        if _rows_of(part) != size:
            raise ExactEvaluationError(
                f"{name} must have a first dimension by sample, {size} in this batch (got {type(part).__name__}, "
                f"rows: {_rows_of(part) or 'none'}); {_REMEDY}"
            )
    if isinstance(first, list):
        items = [item for part in parts for item in part]
        return [items[row] for row in rows]
    _check_alike(parts, lambda part: tuple(part.shape[1:]), f"{name} must have one shape after the first dimension")
    return torch.cat(parts)[rows] if isinstance(first, Tensor) else np.concatenate(parts)[rows]


def _are_structures(parts: list[Any], sizes: list[int]) -> bool:
    """Whether lists have tensors or arrays with a row for each sample, rather than one item for each sample."""
    return all(isinstance(part, list) and len(part) == len(parts[0]) > 0 for part in parts) and all(
        isinstance(item, (Tensor, np.ndarray)) and _rows_of(item) == size
        for part, size in zip(parts, sizes, strict=True)
        for item in part
    )


def _rows_of(part: Any) -> int | None:
    has_rows = isinstance(part, list) or (isinstance(part, (Tensor, np.ndarray)) and part.ndim > 0)
    return len(part) if has_rows else None


def _check_alike(parts: list[Any], trait: Callable[[Any], object], rule: str) -> None:
    found = sorted({str(trait(part)) for part in parts})
    if len(found) > 1:
        raise ExactEvaluationError(
            f"{rule} (got {', '.join(found)}); have predict_step return what is alike in every batch, padded where "
            "shapes differ, or a list with an item for each sample"
        )
