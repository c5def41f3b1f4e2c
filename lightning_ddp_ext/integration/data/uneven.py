"""End the ranks' training epochs together, or refuse different numbers of batches.

1. ``start_run`` resets the state for a Trainer's run.
2. ``agree_on_length`` sets the length of a new loader, before its first epoch.
3. ``give_batches`` ends an iterator on all ranks together.
4. ``on_train_batch_start`` compares the ranks' data once the first batch is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch.distributed as dist

from lightning_ddp_ext.data.even_batches import AHEAD, end_together
from lightning_ddp_ext.data.loader import DistributedLoader
from lightning_ddp_ext.data.loader_properties import length_or_inf
from lightning_ddp_ext.data.position import LoaderPosition
from lightning_ddp_ext.errors import ConfigurationError, SamplingError

from ..named_calls import report_step
from ..private.compat import combined_loader_of, end_epoch_after, fetcher_of
from ..start.devices import RankDevicesStrategy
from ..strategy_ranks import group_of_small_collectives, ranks_of, refuse
from .positions import positions_of
from .training_data import (
    are_finite_and_equal,
    describe_difference,
    describe_unevenness,
    training_data_of,
    warn_of_same_batches,
)

UnevenMode = Literal["stop_at_shortest"]


class UnevenInputs:
    """Handles different numbers of training batches on the ranks of a strategy.

    With ``"stop_at_shortest"``, each iterator ends after the last batch that every rank
    has. With ``None``, loaders of different lengths raise an error.

    Args:
        strategy: our strategy.
        mode: the argument ``uneven_inputs`` of ``DDPExtStrategy``.

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
        return self._mode is not None and self._strategy.world_size > 1

    def agree_on_length(self, loader: DistributedLoader) -> None:
        """Note a new training loader, and set its length if the ranks end together.

        Collective in that case. The length is that of the shortest rank. A loader without
        a length on all ranks keeps none.

        Raises:
            ConfigurationError: the ranks have not connected yet.
            SamplingError: on every rank: only some of the loaders have a length.
        """
        self._has_new_loaders = True
        if not self._ends_together:
            return
        if not dist.is_initialized():
            raise ConfigurationError(
                f"uneven_inputs={self._mode!r} needs all ranks when the training data is loaded,"
                " but configure_callbacks runs before they connect; read"
                " estimated_stepping_batches in setup instead"
            )
        lengths = tuple(ranks_of(self._strategy).gather(length_or_inf(loader)))
        if math.inf not in lengths:
            loader.length = min(lengths)
        elif min(lengths) < math.inf:
            problem = (
                f"training loader {type(loader.loader).__name__} must have a length on every rank"
                f" or on none, or training would hang (lengths by rank: {lengths}; inf means no"
                " length); define __len__ on every rank"
            )
            refuse(self._strategy, SamplingError(problem))

    def give_batches(self, batches: Iterator[Any], position: LoaderPosition) -> Iterator[Any]:
        """Yield the batches of a new iterator, and count them in ``position``.

        If requested, end it on all ranks together.
        """
        if not self._ends_together:
            return position.give(batches)
        position.taken_ahead = AHEAD  # before the ranks know that each of them has a batch
        group = group_of_small_collectives()  # CPU tensors need not wait for an accelerator
        return position.give(end_together(batches, group, on_last=self._end_epoch))

    def _end_epoch(self) -> None:
        """Make Lightning treat the next batch of a single loader as the last one.

        The fetcher has not yet counted that batch. With several loaders, nothing changes.
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

    def on_train_batch_start(self, batch: Any) -> None:
        """For new loaders, compare the ranks' numbers of batches and first batches.

        Collective in that case.

        Raises:
            SamplingError: on every rank: the ranks cannot train together on these data.
        """
        if not self._has_new_loaders or self._strategy.world_size == 1:
            return
        self._has_new_loaders = False
        trainer = self._strategy.current_trainer
        positions = positions_of(trainer)
        own_data = training_data_of(trainer, batch, positions)
        data_by_rank = ranks_of(self._strategy).gather(own_data)
        lengths = [data.length for data in data_by_rank]
        self.are_even = are_finite_and_equal(lengths)
        problem = describe_difference(data_by_rank, positions)
        if problem is None and self._mode is None:
            problem = describe_unevenness(trainer, lengths)
        if problem is not None:
            refuse(self._strategy, SamplingError(problem))
        warn_of_same_batches(data_by_rank, positions)
