"""Compare the ranks' training data: numbers of batches, samplers and first batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext.checksum import checksum
from lightning_ddp_ext.data.loader import TrainingLoader
from lightning_ddp_ext.data.loader_properties import index_sampler_of
from lightning_ddp_ext.data.position import SamplerPosition, global_order_of
from lightning_ddp_ext.nested import values_of
from lightning_ddp_ext.rank_lists import grouped, listed, ranks_in_words

from ..private.lightning_tree import rank_zero_warn


@dataclass(frozen=True)
class TrainingData:
    """What a rank sends to the others about its training data.

    Attributes:
        length: the number of batches in an epoch; ``inf`` if unknown.
        checksums: those of the tensors in the first batch, if a loader has no indices.
        properties: those that must be equal on all ranks, for each loader.
    """

    length: float
    checksums: tuple[int, ...]
    properties: list[dict[str, Any]]


def training_data_of(trainer: Any, batch: Any, loaders: Sequence[TrainingLoader]) -> TrainingData:
    """Describe this rank's training data, of which ``batch`` is the first batch."""
    return TrainingData(
        trainer.num_training_batches,
        _checksums(batch) if _names_of_streams(loaders) else (),
        [_shared(loader) for loader in loaders],
    )


def _shared(loader: TrainingLoader) -> dict[str, Any]:
    """Return the properties that must be equal on all ranks, by name."""
    sampler = global_order_of(loader.loader)
    is_shared = sampler is not None and isinstance(loader.position, SamplerPosition)
    return sampler.identity() if sampler is not None and is_shared else {}


def are_finite_and_equal(lengths: Sequence[float]) -> bool:
    """Whether all ranks have the same number of batches, and it is known."""
    return len(set(lengths)) == 1 and math.inf not in lengths


def describe_unevenness(trainer: Any, lengths: Sequence[float]) -> str | None:
    """Describe why ranks cannot train on these numbers of batches.

    Return ``None`` if they can, for example because ``max_steps`` is small.
    """
    if math.inf in lengths or are_finite_and_equal(lengths):
        return None
    fewest = min(lengths)
    fewest_steps = math.ceil(fewest / trainer.accumulate_grad_batches)
    is_limited = trainer.max_steps != -1
    if is_limited and trainer.global_step + fewest_steps >= trainer.max_steps:
        return None
    return (
        f"the ranks have different numbers of training batches ({_by_rank(lengths)}), so some"
        f" ranks would wait forever after {fewest} batches; pass"
        " DDPExtStrategy(uneven_inputs='stop_at_shortest'), or use a sampler or drop_last=True so"
        " that every rank gets the same number of batches"
    )


def describe_difference(
    data_by_rank: Sequence[TrainingData], loaders: Sequence[TrainingLoader]
) -> str | None:
    """Describe the first difference that prevents ranks from dividing the samples.

    Args:
        data_by_rank: the data of all ranks.
        loaders: this rank's loaders.
    """
    # A rank may have more loaders than another one.
    by_loader = zip(loaders, *(data.properties for data in data_by_rank), strict=False)
    for loader, *properties_by_rank in by_loader:
        names = dict.fromkeys(name for properties in properties_by_rank for name in properties)
        for name in names:
            values = [properties.get(name) for properties in properties_by_rank]
            if any(value != values[0] for value in values):
                return _difference(loader, name, values)
    return None


def _difference(loader: TrainingLoader, name: str, values: Sequence[Any]) -> str:
    dataset = type(getattr(loader.loader, "dataset", None)).__name__
    return (
        f"the ranks cannot share out the samples of {dataset}, because the {name} differs"
        f" ({_by_rank(values)}); create the same dataset and sampler on every rank, or pass"
        " Trainer(use_distributed_sampler=False) if each rank has different data"
    )


def _by_rank(values: Sequence[Any]) -> str:
    """Return the values in words with their ranks, the rarest value first."""
    ranks_of_values = grouped(dict(enumerate(values)))
    return listed(f"{value} on {ranks_in_words(ranks)}" for value, ranks in ranks_of_values)


def _checksums(batch: Any) -> tuple[int, ...]:
    """Return the checksums of the tensors in a batch.

    >>> _checksums({"x": [torch.ones(2)]}) == _checksums((torch.ones(2), "text", torch.zeros(0)))
    True
    """
    return tuple(int(checksum(value)) for value in values_of(batch) if _has_checksum(value))


def _has_checksum(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_nested:
        return False
    return value.numel() > 0


def _names_of_streams(loaders: Sequence[TrainingLoader]) -> list[str]:
    """Return the names of the loaders that read no indices."""
    return [loader.name for loader in loaders if index_sampler_of(loader.loader) is None]


def warn_of_same_batches(
    data_by_rank: Sequence[TrainingData], loaders: Sequence[TrainingLoader]
) -> None:
    """Warn on rank 0 if ranks have read the same first batch."""
    names = " and ".join(_names_of_streams(loaders)) or "the data"
    checksums_by_rank = dict(enumerate(data.checksums for data in data_by_rank))
    for checksums, ranks in grouped(checksums_by_rank):
        if not checksums or len(ranks) == 1:
            continue
        rank_zero_warn(
            f"the first training batch is the same on {ranks_in_words(ranks)}: {names} is probably"
            f" not split among the ranks, so each sample is trained on {len(ranks)} times per"
            " epoch; in __iter__, yield only the samples of this rank (call"
            " torch.distributed.get_rank() in the main process) and of this worker (call"
            " torch.utils.data.get_worker_info())"
        )
