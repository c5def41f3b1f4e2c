"""Train on ranks with different numbers of batches, and warn if several ranks read the same data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import SyncBatchNorm as TorchSyncBatchNorm
from typing_extensions import override

from lightning_ddp_ext.data.loader import DistributedLoader, batches_of, index_sampler_of, name_of
from lightning_ddp_ext.data.position import LoaderPosition
from lightning_ddp_ext.data.shortest import AHEAD, Mode, end_together
from lightning_ddp_ext.errors import SamplingError
from lightning_ddp_ext.rank_lists import grouped, listed, ranks_in_words
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.supervision.checksum import checksum

from .compat import combined_loader_of, end_epoch_after, fetcher_of, is_read_in_step
from .idle_steps import IdleSteps
from .lightning_tree import rank_zero_warn
from .named_calls import refuse, report_step
from .resume import positions_of


class UnevenInputs(IdleSteps):
    """Handles different numbers of training batches on the ranks of a strategy.

    With ``"join"``, a rank that runs out of batches is idle: it repeats its last batch with a loss of zero until the
    rank with the most batches is done. An idle rank's steps take part in every collective, but do not affect gradients,
    metrics or the statistics of synchronised BatchNorm layers. With ``"stop_at_shortest"``, each iterator ends after
    the last batch that every rank has. With ``None``, loaders of different lengths raise an error.

    Attributes:
        are_even: whether all ranks have the same number of batches, and thus make the same calls at the same batch.
    """

    def __init__(self, strategy: Any, mode: Mode | None) -> None:
        super().__init__(strategy)
        self._mode = mode
        self.are_even = True
        self._has_new_loaders = False

    @property
    def _joint_mode(self) -> Mode | None:
        """The mode in which the ranks end together; ``None`` if each rank ends on its own."""
        return self._mode if dist.is_initialized() and self._strategy.world_size > 1 else None

    def agree_on_length(self, loader: DistributedLoader) -> None:
        """Set a training loader's length if the ranks end together. Collective in that case."""
        self._has_new_loaders = True
        if self._joint_mode is None:
            return
        lengths = self._by_rank(batches_of(loader))
        if min(lengths) < max(lengths) == math.inf:
            problem = (
                f"training loader {type(loader.loader).__name__} must have a length on every rank or on none, or "
                f"training would hang (lengths by rank: {lengths}; inf means no length); define __len__ on every rank"
            )
            refuse(self._strategy, SamplingError(problem))
        if math.inf not in lengths:
            loader.length = max(lengths) if self._joint_mode == "join" else min(lengths)

    def end_together(self, batches: Iterator[Any], position: LoaderPosition) -> Iterator[Any]:
        """Count the batches of a new iterator, and end it on all ranks together if requested."""
        self._batches.clear()
        mode = self._joint_mode
        if mode is None:
            return position.give(batches)
        position.ahead = AHEAD
        context = current()  # a group for CPU tensors avoids waiting for an accelerator
        group = None if context is None else context.new_group(backend="gloo", purpose="small collectives")
        numbers = itertools.count(position.given)

        def record_item(idle_ranks: list[int]) -> None:
            number = next(numbers)
            for rank in idle_ranks:
                self._batches.setdefault(rank, number)
            if self._strategy.global_rank not in idle_ranks:
                position.given += 1

        return end_together(batches, mode, group, on_item=record_item, on_last=self._end_epoch)

    def _end_epoch(self) -> None:
        """Make Lightning treat the next batch as the last one if there is a single loader."""
        trainer = self._strategy.current_trainer
        if len(combined_loader_of(trainer.fit_loop).flattened) == 1:
            end_epoch_after(trainer, fetcher_of(trainer.fit_loop).fetched + 1)

    def report_phase(self) -> None:
        """Report a step, unless the ranks have different numbers of batches and therefore of steps."""
        if self.are_even:
            report_step()

    # Idle ranks.

    @property
    @override
    def _number(self) -> int:
        return int(self._strategy.current_trainer.fit_loop.epoch_loop.batch_progress.current.ready) - 1

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Scale the loss so that DDP's mean over all ranks equals the mean over the ranks that are not idle."""
        idle, world_size = self._idle_ranks, self._strategy.world_size
        if not idle:
            return loss
        return loss * (0.0 if self.is_idle else world_size / (world_size - len(idle)))

    def max_over_ranks(self, number: float) -> float:
        """Return the maximum of a number over all ranks if ranks may be idle. Collective in that case."""
        return max(self._by_rank(number)) if self._joint_mode == "join" else number

    # Once the first batch has been read.

    def on_train_batch_start(self, trainer: Any, batch: Any) -> None:
        """For new loaders, compare the ranks' numbers of batches and first batches. Collective in that case."""
        if not self._has_new_loaders or self._strategy.world_size == 1:
            return
        self._has_new_loaders = False
        positions = positions_of(trainer)
        loaders = [position.loader for position in positions]
        streams = [name_of(loader) for loader in loaders if index_sampler_of(loader) is None]
        is_own = streams and not self.is_idle  # an idle rank's batch is another rank's or an earlier one
        own = [position.shared() for position in positions]
        found = self._by_rank((trainer.num_training_batches, _checksums(batch) if is_own else (), own))
        lengths, checksums, shared = zip(*found, strict=True)
        self.are_even = len(set(lengths)) == 1 and math.inf not in lengths
        problem = _different_orders(positions, shared)
        if problem is not None:
            pass
        elif self._mode is None:
            problem = _unevenness(trainer, lengths)
        elif self._mode == "join":
            problem = _obstacle_to_join(trainer)
        if problem is not None:
            refuse(self._strategy, SamplingError(problem))
        _warn_of_same_batches(checksums, streams)


def _unevenness(trainer: Any, lengths: tuple[float, ...]) -> str | None:
    """Describe why ranks cannot train on these numbers of batches; ``None`` if they can, as with few ``max_steps``."""
    fewest, most_steps = min(lengths), trainer.max_steps
    if len(set(lengths)) == 1 or math.inf in lengths:
        return None
    if most_steps != -1 and trainer.global_step + math.ceil(fewest / trainer.accumulate_grad_batches) >= most_steps:
        return None
    by_rank = listed(f"{length} on {ranks_in_words(who)}" for length, who in grouped(dict(enumerate(lengths))))
    return (
        f"the ranks have different numbers of training batches ({by_rank}), so some ranks would wait forever after "
        f"{fewest} batches; pass DDPExtStrategy(uneven_inputs='join') or 'stop_at_shortest', or use a sampler or "
        "drop_last=True so that every rank gets the same number of batches"
    )


def _obstacle_to_join(trainer: Any) -> str | None:
    """Describe why idle ranks cannot take part in the training steps; ``None`` if they can."""
    loaders = len(combined_loader_of(trainer.fit_loop).flattened)
    layers = [name for name, each in trainer.lightning_module.named_modules() if type(each) is TorchSyncBatchNorm]
    if loaders != 1:
        needed = f"a single training loader (got {loaders}); combine their datasets"
    elif is_read_in_step(trainer.fit_loop):
        needed = "a training_step that takes a batch (got one that takes dataloader_iter); replace its argument"
    elif layers:
        needed = f"layers that can skip idle ranks ({layers[0]} is torch's SyncBatchNorm); use sync_batchnorm=True"
    elif trainer.strategy._model_averaging_period is not None:
        needed = "gradient averaging in every step; remove model_averaging_period"
    else:
        return None
    return f"uneven_inputs='join' needs {needed}, or use 'stop_at_shortest'"


def _different_orders(positions: list[LoaderPosition], by_rank: tuple[list[dict[str, Any]], ...]) -> str | None:
    """Describe why the ranks cannot share out the samples of a loader; warn if they probably have different ones."""
    remedy = (
        "create the same dataset and sampler on every rank (seed random_split, for example), or pass "
        "Trainer(use_distributed_sampler=False) if each rank has different data"
    )
    reasons = {"order": "the list that {} draws differs", "data": "the tensors or lists in the dataset differ"}
    for position, *shared in zip(positions, *by_rank, strict=False):
        what = f"the samples of {type(getattr(position.loader, 'dataset', None)).__name__}"
        for key in [key for key in shared[0] if any(each.get(key) != shared[0][key] for each in shared)]:
            if key not in reasons:
                values = listed(f"{each.get(key)} on rank {rank}" for rank, each in enumerate(shared))
                return f"the ranks cannot share out {what}, because the {key} differs ({values}); {remedy}"
            reason = reasons[key].format(position.name)
            rank_zero_warn(
                f"the ranks share out {what}, but {reason} between the ranks, so some samples are probably never read; "
                f"{remedy}"
            )
    return None


def _checksums(batch: Any) -> tuple[int, ...]:
    """Return the checksums of the tensors in a batch, which may be nested mappings, lists and tuples.

    >>> _checksums({"x": [torch.ones(2)]}) == _checksums((torch.ones(2), "text", torch.zeros(0)))
    True
    """
    if isinstance(batch, Tensor):
        return (int(checksum(batch)),) if batch.layout == torch.strided and batch.numel() else ()
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return tuple(each for item in items for each in _checksums(item))


def _warn_of_same_batches(checksums: tuple[tuple[int, ...], ...], names: list[str]) -> None:
    for one in dict.fromkeys(checksums):
        ranks = [rank for rank, each in enumerate(checksums) if each == one]
        if not one or len(ranks) == 1:
            continue
        rank_zero_warn(
            f"the first training batch is the same on {ranks_in_words(ranks)}: {' and '.join(names) or 'the data'} "
            f"is probably not split among the ranks, so each sample is trained on {len(ranks)} times per epoch; in "
            "__iter__, yield only the samples of this rank (call torch.distributed.get_rank() in the main process) "
            "and of this worker (call torch.utils.data.get_worker_info())"
        )
