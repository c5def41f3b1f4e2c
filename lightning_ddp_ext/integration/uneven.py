"""Training batches of ranks that have different numbers of them, or all the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_ext.data.digest import digest
from lightning_ddp_ext.data.loader import DistributedLoader, batches_of, name_of
from lightning_ddp_ext.data.shortest import until_shortest
from lightning_ddp_ext.errors import UnevenInputsError
from lightning_ddp_ext.integration.compat import combined_loader_of, end_epoch_after, fetcher_of
from lightning_ddp_ext.integration.lightning_tree import rank_zero_warn
from lightning_ddp_ext.rendezvous.process_context import current

_NAMED = 16  # ranks in a message


class UnevenInputs:
    """The numbers of a strategy's training batches.

    Args:
        strategy: whose ranks.
        stops_at_shortest: whether each iterator ends after the last batch that every rank has; else ranks
            that know that they have different numbers of batches are refused.

    Attributes:
        are_even: whether all ranks are known to have equally many, and so to do everything at the same batches.
    """

    def __init__(self, strategy: Any, *, stops_at_shortest: bool) -> None:
        self._strategy = strategy
        self._is_chosen = stops_at_shortest
        self.attach()

    def attach(self) -> None:
        """Begin with a Trainer that has no loaders yet."""
        self.are_even = True
        self._has_new_loaders = False

    @property
    def _stops_at_shortest(self) -> bool:
        return self._is_chosen and dist.is_initialized() and self._strategy.world_size > 1

    def agree_on_length(self, loader: DistributedLoader) -> None:
        """Give a training loader the length that it has on the shortest rank. Collective, if it is to stop there.

        Raises:
            UnevenInputsError: it has a length on some ranks only; on every rank.
        """
        self._has_new_loaders = True
        if not self._stops_at_shortest:
            return
        lengths = lengths_by_rank(self._strategy, loader)
        if min(lengths) < 0 <= max(lengths):
            raise UnevenInputsError(
                f"training loader {type(loader.loader).__name__} must have a length on every rank or on none (got "
                f"{lengths}, by rank, where -1 is none), or Lightning waits for ever; give it __len__ on every rank"
            )
        loader.length = None if -1 in lengths else min(lengths)

    def begin(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Have all ranks end an iterator together, if that was asked for."""
        if not self._stops_at_shortest:
            return batches
        context = current()  # whose group for CPU tensors keeps an accelerator from waiting
        group = None if context is None else context.side_group()
        return until_shortest(batches, group, on_last=self._end_epoch)

    def _end_epoch(self) -> None:
        """Tell Lightning that the batch that it is about to get is the last, where a single loader decides that."""
        trainer = self._strategy.lightning_module.trainer
        if len(combined_loader_of(trainer.fit_loop).flattened) == 1:
            end_epoch_after(trainer, fetcher_of(trainer.fit_loop).fetched + 1)

    def on_train_batch_start(self, trainer: Any, batch: Any) -> None:
        """Compare numbers of batches, and the first batch, once for new loaders. Collective then.

        Raises:
            UnevenInputsError: ranks know that they have different numbers of batches; on every rank.
        """
        if not self._has_new_loaders or self._strategy.world_size == 1:
            return
        self._has_new_loaders = False
        loaders = [each.loader for each in combined_loader_of(trainer.fit_loop).flattened]
        streams = [name_of(loader) for loader in loaders if _is_stream(loader)]
        found: list[Any] = [None] * self._strategy.world_size
        dist.all_gather_object(found, (trainer.num_training_batches, streams, digest(batch) if streams else None))
        lengths, streams_by_rank, digests = zip(*found, strict=True)
        self.are_even = len(set(lengths)) == 1 and math.inf not in lengths
        if not self._is_chosen:
            _refuse_uneven(trainer, lengths)
        if any(streams_by_rank):
            _warn_of_same_batches(digests, sorted({name for names in streams_by_rank for name in names}))


def lengths_by_rank(strategy: Any, sized: Any) -> tuple[int, ...]:
    """Return the length on each rank, by rank; -1 for none. Collective: every rank must call it."""
    length = batches_of(sized)
    own = torch.tensor(-1 if length == math.inf else int(length), device=strategy.root_device)
    return tuple(strategy.all_gather(own).flatten().tolist())


def _refuse_uneven(trainer: Any, lengths: tuple[float, ...]) -> None:
    fewest = min(lengths)
    if max(lengths) == fewest or math.inf in lengths or _ends_within(trainer, fewest):
        return
    # Every rank finds the same; together, or the slower ones would hear of a failure instead of this.
    trainer.strategy.barrier("the refusal of uneven inputs")
    by_rank = _listed([f"{length} on rank {rank}" for rank, length in enumerate(lengths)])
    raise UnevenInputsError(
        f"the ranks have different numbers of training batches ({by_rank}), and after the first {fewest} "
        "some would wait for ever; pass DDPExtStrategy(uneven_inputs='stop_at_shortest'), or let a sampler or "
        "drop_last=True give all ranks equally many"
    )


def _ends_within(trainer: Any, batches: float) -> bool:
    """Whether ``max_steps`` ends training before the shortest epoch ends."""
    steps = math.ceil(batches / trainer.accumulate_grad_batches)
    most: int = trainer.max_steps
    return most != -1 and bool(trainer.global_step + steps >= most)


def _warn_of_same_batches(digests: tuple[str | None, ...], names: list[str]) -> None:
    for one in dict.fromkeys(digests):
        ranks = [rank for rank, each in enumerate(digests) if each == one]
        if one is None or len(ranks) == 1:
            continue
        rank_zero_warn(
            f"the first training batch is the same on ranks {_listed(ranks)}, and so may be all others: "
            f"{' and '.join(names) or 'the training data'} is not shared out, and each sample is trained on "
            f"{len(ranks)} times; have __iter__ leave the other ranks' and workers' samples away, by rank, "
            "torch.distributed.get_rank() in the main process, and by torch.utils.data.get_worker_info()"
        )


def _listed(items: list[Any]) -> str:
    return ", ".join(map(str, items[:_NAMED])) + (", ..." if len(items) > _NAMED else "")


def _is_stream(loader: Any) -> bool:
    """Whether no sampler says which samples a rank reads."""
    return not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)
