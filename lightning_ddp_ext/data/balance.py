"""Give ranks with different numbers of samples equal numbers of batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
    @lru_cache(maxsize=128)
    def dealt(
        cls, samples: int, ranks: int, batch_size: int, *, drop_last: bool = False, may_split: bool = True
    ) -> Balance:
        """For samples that are dealt out to the ranks in turn, so that the first ranks may have one more.

        Numbers of batches then differ by one at most, and where they do, the last batch of a rank that has fewer is
        full: it comes in two, unless ``batch_size`` is 1 or the rank has no sample at all.

        Args:
            samples: of all ranks together.
            ranks: how many there are.
            batch_size: samples in a batch of one rank.
            drop_last: whether incomplete batches are left out: all ranks then have as many as the one with fewest.
            may_split: whether batches may come in two.
        """
        owned = [len(range(rank, samples, ranks)) for rank in range(ranks)]
        if drop_last:
            return cls((owned[-1] // batch_size,) * ranks)
        whole = [-(-own // batch_size) for own in owned]
        steps = max(whole)
        few = (rank for rank, batches in enumerate(whole) if 0 < batches < steps)
        split = frozenset(few) if may_split and batch_size > 1 else frozenset()
        return cls(tuple(steps if rank in split else batches for rank, batches in enumerate(whole)), split)

    @property
    def steps(self) -> int:
        """How many batches each rank takes part in."""
        return max(self.batches)

    @property
    def is_even(self) -> bool:
        """Whether every rank has a batch of its own in every step."""
        return min(self.batches) == self.steps

    def idle(self, step: int) -> tuple[int, ...]:
        """The ranks that have no batch of their own in this step, counted from 0."""
        return tuple(rank for rank, batches in enumerate(self.batches) if batches <= step)


class BalancedBatchSampler(BatchSampler):
    """Batches of a sampler with ``uneven="exact"``, equally many on every rank.

    A rank that has no samples for a batch that others have yields one that must not count, with a sample that it or
    another rank has read already; ``balance`` tells which these are.

    Args:
        sampler: one of ours with ``uneven="exact"``.
        batch_size: samples in a batch of one rank.
        drop_last: whether incomplete batches are left out.
        may_split: whether a batch may come in two; of no use where the last batches are not reached.

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
        """Who has how many batches, from the sampler's position on; the same on every rank."""
        total, ranks = self.sampler.length - self.sampler.position, self.sampler.num_replicas
        return Balance.dealt(total, ranks, self.batch_size, drop_last=self.drop_last, may_split=self.may_split)

    def __len__(self) -> int:
        return self.balance.steps

    def __iter__(self) -> Iterator[list[Any]]:
        balance, rank = self.balance, self.sampler.rank
        own = balance.batches[rank]
        if own < balance.steps and not own:
            yield [first_sample(self.sampler)]
            return
        samples = iter(self.sampler)
        batch: list[Any] = []
        for step in range(own):
            batch = self._next(samples, step, own if rank in balance.split else None)
            yield batch
        for _ in range(own, balance.steps):
            yield batch[:1]

    def _next(self, samples: Iterator[Any], step: int, own: int | None) -> list[Any]:
        """The next batch; of a rank's ``own`` batches the last two share what would have been one."""
        before_last = own is not None and step == own - 2
        last = own is not None and step == own - 1
        size = (self.batch_size + 1) // 2 if before_last else self.batch_size // 2 if last else self.batch_size
        return list(islice(samples, size))


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
        filler: list[Any] | None = None
        for batch in islice(self.batch_sampler, own):
            filler = filler or list(batch[:1])
            yield batch
        for _ in range(own, self.balance.steps):
            filler = filler or first_batch(self.batch_sampler)[:1]
            yield filler


class PaddedSampler(DistributedSampler[Any]):
    """A sampler for loaders without batches, whose samples are steps; those at its end that must not count included.

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
        """See ``BalancedBatchSampler``."""
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
    if isinstance(batch_sampler, PaddedBatchSampler):
        return True
    if isinstance(batch_sampler, DistributedBatchSamplerWrapper):
        return batch_sampler.uneven == "exact"
    return is_exact(getattr(batch_sampler, "sampler", None))


def first_sample(sampler: GlobalOrderSampler) -> Any:
    """What the epoch's global order begins with: a sample that exists, for a rank that has none itself."""
    return sampler.first()


def first_batch(batch_sampler: Any) -> list[Any]:
    """A batch that exists, for a rank that has none itself: of another rank's samples, or of the first one alone."""
    if not isinstance(batch_sampler, DistributedBatchSamplerWrapper):
        return [first_sample(batch_sampler.sampler)]
    return list(batch_sampler.first())
