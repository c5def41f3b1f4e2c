"""Give ranks with different numbers of samples equal numbers of batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from lightning_ddp_ext.data.batch_dealing import DistributedBatchSamplerWrapper
from lightning_ddp_ext.data.samplers import GlobalOrderSampler


@dataclass(frozen=True)
class Balance:
    """Steps that all ranks make together; in the last ones a rank may be idle, without a batch of its own.

    Args:
        batches: by rank, how many batches hold samples of its own.
        split: the ranks whose last batch is split in two, so that they have as many as the others.

    >>> Balance.dealt(5, 2, 2)  # rank 0 has samples 0, 2, 4; rank 1 has 1, 3
    Balance(batches=(2, 2), split=frozenset({1}))
    >>> Balance.dealt(5, 2, 1).idle(2)
    (1,)
    """

    batches: tuple[int, ...]
    split: frozenset[int] = frozenset()

    @classmethod
    def dealt(
        cls, samples: int, ranks: int, batch_size: int, *, drop_last: bool = False, may_split: bool = True
    ) -> Balance:
        """Balance samples that are dealt out to the ranks in turn, so that the first ranks may have one more.

        Numbers of batches then differ by one at most, and where they do, the last batch of a rank that has fewer is
        full: it is split, unless ``batch_size`` is 1 or the rank has no sample at all.

        Args:
            samples: of all ranks together.
            ranks: how many there are.
            batch_size: samples in a batch of one rank.
            drop_last: whether incomplete batches are left out: all ranks then have as many as the one with fewest.
            may_split: whether batches may be split.
        """
        owned = [len(range(rank, samples, ranks)) for rank in range(ranks)]
        if drop_last:
            return cls((min(owned) // batch_size,) * ranks)
        batches = [-(-own // batch_size) for own in owned]
        if batch_size == 1 or not may_split:
            return cls(tuple(batches))
        split = frozenset(rank for rank in range(ranks) if 0 < batches[rank] < max(batches))
        return cls(tuple(own + (rank in split) for rank, own in enumerate(batches)), split)

    @property
    def steps(self) -> int:
        """How many batches each rank takes part in."""
        return max(self.batches)

    @property
    def is_even(self) -> bool:
        """Whether every rank has a batch of its own in every step."""
        return min(self.batches) == self.steps

    def idle(self, step: int) -> tuple[int, ...]:
        """Return the ranks that have no batch of their own in this step, counted from 0."""
        return tuple(rank for rank, batches in enumerate(self.batches) if batches <= step)


class BalancedBatchSampler(BatchSampler):
    """Batches of a sampler with ``uneven="exact"``, equally many on every rank.

    A rank that has no samples for a batch that others have yields one that must not count, with a sample that it or
    another rank has read already; ``balance`` tells which these are.

    Args:
        sampler: one of ours with ``uneven="exact"``.
        batch_size: samples in a batch of one rank.
        drop_last: whether incomplete batches are left out.
        may_split: whether a batch may be split in two; of no use where the last batches are not reached.

    >>> from lightning_ddp_ext.data.samplers import ExactDistributedSampler
    >>> samplers = [ExactDistributedSampler(range(9), num_replicas=2, rank=rank) for rank in range(2)]
    >>> [list(BalancedBatchSampler(sampler, 4, drop_last=False)) for sampler in samplers]
    [[[0, 2, 4, 6], [8]], [[1, 3], [5, 7]]]
    """

    sampler: GlobalOrderSampler

    def __init__(
        self, sampler: GlobalOrderSampler, batch_size: int, drop_last: bool = False, *, may_split: bool = True
    ) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.may_split = may_split

    @property
    def balance(self) -> Balance:
        """The number of batches of each rank, from the sampler's position on; the same on every rank."""
        total, ranks = self.sampler.length - self.sampler.position, self.sampler.num_replicas
        return Balance.dealt(total, ranks, self.batch_size, drop_last=self.drop_last, may_split=self.may_split)

    def __len__(self) -> int:
        return self.balance.steps

    def __iter__(self) -> Iterator[list[Any]]:
        balance, rank = self.balance, self.sampler.rank
        own = balance.batches[rank]
        batch: list[Any] = []
        for step, batch in enumerate(islice(super().__iter__(), own)):
            if rank in balance.split and step == own - 2:
                half = (len(batch) + 1) // 2
                yield batch[:half]
                batch = batch[half:]
            yield batch
        for _ in range(own, balance.steps):
            yield batch[:1] or [self.sampler.first()]


class PaddedBatchSampler(Sampler[list[Any]]):
    """Any batch sampler, with batches that must not count at its end until all ranks have equally many.

    Args:
        batch_sampler: over a sampler of ours, which its attribute ``sampler`` names, or one of ours itself.
        lengths: by rank, its length there.
        rank: this one.
    """

    def __init__(self, batch_sampler: Any, lengths: Sequence[int], rank: int) -> None:
        self.batch_sampler = batch_sampler
        self.balance = Balance(tuple(lengths))
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "batch_sampler":  # a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)  # sampler, batch_size, set_epoch, and what its author has added

    def __len__(self) -> int:
        return self.balance.steps

    def __iter__(self) -> Iterator[list[Any]]:
        own = self.balance.batches[self._rank]
        batch: list[Any] = []
        for batch in islice(self.batch_sampler, own):
            yield batch
        for _ in range(own, self.balance.steps):
            yield list(batch[:1]) or self._first_of_any_rank()

    def _first_of_any_rank(self) -> list[Any]:
        if isinstance(self.batch_sampler, DistributedBatchSamplerWrapper):
            return list(self.batch_sampler.first()[:1])
        return [self.batch_sampler.sampler.first()]


class PaddedSampler(DistributedSampler[Any]):
    """A sampler for loaders without batches, whose samples are steps, with samples at its end that must not count.

    It is a ``DistributedSampler`` because Lightning would share it out once more.

    Args:
        sampler: one of ours with ``uneven="exact"``.
    """

    def __init__(self, sampler: GlobalOrderSampler) -> None:
        # Not torch's __init__: what it would set is asked of the sampler.
        self.sampler = sampler
        self._steps = BalancedBatchSampler(sampler, 1)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.sampler, name)

    @property
    def balance(self) -> Balance:
        """The number of samples of each rank, as in ``BalancedBatchSampler``."""
        return self._steps.balance

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler which epoch it is."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Any]:
        return (sample for (sample,) in self._steps)


def is_exact(sampler: object) -> bool:
    """Whether this is a sampler of ours whose ranks may have different numbers of samples."""
    return isinstance(sampler, GlobalOrderSampler) and sampler.uneven == "exact"


def deals_unevenly(batch_sampler: Any) -> bool:
    """Whether the numbers of its batches may differ by rank, because we deal out its samples or whole batches so."""
    if isinstance(batch_sampler, DistributedBatchSamplerWrapper):
        return batch_sampler.uneven == "exact"
    return isinstance(batch_sampler, PaddedBatchSampler) or is_exact(getattr(batch_sampler, "sampler", None))
