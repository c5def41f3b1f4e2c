"""Handle ranks with different numbers of training batches, or with the same data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.checksum import checksum
from lightning_ddp_ext.data.loader import DistributedLoader
from lightning_ddp_ext.data.loader_properties import batches_of, index_sampler_of
from lightning_ddp_ext.data.position import LoaderPosition
from lightning_ddp_ext.data.shortest import AHEAD, end_together
from lightning_ddp_ext.errors import ConfigurationError, SamplingError
from lightning_ddp_ext.nested import values_of
from lightning_ddp_ext.rank_lists import grouped, listed, ranks_in_words

from ..named_calls import group_of_small_collectives, ranks_of, refuse, report_step
from ..private.compat import combined_loader_of, end_epoch_after, fetcher_of
from ..private.lightning_tree import rank_zero_warn
from ..start.devices import RankDevicesStrategy
from .positions import positions_of

UnevenMode = Literal["stop_at_shortest"]


@dataclass(frozen=True)
class _RankData:
    """What a rank tells the others about its training data.

    Attributes:
        length: the number of batches in an epoch; ``inf`` if unknown.
        checksums: those of the tensors in the first batch, if a loader has no indices.
        properties: those that must be equal on all ranks, for each loader.
    """

    length: float
    checksums: tuple[int, ...]
    properties: list[dict[str, Any]]


class UnevenInputs:
    """Handles different numbers of training batches on the ranks of a strategy.

    With ``"stop_at_shortest"``, each iterator ends after the last batch that every rank
    has. With ``None``, loaders of different lengths raise an error.

    Attributes:
        are_even: whether all ranks have the same number of batches, and thus make the
            same calls at the same batch.
    """

    def __init__(self, strategy: RankDevicesStrategy, mode: UnevenMode | None) -> None:
        self._strategy = strategy
        self._mode = mode
        self.start_run()

    def start_run(self) -> None:
        """Reset the state for a Trainer's run, whose loaders are new."""
        self.are_even = True
        self._has_new_loaders = False

    @property
    def _ends_together(self) -> bool:
        """Whether the ranks end an epoch together, and not each one separately."""
        return self._mode is not None and dist.is_initialized() and self._strategy.world_size > 1

    def agree_on_length(self, loader: DistributedLoader) -> None:
        """Set a training loader's length if the ranks end together.

        Collective in that case.
        """
        self._has_new_loaders = True
        if self._mode is not None and self._strategy.world_size > 1 and not dist.is_initialized():
            raise ConfigurationError(
                f"uneven_inputs={self._mode!r} needs all ranks when the training data is loaded,"
                " but configure_callbacks runs before they connect; read"
                " estimated_stepping_batches in setup instead"
            )
        if not self._ends_together:
            return
        lengths = self._gather(batches_of(loader))
        if math.inf in lengths and min(lengths) < math.inf:
            problem = (
                f"training loader {type(loader.loader).__name__} must have a length on every rank"
                f" or on none, or training would hang (lengths by rank: {lengths}; inf means no"
                " length); define __len__ on every rank"
            )
            refuse(self._strategy, SamplingError(problem))
        if math.inf not in lengths:
            loader.length = min(lengths)

    def give_batches(self, batches: Iterator[Any], position: LoaderPosition) -> Iterator[Any]:
        """Yield the batches of a new iterator, and count them in ``position``.

        If requested, end it on all ranks together.
        """
        if not self._ends_together:
            return position.give(batches)
        position.taken_ahead = AHEAD
        group = group_of_small_collectives()  # CPU tensors need not wait for an accelerator
        return position.give(end_together(batches, group, on_last=self._end_epoch))

    def _end_epoch(self) -> None:
        """Make Lightning treat the next batch of a single loader as the last one.

        With several loaders, nothing changes.
        """
        trainer = self._strategy.current_trainer
        if len(combined_loader_of(trainer.fit_loop).flattened) == 1:
            end_epoch_after(trainer, fetcher_of(trainer.fit_loop).fetched + 1)

    def report_step_if_even(self) -> None:
        """Report a step, unless the ranks have different numbers of batches.

        The ranks then also have different numbers of steps.
        """
        if self.are_even:
            report_step()

    # Once the first batch has been read.

    def on_train_batch_start(self, trainer: Any, batch: Any) -> None:
        """For new loaders, compare the ranks' numbers of batches and first batches.

        Collective in that case.
        """
        if not self._has_new_loaders or self._strategy.world_size == 1:
            return
        self._has_new_loaders = False
        positions = positions_of(trainer)
        streams = [
            position.name for position in positions if index_sampler_of(position.loader) is None
        ]
        ranks: tuple[_RankData, ...] = self._gather(
            _RankData(
                trainer.num_training_batches,
                _checksums(batch) if streams else (),
                [position.shared() for position in positions],
            )
        )
        lengths = [rank.length for rank in ranks]
        self.are_even = _are_finite_and_equal(lengths)
        problem = _difference(positions, [rank.properties for rank in ranks])
        if problem is None and self._mode is None:
            problem = _unevenness(trainer, lengths)
        if problem is not None:
            refuse(self._strategy, SamplingError(problem))
        _warn_of_same_batches([rank.checksums for rank in ranks], streams)

    def _gather(self, value: Any) -> tuple[Any, ...]:
        """Return the values of all ranks in rank order.

        Collective: every rank must call it.
        """
        return tuple(ranks_of(self._strategy).gather(value))


def _are_finite_and_equal(lengths: Sequence[float]) -> bool:
    return len(set(lengths)) == 1 and math.inf not in lengths


def _unevenness(trainer: Any, lengths: Sequence[float]) -> str | None:
    """Describe why ranks cannot train on these numbers of batches.

    Return ``None`` if they can, for example because ``max_steps`` is small.
    """
    if math.inf in lengths or _are_finite_and_equal(lengths):
        return None
    fewest = min(lengths)
    fewest_steps = math.ceil(fewest / trainer.accumulate_grad_batches)
    is_limited = trainer.max_steps != -1
    if is_limited and trainer.global_step + fewest_steps >= trainer.max_steps:
        return None
    by_rank = listed(
        f"{length} on {ranks_in_words(who)}" for length, who in grouped(dict(enumerate(lengths)))
    )
    return (
        f"the ranks have different numbers of training batches ({by_rank}), so some ranks would"
        f" wait forever after {fewest} batches; pass"
        " DDPExtStrategy(uneven_inputs='stop_at_shortest'), or use a sampler or drop_last=True so"
        " that every rank gets the same number of batches"
    )


def _difference(
    positions: list[LoaderPosition], properties: list[list[dict[str, Any]]]
) -> str | None:
    """Describe the first difference that prevents ranks from dividing the samples.

    Args:
        positions: the positions in this rank's loaders.
        properties: those that each loader must share on all ranks, by rank.
    """
    # A rank may have more loaders than another one.
    for position, *by_rank in zip(positions, *properties, strict=False):
        names = dict.fromkeys(name for of_rank in by_rank for name in of_rank)
        for name in names:
            values = [of_rank.get(name) for of_rank in by_rank]
            if all(value == values[0] for value in values):
                continue
            dataset = type(getattr(position.loader, "dataset", None)).__name__
            found = listed(f"{value} on rank {rank}" for rank, value in enumerate(values))
            return (
                f"the ranks cannot share out the samples of {dataset}, because the {name} differs"
                f" ({found}); create the same dataset and sampler on every rank, or pass"
                " Trainer(use_distributed_sampler=False) if each rank has different data"
            )
    return None


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


def _warn_of_same_batches(by_rank: Sequence[tuple[int, ...]], streams: list[str]) -> None:
    for checksums in dict.fromkeys(by_rank):
        ranks = [rank for rank, each in enumerate(by_rank) if each == checksums]
        if not checksums or len(ranks) == 1:
            continue
        rank_zero_warn(
            f"the first training batch is the same on {ranks_in_words(ranks)}:"
            f" {' and '.join(streams) or 'the data'} is probably not split among the ranks, so each"
            f" sample is trained on {len(ranks)} times per epoch; in __iter__, yield only the"
            " samples of this rank (call torch.distributed.get_rank() in the main process) and of"
            " this worker (call torch.utils.data.get_worker_info())"
        )
