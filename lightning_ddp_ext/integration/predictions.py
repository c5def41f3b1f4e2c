"""Bring together what ``trainer.predict`` has predicted on all ranks: each sample once, in the dataset's order."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from lightning_ddp_ext.rendezvous.process_group import current
from lightning_ddp_ext.supervision.rank_zero import side_by_side

T = TypeVar("T")
Group = dist.ProcessGroup | None

_STRUCTURES = "a tensor or array with a row for each sample, a list with an item for each, or dicts and tuples of these"
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
        their first dimension, lists with an item a sample joined, dicts, tuples and lists of these item by item. With
        several loaders a list with one entry for each; an entry is ``None`` where nothing was read. On other ranks
        ``None``.

    Raises:
        ExactEvaluationError: on every rank: there are no predictions, or it is not known which samples they are for, or
            they have no first dimension by sample, or their structures or shapes differ.

    Example::

        trainer.predict(model, loader)
        predictions = gather_predictions(trainer)
        if trainer.is_global_zero:
            torch.save(predictions, "predictions.pt")
    """
    with _cpu_group() as group:
        loaders, batches = _on_every_rank(lambda: _own_batches(trainer), group, "predictions cannot be read")
        if _is_distributed():
            batches = _to_rank_zero(batches, group)
        return _on_every_rank(
            lambda: _join_loaders(loaders, batches) if _rank() == 0 else None, group, "predictions cannot be joined"
        )


def _name(loader: Any) -> str:
    return type(loader.source if isinstance(loader, DistributedLoader) else loader).__name__


def _own_batches(trainer: Any) -> tuple[int, list[_Batch]]:
    """The number of loaders, and the batches that this rank has predicted."""
    loop, iterables = trainer.predict_loop, trainer.predict_dataloaders
    if iterables is None:
        raise ExactEvaluationError(_NO_PREDICTIONS)
    if not loop.return_predictions:
        raise ExactEvaluationError(
            "trainer.predict must keep its predictions (got return_predictions=False); leave the argument out"
        )
    loaders = CombinedLoader(iterables, "sequential").flattened
    outputs = loop.predictions if len(loaders) > 1 else [loop.predictions]
    if loop.skip:  # this rank had nothing to read, and its predictions are those of an earlier call
        outputs = [[] for _ in loaders]
    batches = []
    for number, (loader, of_loader) in enumerate(zip(loaders, outputs, strict=True)):
        seen = getattr(getattr(loader, "batch_sampler", None), "seen_batch_indices", [])
        if len(seen) < len(of_loader):
            raise ExactEvaluationError(
                f"loader {number} must tell which samples a batch holds (got {_name(loader)}, which does not); "
                "use a DataLoader over a dataset with indices"
            )
        # A loader may have read more than was predicted: workers read ahead.
        batches += [_Batch(number, list(samples), output) for samples, output in zip(seen, of_loader, strict=False)]
    return len(loaders), batches


# Among the ranks.


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _rank() -> int:
    return dist.get_rank() if _is_distributed() else 0


@contextmanager
def _cpu_group() -> Iterator[Group]:
    """All ranks, in a group whose messages are in CPU memory, so that rank 0's GPU need not hold what it receives."""
    membership = current()
    if not _is_distributed() or dist.get_backend() == "gloo":
        yield None
    elif membership is not None:
        yield membership.side_group()
    else:
        group = dist.new_group(backend="gloo")
        try:
            yield group
        finally:
            dist.destroy_process_group(group)


def _all_gather(value: Any, group: Group) -> list[Any]:
    """The values of all ranks, by rank. Collective."""
    if not _is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def _on_every_rank(work: Callable[[], T], group: Group, problem: str) -> T:
    """Run ``work`` on each rank; what goes wrong on one rank is raised on all. Collective."""

    def explained() -> T:
        try:
            return work()
        except ExactEvaluationError:
            raise
        except Exception as error:
            raise ExactEvaluationError(f"{problem}: {type(error).__name__}: {error}") from error

    gather = partial(_all_gather, group=group)
    return side_by_side(explained, rank=_rank(), gather=gather, what="gathering predictions")


def _to_rank_zero(batches: list[_Batch], group: Group) -> list[_Batch]:
    """The batches of all ranks, by rank, on rank 0; no batches on other ranks. Collective."""
    pickled = _on_every_rank(
        lambda: [pickle.dumps(batch) for batch in batches], group, "predictions must be picklable to be gathered"
    )
    by_rank: list[list[bytes]] = [[] for _ in range(dist.get_world_size())]
    for number in range(max(_all_gather(len(pickled), group))):
        received: list[Any] | None = [None] * len(by_rank) if _rank() == 0 else None
        dist.gather_object(pickled[number] if number < len(pickled) else None, received, group=group)
        for of_rank, each in zip(by_rank, received or [], strict=False):
            of_rank += [each] if each is not None else []
    return _on_every_rank(
        lambda: [pickle.loads(each) for of_rank in by_rank for each in of_rank], group, "predictions cannot be read"
    )


# Joining.


def _join_loaders(loaders: int, batches: list[_Batch]) -> Any:
    """What the batches of each loader hold together."""
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
    """The rows, in this order, of what the parts hold together; a part has a row for each of its batch's samples."""
    _check_one([type(part).__name__ for part in parts], f"{name} must be of one type in every batch")
    first = parts[0]

    def join_items(items: list[Any], key: Any) -> Any:
        return _join(items, sizes, rows, f"{name}[{key!r}]")

    if isinstance(first, (Tensor, np.ndarray)):
        return _join_arrays(parts, sizes, rows, name)
    if isinstance(first, Mapping):
        _check_one([sorted(map(str, part)) for part in parts], f"{name} must have the same keys in every batch")
        return {key: join_items([part[key] for part in parts], key) for key in first}
    if isinstance(first, list) and not _is_structure(parts, sizes):
        _check_rows([len(part) for part in parts], sizes, name)
        items = [item for part in parts for item in part]
        return [items[row] for row in rows]
    if isinstance(first, (list, tuple)):
        _check_one([len(part) for part in parts], f"{name} must have one length in every batch")
        joined = [join_items(list(items), index) for index, items in enumerate(zip(*parts, strict=True))]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    raise ExactEvaluationError(
        f"{name} must have a first dimension by sample (got {type(first).__name__}); have predict_step return "
        f"{_STRUCTURES}"
    )


def _join_arrays(parts: list[Any], sizes: list[int], rows: list[int], name: str) -> Any:
    _check_rows([part.shape[0] if part.ndim else None for part in parts], sizes, name)
    remedy = "; pad them in predict_step, or return a list with an item for each sample"
    _check_one(
        [tuple(part.shape[1:]) for part in parts], f"{name} must have one shape after the first dimension", remedy
    )
    return torch.cat(parts)[rows] if isinstance(parts[0], Tensor) else np.concatenate(parts)[rows]


def _check_one(found: Iterable[object], rule: str, remedy: str = "") -> None:
    different = sorted({str(each) for each in found})
    if len(different) > 1:
        raise ExactEvaluationError(f"{rule} (got {', '.join(different)}){remedy}")


def _check_rows(found: list[int | None], sizes: list[int], name: str) -> None:
    for rows, size in zip(found, sizes, strict=True):
        if rows != size:
            got = "no dimension" if rows is None else f"length {rows}"
            raise ExactEvaluationError(
                f"{name} must have a first dimension by sample, {size} in this batch (got {got}); have predict_step "
                f"return {_STRUCTURES}"
            )


def _is_structure(parts: list[list[Any]], sizes: list[int]) -> bool:
    """Whether each item of a list holds something by sample, so that the list is no list with an item for each sample.

    That is assumed where the items hold as many rows as their batch has samples, in every batch.
    """
    if len({len(part) for part in parts}) > 1 or not parts[0]:
        return False
    return all(_row_counts(item) == {size} for part, size in zip(parts, sizes, strict=True) for item in part)


def _row_counts(item: Any) -> set[int | None]:
    """The numbers of rows of all that is in a structure; ``None`` for what has none."""
    if isinstance(item, (Tensor, np.ndarray)):
        return {item.shape[0] if item.ndim else None}
    if isinstance(item, (Mapping, tuple)):
        return set().union(*map(_row_counts, item.values() if isinstance(item, Mapping) else item))
    return {len(item) if isinstance(item, list) else None}
