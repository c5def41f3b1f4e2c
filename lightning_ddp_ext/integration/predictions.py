"""Everything that ``trainer.predict`` has predicted on any rank: once, in the dataset's order, on rank 0."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.errors import ExactEvaluationError
from lightning_ddp_ext.integration.lightning_tree import refuse_missing

_STRUCTURES = "a tensor or array with a row for each sample, a list with an item for each, or dicts and tuples of these"


@dataclass(frozen=True)
class _Batch:
    """What one step has returned, and the samples that it was for."""

    samples: list[Any]
    output: Any


def gather_predictions(trainer: Any) -> Any:
    """Bring together what the ranks have predicted, after ``trainer.predict``. Collective: every rank must call it.

    Works with any strategy, and on one process. Where a sampler repeats samples, the first prediction of each is
    taken; where batches were limited, there is no more than what was read.

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
    batches, problem = _own_batches(trainer)
    _raise_together(problem)
    everything = _gather(batches)
    joined, problem = None, None
    if everything is not None:
        try:
            joined = [_join_loader(loader) for loader in zip(*everything, strict=True)]
        except ExactEvaluationError as error:
            problem = str(error)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = f"predictions cannot be joined: {type(error).__name__}: {error}"
    _raise_together(problem)
    return joined if joined is None or len(joined) > 1 else joined[0]


# What this rank has.


def _own_batches(trainer: Any) -> tuple[list[list[_Batch]], str | None]:
    """By loader, the batches that this rank has predicted; or what is wrong."""
    loop = trainer.predict_loop
    if not hasattr(loop, "_predictions"):
        refuse_missing(type(loop), "_predictions")
    if loop._combined_loader is not None and not loop.return_predictions:
        return [], "trainer.predict must keep its predictions (got return_predictions=False); leave the argument out"
    if loop._combined_loader is None or not loop._predictions:
        return [], (
            "trainer has no predictions; call trainer.predict on every rank first, with data, and by a strategy that "
            "neither spawns nor forks its ranks"
        )
    found = []
    for number, (loader, of_loader) in enumerate(zip(loop._combined_loader.flattened, loop._predictions, strict=True)):
        seen = getattr(getattr(loader, "batch_sampler", None), "seen_batch_indices", [])
        if len(seen) < len(of_loader):
            return [], (
                f"loader {number} must tell which samples a batch holds (got {type(loader).__name__}, which does not); "
                "use a DataLoader over a dataset with indices"
            )
        # A loader with workers has read ahead, and a rank without samples has read one that it left alone.
        found.append([_Batch(list(samples), output) for samples, output in zip(seen, of_loader, strict=False)])
    return found, None


# Among the ranks.


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _raise_together(problem: str | None) -> None:
    """Raise the first rank's problem on every rank, so that nobody waits for one that has left."""
    problems = [problem]
    if _is_distributed():
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    for rank, each in enumerate(problems):
        if each is not None:
            raise ExactEvaluationError(each if len(problems) == 1 else f"{each} (on rank {rank})")


def _gather(batches: list[list[_Batch]]) -> list[list[list[_Batch]]] | None:
    """By rank, on rank 0."""
    if not _is_distributed():
        return [batches]
    pickled, problem = b"", None
    try:
        pickled = pickle.dumps(batches)
    except Exception as error:
        problem = f"predictions must be picklable to be gathered: {type(error).__name__}: {error}"
    _raise_together(problem)
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(pickled, gathered)
    return None if gathered is None else [pickle.loads(each) for each in gathered]


# Joining.


def _join_loader(by_rank: Sequence[list[_Batch]]) -> Any:
    batches = [batch for of_rank in by_rank for batch in of_rank]
    if not batches:
        return None
    place: dict[Any, int] = {}
    for row, sample in enumerate(sample for batch in batches for sample in batch.samples):
        place.setdefault(sample, row)
    rows = [place[sample] for sample in sorted(place)]
    return _join([batch.output for batch in batches], [len(batch.samples) for batch in batches], rows, "predictions")


def _join(parts: list[Any], sizes: list[int], rows: list[int], name: str) -> Any:
    """The rows, in this order, of what the parts hold together; a part has a row for each of its batch's samples."""
    if any(type(part) is not type(parts[0]) for part in parts):
        types = sorted({type(part).__name__ for part in parts})
        raise ExactEvaluationError(f"{name} must be of one type in every batch (got {', '.join(types)})")
    first = parts[0]
    if isinstance(first, (Tensor, np.ndarray)):
        return _join_arrays(parts, sizes, rows, name)
    if isinstance(first, Mapping):
        return _join_mappings(parts, sizes, rows, name)
    if isinstance(first, list) and not _is_structure(parts, sizes):
        _check_rows([len(part) for part in parts], sizes, name)
        items = [item for part in parts for item in part]
        return [items[row] for row in rows]
    if isinstance(first, (list, tuple)):
        return _join_sequences(parts, sizes, rows, name)
    raise ExactEvaluationError(
        f"{name} must have a first dimension by sample (got {type(first).__name__}); have predict_step return "
        f"{_STRUCTURES}"
    )


def _join_arrays(parts: list[Any], sizes: list[int], rows: list[int], name: str) -> Any:
    _check_rows([part.shape[0] if part.ndim else None for part in parts], sizes, name)
    shapes = sorted({tuple(part.shape[1:]) for part in parts})
    if len(shapes) > 1:
        raise ExactEvaluationError(
            f"{name} must have one shape after the first dimension (got {', '.join(map(str, shapes))}); pad them in "
            "predict_step, or return a list with an item for each sample"
        )
    return torch.cat(parts)[rows] if isinstance(parts[0], Tensor) else np.concatenate(parts)[rows]


def _join_mappings(parts: list[Any], sizes: list[int], rows: list[int], name: str) -> dict[Any, Any]:
    keys = list(parts[0])
    for part in parts:
        if part.keys() != parts[0].keys():
            raise ExactEvaluationError(f"{name} must have the same keys in every batch (got {keys} and {list(part)})")
    return {key: _join([part[key] for part in parts], sizes, rows, f"{name}[{key!r}]") for key in keys}


def _join_sequences(parts: list[Any], sizes: list[int], rows: list[int], name: str) -> Any:
    lengths = sorted({len(part) for part in parts})
    if len(lengths) > 1:
        raise ExactEvaluationError(f"{name} must have one length in every batch (got {', '.join(map(str, lengths))})")
    joined = [
        _join(list(items), sizes, rows, f"{name}[{index}]") for index, items in enumerate(zip(*parts, strict=True))
    ]
    kind = type(parts[0])
    return kind(*joined) if hasattr(kind, "_fields") else kind(joined)


def _check_rows(found: list[int | None], sizes: list[int], name: str) -> None:
    for rows, size in zip(found, sizes, strict=True):
        if rows != size:
            got = "no dimension" if rows is None else f"length {rows}"
            raise ExactEvaluationError(
                f"{name} must have a first dimension by sample, {size} in this batch (got {got}); have predict_step "
                f"return {_STRUCTURES}"
            )


def _is_structure(parts: list[list[Any]], sizes: list[int]) -> bool:
    """Whether lists hold something by sample in each of their items, rather than an item for each sample.

    Items that hold as many rows as their batch has samples, in every batch, are taken for the former.
    """
    if len({len(part) for part in parts}) > 1 or not parts[0]:
        return False
    return all(_has_rows(item, size) for part, size in zip(parts, sizes, strict=True) for item in part)


def _has_rows(item: Any, size: int) -> bool:
    leaves = list(_leaves(item))
    return bool(leaves) and all(rows == size for rows in leaves)


def _leaves(item: Any) -> Iterator[int | None]:
    """The numbers of rows of all that is in a structure; ``None`` for what has none."""
    if isinstance(item, (Tensor, np.ndarray)):
        yield item.shape[0] if item.ndim else None
    elif isinstance(item, (Mapping, tuple)):
        for each in item.values() if isinstance(item, Mapping) else item:
            yield from _leaves(each)
    else:
        yield len(item) if isinstance(item, list) else None
