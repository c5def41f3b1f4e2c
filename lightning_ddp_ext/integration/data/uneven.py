"""End training epochs on all ranks together, and warn of ranks with the same data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.checksum import checksum
from lightning_ddp_ext.data.loader import DistributedLoader, batches_of, index_sampler_of, name_of
from lightning_ddp_ext.data.position import LoaderPosition
from lightning_ddp_ext.data.shortest import AHEAD, end_together
from lightning_ddp_ext.errors import ConfigurationError, SamplingError
from lightning_ddp_ext.rank_lists import grouped, listed, ranks_in_words

from ..host import Host
from ..named_calls import group_of_small_collectives, ranks_of, refuse, report_step
from ..private.compat import combined_loader_of, end_epoch_after, fetcher_of
from ..private.lightning_tree import rank_zero_warn
from .positions import positions_of

UnevenMode = Literal["stop_at_shortest"]


class UnevenInputs:
    """Handles different numbers of training batches on the ranks of a strategy.

    With ``"stop_at_shortest"``, each iterator ends after the last batch that every rank
    has. With ``None``, loaders of different lengths raise an error.

    Attributes:
        are_even: whether all ranks have the same number of batches, and thus make the
            same calls at the same batch.
    """

    def __init__(self, strategy: Host, mode: UnevenMode | None) -> None:
        self._strategy = strategy
        self._mode = mode
        self.start_run()

    def start_run(self) -> None:
        """Reset the state for a Trainer's run, whose loaders are new."""
        self.are_even = True
        self._has_new_loaders = False

    @property
    def _end_is_joint(self) -> bool:
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
        if not self._end_is_joint:
            return
        lengths = self._by_rank(batches_of(loader))
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
        if not self._end_is_joint:
            return position.give(batches)
        position.ahead = AHEAD
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
        loaders = [position.loader for position in positions]
        streams = [name_of(loader) for loader in loaders if index_sampler_of(loader) is None]
        own = [position.shared() for position in positions]
        found = self._by_rank(
            (trainer.num_training_batches, _checksums(batch) if streams else (), own)
        )
        lengths, checksums, shared = zip(*found, strict=True)
        self.are_even = len(set(lengths)) == 1 and math.inf not in lengths
        differences = list(_differences(positions, shared))
        problem = next((sentence for is_error, sentence in differences if is_error), None)
        if problem is None:
            for _, warning in differences:
                rank_zero_warn(warning)
            if self._mode is None:
                problem = _unevenness(trainer, lengths)
        if problem is not None:
            refuse(self._strategy, SamplingError(problem))
        _warn_of_same_batches(checksums, streams)

    def _by_rank(self, value: Any) -> tuple[Any, ...]:
        """Return the values of all ranks in rank order.

        Collective: every rank must call it.
        """
        return tuple(ranks_of(self._strategy).gather(value))


def _unevenness(trainer: Any, lengths: tuple[float, ...]) -> str | None:
    """Describe why ranks cannot train on these numbers of batches.

    Return ``None`` if they can, for example because ``max_steps`` is small.
    """
    fewest = min(lengths)
    most_steps = trainer.max_steps
    if len(set(lengths)) == 1 or math.inf in lengths:
        return None
    if (
        most_steps != -1
        and trainer.global_step + math.ceil(fewest / trainer.accumulate_grad_batches) >= most_steps
    ):
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


def _differences(
    positions: list[LoaderPosition], by_rank: tuple[list[dict[str, Any]], ...]
) -> Iterator[tuple[bool, str]]:
    """Describe the differences in the properties that loaders must share on all ranks.

    Also yield for each one whether it is an error: whether the ranks cannot share out
    the samples of the loader. Otherwise, they probably have different samples.
    """
    remedy = (
        "create the same dataset and sampler on every rank (seed random_split, for example), or"
        " pass Trainer(use_distributed_sampler=False) if each rank has different data"
    )
    suspicions = {
        "order": "the list that {} draws differs",
        "data": "the tensors or lists in the dataset differ",
    }
    # Only the loaders that every rank has are compared, and a loader without one of our
    # samplers has none of the properties.
    for position, *shared in zip(positions, *by_rank, strict=False):
        what = f"the samples of {type(getattr(position.loader, 'dataset', None)).__name__}"
        for key in dict.fromkeys(key for each in shared for key in each):
            values = [each.get(key) for each in shared]
            if all(value == values[0] for value in values):
                continue
            is_error = key not in suspicions
            if is_error:
                found = listed(f"{value} on rank {rank}" for rank, value in enumerate(values))
                reason = f"cannot share out {what}, because the {key} differs ({found})"
            else:
                reason = (
                    f"share out {what}, but {suspicions[key].format(position.name)} between the"
                    " ranks, so some samples are probably never read"
                )
            yield is_error, f"the ranks {reason}; {remedy}"


def _checksums(batch: Any) -> tuple[int, ...]:
    """Return the checksums of the tensors in a batch.

    The batch may be nested mappings, lists and tuples.

    >>> _checksums({"x": [torch.ones(2)]}) == _checksums((torch.ones(2), "text", torch.zeros(0)))
    True
    """
    if isinstance(batch, Tensor):
        is_dense = batch.layout == torch.strided and not batch.is_nested
        return (int(checksum(batch)),) if is_dense and batch.numel() else ()
    items = (
        batch.values()
        if isinstance(batch, Mapping)
        else batch
        if isinstance(batch, (list, tuple))
        else ()
    )
    return tuple(each for item in items for each in _checksums(item))


def _warn_of_same_batches(checksums: tuple[tuple[int, ...], ...], names: list[str]) -> None:
    for one in dict.fromkeys(checksums):
        ranks = [rank for rank, each in enumerate(checksums) if each == one]
        if not one or len(ranks) == 1:
            continue
        rank_zero_warn(
            f"the first training batch is the same on {ranks_in_words(ranks)}:"
            f" {' and '.join(names) or 'the data'} is probably not split among the ranks, so each"
            f" sample is trained on {len(ranks)} times per epoch; in __iter__, yield only the"
            " samples of this rank (call torch.distributed.get_rank() in the main process) and of"
            " this worker (call torch.utils.data.get_worker_info())"
        )
