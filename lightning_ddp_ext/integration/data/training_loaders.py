"""Compare the training loaders of all ranks, and end their epochs together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.checksum import checksum
from lightning_ddp_ext.data.inspection import (
    each_of,
    index_sampler_of,
    length_or_inf,
    name_of,
)
from lightning_ddp_ext.data.position import global_order_of
from lightning_ddp_ext.errors import ConfigurationError, SamplingError
from lightning_ddp_ext.nested import values_of
from lightning_ddp_ext.rank_lists import grouped, listed, ranks_in_words

from ..private.compat import combined_loader_of, end_epoch_after, fetcher_of
from ..private.lightning_tree import rank_zero_warn
from ..start.devices import RankDevicesStrategy
from ..strategy_ranks import group_of_small_collectives, ranks_of
from .orders import training_loaders_of

UnevenMode = Literal["stop_at_shortest"]
AHEAD = 2  # items that `end_together` draws ahead on each rank


class UnevenInputs:
    """Compares the training data of a strategy's ranks, which may have unequally many batches.

    ======================  =========================  ================================
    Mode                    Length of a new loader     End of an epoch
    ======================  =========================  ================================
    ``"stop_at_shortest"``  that of the shortest rank  after the last batch that every
                                                       rank has
    ``None``                its own; an error if some  where this rank's data end
                            ranks would wait forever
    ======================  =========================  ================================

    A single rank ends as with ``None``. The methods are called when a training loader is
    prepared, when its iterator starts, and before each training step.

    Args:
        strategy: our strategy.
        mode: the argument ``uneven_inputs`` of ``DDPExtStrategy``.
    """

    def __init__(self, strategy: RankDevicesStrategy, mode: UnevenMode | None) -> None:
        self._strategy = strategy
        self._mode = mode
        self._are_compared = True  # the loaders of all ranks, if there are any

    @property
    def _ends_together(self) -> bool:
        """Whether the ranks end an epoch together, and not each one separately."""
        return self._mode is not None and self._strategy.world_size > 1

    def agree_on_length(self, loader: Any) -> int | None:
        """Return the length of a new training loader on the shortest rank, if ranks end together.

        Collective in that case. Otherwise, or if the loader has no length on any rank,
        return ``None``. The ranks compare their new loaders later, when they have read the
        first batch.

        Raises:
            ConfigurationError: the ranks have not connected yet.
            SamplingError: on every rank: only some of the loaders have a length.
        """
        self._are_compared = False
        if not self._ends_together:
            return None
        if not dist.is_initialized():
            raise ConfigurationError(
                f"uneven_inputs={self._mode!r} needs all ranks when the training data is loaded,"
                " but configure_callbacks runs before they connect; read"
                " estimated_stepping_batches in setup instead"
            )
        lengths = tuple(ranks_of(self._strategy).gather(length_or_inf(loader)))
        shortest = min(lengths)
        if shortest < math.inf and math.inf in lengths:
            self._refuse(
                SamplingError(
                    f"training loader {type(loader).__name__} must have a length on every"
                    f" rank or on none, or training would hang (lengths by rank: {lengths}; inf"
                    " means no length); define __len__ on every rank"
                ),
            )
        return None if shortest == math.inf else int(shortest)

    def give_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator that ends on all ranks together, if that is requested."""
        if not self._ends_together:
            return batches
        # In this group, CPU tensors need not wait for an accelerator.
        return end_together(batches, group_of_small_collectives(), on_last=self._end_epoch)

    def _end_epoch(self) -> None:
        """Make Lightning treat the next batch of a single loader as the last one.

        The fetcher has not yet counted that batch. With several loaders, nothing changes.
        """
        trainer = self._strategy.current_trainer
        if len(combined_loader_of(trainer.fit_loop).flattened) == 1:
            end_epoch_after(trainer, fetcher_of(trainer.fit_loop).fetched + 1)

    def on_train_batch_start(self, batch: Any) -> None:
        """Compare the ranks' samplers, numbers of batches and first batches.

        This is done, and collective, only in the first step after new loaders.

        Raises:
            SamplingError: on every rank: the ranks cannot train together on these data.
        """
        if self._are_compared:
            return
        self._are_compared = True
        trainer = self._strategy.current_trainer
        loaders = [loader.loader for loader in training_loaders_of(trainer)]
        streams = [loader for loader in loaders if index_sampler_of(loader) is None]
        own = (
            trainer.num_training_batches,
            _shared_orders(loaders),
            _checksums(batch) if streams else (),
        )
        lengths, orders, checksums = zip(*ranks_of(self._strategy).gather(own), strict=True)
        self._refuse_different_orders(orders)
        if self._mode is None and len(set(lengths)) > 1 and math.inf not in lengths:
            self._refuse_if_a_rank_would_wait(lengths)
        _warn_of_same_batches(checksums, streams)

    def _refuse_different_orders(self, orders: Sequence[set[str]]) -> None:
        """Raise if our samplers on the ranks do not split the same global orders."""
        common = set.intersection(*orders)
        if all(order == common for order in orders):
            return
        differing = [listed(sorted(order - common)) or "none" for order in orders]
        self._refuse(
            SamplingError(
                "the ranks cannot share out the samples, because their samplers differ"
                f" ({_by_rank(differing)}); create the same dataset and sampler on every rank,"
                " or pass Trainer(use_distributed_sampler=False) if each rank has"
                " different data"
            ),
        )

    def _refuse_if_a_rank_would_wait(self, lengths: Sequence[float]) -> None:
        """Raise unless all ranks stop before the shortest one ends, as with ``max_steps``."""
        trainer = self._strategy.current_trainer
        fewest = min(lengths)
        steps = trainer.global_step + math.ceil(fewest / trainer.accumulate_grad_batches)
        if trainer.max_steps != -1 and steps >= trainer.max_steps:
            return
        self._refuse(
            SamplingError(
                f"the ranks have different numbers of training batches ({_by_rank(lengths)}), so"
                f" some ranks would wait forever after {fewest} batches; pass"
                " DDPExtStrategy(uneven_inputs='stop_at_shortest'), or use a sampler or"
                " drop_last=True so that every rank gets the same number of batches"
            ),
        )

    def _refuse(self, error: SamplingError) -> NoReturn:
        """Raise an error that every rank has found, after a barrier. Collective.

        Without the barrier, slower ranks may report another failure.
        """
        self._strategy.barrier("before an error")
        raise error


def _checksums(batch: Any) -> tuple[int, ...]:
    """Return the checksums of the tensors in a batch.

    >>> _checksums({"x": [torch.ones(2)]}) == _checksums((torch.ones(2), "text", torch.zeros(0)))
    True
    """
    tensors = [value for value in values_of(batch) if isinstance(value, Tensor)]
    plain = [each for each in tensors if each.layout == torch.strided and not each.is_nested]
    return tuple(int(checksum(tensor)) for tensor in plain if tensor.numel() > 0)


def _shared_orders(loaders: Iterable[Any]) -> set[str]:
    """Return the properties of our samplers in these loaders, which every rank must have.

    >>> from lightning_ddp_ext import ExactDistributedSampler
    >>> sampler = ExactDistributedSampler(range(6), num_replicas=2, rank=0)
    >>> orders = _shared_orders([torch.utils.data.DataLoader(range(6), sampler=sampler), [1, 2]])
    >>> "length 6 of loader 1" in orders
    True
    """
    return {
        f"{name} {value} of loader {number}"
        for number, loader in enumerate(loaders, 1)
        if (sampler := global_order_of(loader)) is not None
        for name, value in sampler.identity().items()
    }


def _by_rank(values: Sequence[Any]) -> str:
    """Return the values in words with their ranks, the rarest value first."""
    return listed(
        f"{value} on {ranks_in_words(ranks)}" for value, ranks in grouped(dict(enumerate(values)))
    )


def _warn_of_same_batches(
    checksums_by_rank: Sequence[tuple[int, ...]], streams: Iterable[Any]
) -> None:
    """Warn on rank 0 if ranks have read the same first batch."""
    names = " and ".join(map(name_of, streams))
    for checksums, ranks in grouped(dict(enumerate(checksums_by_rank))):
        if checksums and len(ranks) > 1:
            rank_zero_warn(
                f"the first training batch is the same on {ranks_in_words(ranks)}: {names} is"
                f" probably not split among the ranks, so each sample is trained on {len(ranks)}"
                " times per epoch; in __iter__, yield only the samples of this rank (call"
                " torch.distributed.get_rank() in the main process) and of this worker (call"
                " torch.utils.data.get_worker_info())"
            )


def end_together(
    items: Iterator[Any],
    group: dist.ProcessGroup | None = None,
    *,
    on_last: Callable[[], object] = lambda: None,
) -> Iterator[Any]:
    """Yield the same number of items on all ranks: that of the shortest iterator.

    ``AHEAD`` items are drawn ahead. For each item, the ranks tell each other whether
    they have one, and the answers arrive while an earlier item is in use. An item is
    dropped if some rank has none.

    Collective: every rank must take the same number of items from the returned
    iterator. If a rank's iterator raises, the other ranks wait in a collective until
    that rank's failure is detected.

    Args:
        items: this rank's own iterator, which is not read after its end.
        group: a group of all ranks whose backend reduces CPU tensors; ``None`` for the
            default group.
        on_last: called before the last item is yielded.

    Example with a single rank:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> list(end_together(iter("abc")))
        ['a', 'b', 'c']
        >>> dist.destroy_process_group()
    """
    left = each_of(items)  # ends only once
    ahead = deque(_Drawn(left, group) for _ in range(AHEAD))
    while ahead[0].is_on_all_ranks():
        current = ahead.popleft().item[0]
        if ahead[0].is_on_all_ranks():
            ahead.append(_Drawn(left, group))
        else:
            on_last()
        yield current


class _Drawn:
    """The next item of an iterator, and whether all ranks have one.

    Creating it is collective, but does not wait.

    Attributes:
        item: a list with the item; empty after the iterator's end.
    """

    def __init__(self, items: Iterator[Any], group: dist.ProcessGroup | None) -> None:
        self.item = list(islice(items, 1))
        self._is_on_all = torch.tensor(len(self.item))  # 0 or 1; reduced when the exchange ends
        self._exchange = dist.all_reduce(
            self._is_on_all, op=dist.ReduceOp.MIN, group=group, async_op=True
        )

    def is_on_all_ranks(self) -> bool:
        """Wait for the other ranks, and return whether each of them has an item."""
        self._exchange.wait()
        return bool(self._is_on_all)
