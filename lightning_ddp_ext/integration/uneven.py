"""What is done where the ranks have different numbers of training batches, or all have the same ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_ext.data.digest import digest, same_on
from lightning_ddp_ext.data.in_step import InStep, Smallest, is_counted
from lightning_ddp_ext.errors import ConfigurationError, UnevenInputsError
from lightning_ddp_ext.integration.lightning_tree import Strategy, rank_zero_warn, refuse_missing
from lightning_ddp_ext.integration.resuming import Resuming
from lightning_ddp_ext.integration.training_data import batches_of, put_validation_right, validates_after
from lightning_ddp_ext.rendezvous.process_group import current

UnevenInputs = Literal["stop_at_shortest"]

_NAMED = 16  # ranks in a message


class Inputs:
    """The training batches of a strategy's ranks: equally many of them, and not the same.

    Args:
        strategy: whose ranks.
        resuming: counts batches, too.
        uneven: how an epoch ends where the ranks have different numbers of batches; ``None``: training does not begin.

    Attributes:
        are_even: whether all ranks are known to have equally many, and so to do everything at the same batches.

    Raises:
        ConfigurationError: ``uneven`` is something else.
    """

    def __init__(self, strategy: Strategy, resuming: Resuming, *, uneven: UnevenInputs | None = None) -> None:
        if uneven not in (None, "stop_at_shortest"):
            raise ConfigurationError(
                f"uneven_inputs must be None or 'stop_at_shortest' (got {uneven!r}); with the latter all ranks end an "
                "epoch when the first of them has no more data"
            )
        self._strategy = strategy
        self._resuming = resuming
        self._stops_at_shortest = uneven is not None
        self._group: dist.ProcessGroup | None = None
        self._limits: list[float] = []
        self._in_step: InStep[Any] | None = None
        self._compares = False
        self.are_even = True

    def attach(self, trainer: Any) -> None:
        """Look at the training loaders whenever the Trainer has got them."""
        self._trainer, self._loop = trainer, trainer.fit_loop
        self._compares = self.are_even = True
        loop_class = type(self._loop)
        refuse_missing(loop_class, "setup_data", "_load_combined_loader_states")

        def load_states() -> None:
            loop_class._load_combined_loader_states(self._loop)
            combined = self._loop._combined_loader
            self._limits = list(combined.limits)
            self._resuming.reads.follow(combined, self._begin_epoch if self._is_in_step else None)

        self._loop.setup_data = self._set_up
        self._loop._load_combined_loader_states = load_states

    def detach(self, *, interrupted: bool) -> None:
        """Keep nobody in step any longer. Collective, unless the Trainer is interrupted."""
        if self._in_step is not None and not interrupted:
            self._in_step.settle()
        self._in_step = self._group = None
        self._resuming.draw_ahead(None)

    @property
    def _is_in_step(self) -> bool:
        return self._stops_at_shortest and self._world_size > 1

    @property
    def _world_size(self) -> int:
        return self._strategy.world_size  # type: ignore[attr-defined,no-any-return]

    # When the Trainer gets its training loaders.

    def check(self, loader: object) -> None:
        """Refuse a training loader that has a length on some ranks only. Collective, if ranks are kept in step.

        Raises:
            UnevenInputsError: it is so; on every rank.
        """
        if not self._is_in_step:
            return
        has_length = batches_of(loader) != math.inf
        most, fewest = Smallest([-has_length, has_length], self._side_group()).wait()
        if -most != fewest:
            raise UnevenInputsError(
                f"training loader {type(loader).__name__} has a length on some ranks and none on others (here "
                f"{'one' if has_length else 'none'}), for which Lightning waits for ever; give it __len__ on every "
                "rank or on none"
            )

    def _set_up(self) -> None:
        before = self._loop._data_fetcher
        with self._empty_ranks_allowed():
            type(self._loop).setup_data(self._loop)
        if self._loop._data_fetcher is before or self._world_size == 1:
            return
        streams = [_name(loader) for loader in self._loop._combined_loader.flattened if _is_stream(loader)]
        found: list[Any] = [None] * self._world_size
        dist.all_gather_object(found, (self._loop.max_batches, streams))
        self.are_even = len({length for length, _ in found}) == 1 and math.inf not in (length for length, _ in found)
        if not self._stops_at_shortest:
            self._refuse_uneven([length for length, _ in found])
        elif self._in_step is not None:
            self._validate_at_the_end()
        self._compares &= any(streams for _, streams in found)

    @contextmanager
    def _empty_ranks_allowed(self) -> Iterator[None]:
        """Lightning refuses a rank without a batch unless the module says that it knows: nobody waits for it here."""
        module = self._trainer.lightning_module
        allowed = module.allow_zero_length_dataloader_with_multiple_devices
        module.allow_zero_length_dataloader_with_multiple_devices = allowed or self._is_in_step
        try:
            yield
        finally:
            module.allow_zero_length_dataloader_with_multiple_devices = allowed

    def _refuse_uneven(self, lengths: list[float]) -> None:
        fewest = min(lengths)
        if max(lengths) == fewest or math.inf in lengths or self._ends_within(fewest):
            return
        by_rank = ", ".join(f"{length} on rank {rank}" for rank, length in enumerate(lengths[:_NAMED]))
        more = f", {min(lengths)} to {max(lengths)} on all" if len(lengths) > _NAMED else ""
        raise UnevenInputsError(
            f"the ranks have different numbers of training batches ({by_rank}{more}), and after the first {fewest} "
            "some would wait for ever; pass DDPExtStrategy(uneven_inputs='stop_at_shortest'), or let a sampler or "
            "drop_last=True give all ranks equally many"
        )

    def _ends_within(self, batches: float) -> bool:
        """Whether ``max_steps`` ends training before the shortest epoch ends."""
        steps = math.ceil(batches / self._trainer.accumulate_grad_batches)
        most: int = self._trainer.max_steps
        return most != -1 and bool(self._trainer.global_step + steps >= most)

    def _validate_at_the_end(self) -> None:
        """As with loaders without a length: after the last batch, whichever that is, and not after so many."""
        trainer = self._trainer
        is_whole = isinstance(trainer.val_check_interval, float) and trainer.val_check_interval == 1.0
        if is_whole and validates_after(trainer) is not None:
            trainer.val_check_batch = math.inf

    # When an epoch begins.

    def _begin_epoch(self, combined: Any, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """An iterator that ends on all ranks together; called within that of Lightning's fetcher."""
        if self._in_step is not None:
            self._in_step.settle()
        combined.limits[:] = self._limits
        self._resuming.draw_ahead(lambda: 0)
        iterator = make_iterator()
        self._limits = list(combined.limits)
        length, is_counted_everywhere = self._agree_on_length(combined)
        if is_counted_everywhere:
            self._in_step = None
            self._resuming.draw_ahead(None)
            return iterator
        self._fetch_ahead()
        return self._keep_in_step(iterator, length)

    def _agree_on_length(self, combined: Any) -> tuple[float, bool]:
        """How many batches the epoch has at most, and whether that is what it has."""
        own = [batches_of(combined), all(is_counted(loader) for loader in combined.flattened)]
        length, is_counted_everywhere = Smallest(own, self._side_group()).wait()
        if length != math.inf:
            length = int(length)
            combined.limits[:] = [min(limit, length) for limit in self._limits]
            self._loop.max_batches = length  # Lightning has counted when it got the loaders, and epochs may differ
            put_validation_right(self._trainer)
        return length, bool(is_counted_everywhere)

    def _fetch_ahead(self) -> None:
        """Have the fetcher know the last batch by there being no other one, whatever the length says."""
        fetcher = self._loop._data_fetcher
        refuse_missing(type(fetcher), "reset")

        def reset() -> None:
            type(fetcher).reset(fetcher)
            fetcher.length, fetcher.done = None, False

        fetcher.reset = reset

    def _keep_in_step(self, iterator: Iterator[Any], length: float) -> Iterator[Any]:
        resuming = self._resuming
        entered_at = resuming.entered_at
        in_step = InStep(
            iterator,
            self._side_group(),
            at_most=length - entered_at,
            before_draw=lambda drawn: resuming.before_draw(entered_at + drawn),
        )
        resuming.draw_ahead(lambda: entered_at + in_step.drawn)
        self._in_step = in_step
        return in_step

    def _side_group(self) -> dist.ProcessGroup:
        """A group of its own, as answers are under way while gradients are. Collective, the first time."""
        membership = current()
        if membership is not None:
            return membership.side_group()
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group

    # When the first batch is there.

    def on_train_batch_start(self, batch: Any) -> None:
        """Warn of ranks that read the same. Collective, at the first batch, if the data are such that this can be."""
        if not self._compares or self._world_size == 1:
            return
        self._compares = False
        names = sorted({_name(loader) for loader in self._loop._combined_loader.flattened if _is_stream(loader)})
        digests: list[Any] = [None] * self._world_size
        dist.all_gather_object(digests, digest(batch))
        for ranks in same_on(digests):
            rank_zero_warn(
                f"the first training batch is the same on ranks {_listed(ranks)}, and so may be all others: "
                f"{' and '.join(names) or 'the training data'} is not shared out, and each sample is trained on "
                f"{len(ranks)} times; have __iter__ leave the other ranks' and workers' samples away, by rank, "
                "torch.distributed.get_rank() in the main process, and by torch.utils.data.get_worker_info()"
            )


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:_NAMED])) + (", ..." if len(ranks) > _NAMED else "")


def _is_stream(loader: object) -> bool:
    """Whether no sampler says which samples a rank reads."""
    return not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)


def _name(loader: Any) -> str:
    return type(loader.dataset if isinstance(loader, DataLoader) else loader).__name__
