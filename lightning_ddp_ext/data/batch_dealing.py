"""Whole batches dealt out to the ranks in turn, so that they are the same on every number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar

from torch.utils.data import Sampler
from typing_extensions import override

from lightning_ddp_ext.data.checks import length_of
from lightning_ddp_ext.data.epochs import tell_epoch
from lightning_ddp_ext.data.partition import Share, Uneven
from lightning_ddp_ext.data.resumable import Resumable
from lightning_ddp_ext.data.streams import Streams, mix, with_wrapped
from lightning_ddp_ext.errors import SamplerError

MOST_AT_ONCE = 64  # batches drawn ahead: putting generators in and out takes as long as drawing twenty


class DistributedBatchSamplerWrapper(Resumable, Sampler[list[int]]):
    """Deals the batches of any batch sampler out to the ranks, for ``DataLoader(batch_sampler=...)``.

    Every rank draws the batches of all, some at a time, with all generators that it can reach seeded from ``seed`` and
    the epoch, and hands out its own: the k-th batch goes to rank k modulo the number of ranks. ``position`` counts
    batches of all ranks. Resuming draws what comes before again.

    Args:
        batch_sampler: anything that yields batches and has a length; it and what it wraps are told the epoch.
        num_replicas: as for ``ScalableDistributedSampler``.
        rank: as for ``ScalableDistributedSampler``.
        seed: the same on every rank, not negative.
        uneven: ``"pad"`` deals the epoch's first batches again, ``"drop"`` leaves the last ones out, with ``"exact"``
            some ranks get one more.

    Raises:
        SamplerError: the batch sampler has no length; when iterated: it yields fewer batches than that.

    >>> from torch.utils.data import BatchSampler, SequentialSampler
    >>> batches = BatchSampler(SequentialSampler(range(6)), batch_size=2, drop_last=False)
    >>> [list(DistributedBatchSamplerWrapper(batches, num_replicas=2, rank=rank)) for rank in range(2)]
    [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]
    """

    kind: ClassVar[str] = "batches"

    def __init__(
        self,
        batch_sampler: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        seed: int = 0,
        uneven: Uneven = "pad",
    ) -> None:
        super().__init__(num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed, uneven=uneven)
        self.batch_sampler = batch_sampler
        self._dealt: list[int] = [0]
        self.length  # noqa: B018  # refuse at once what has none

    @property
    @override
    def length(self) -> int:
        """Batches of an epoch, of all ranks together."""
        return length_of(self.batch_sampler, "batch_sampler", "give it a __len__ that says how many batches it yields")

    @override
    def set_epoch(self, epoch: int) -> None:
        """Set the epoch here and in all that is wrapped."""
        super().set_epoch(epoch)
        self._tell_wrapped()

    @override
    def resume_at(self, epoch: int, position: int) -> None:
        """Go to a place in an epoch, and tell all that is wrapped which epoch it is."""
        super().resume_at(epoch, position)
        self._tell_wrapped()

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches from ``position`` on, as the batch sampler makes them."""
        dealt = self._dealt = [0]
        share = self.share()
        if not len(share):
            return
        for batch in _dealt_to(share, self._draw(share.length)):
            dealt[0] += 1
            yield batch

    def _draw(self, length: int) -> Iterator[Any]:
        """The epoch's batches for all ranks; in between, the generators belong to others."""
        streams = Streams(mix(self.seed, self.epoch), *with_wrapped(self.batch_sampler))
        with streams.running():
            batches = iter(self.batch_sampler)
        drawn, size = 0, 1
        while drawn < length:
            with streams.running():
                some = [copy.copy(batch) for batch in islice(batches, min(size, length - drawn))]
            yield from some
            drawn += len(some)
            if len(some) < size and drawn < length:
                raise SamplerError(
                    f"batch_sampler must yield as many batches as its length, {length} (got {drawn});"
                    f" correct {type(self.batch_sampler).__name__}.__len__"
                )
            size = min(2 * size, MOST_AT_ONCE)

    def _tell_wrapped(self) -> None:
        for sampler in with_wrapped(self.batch_sampler):
            tell_epoch(sampler, self.epoch)

    @override
    def _handed_out(self) -> int:
        return self._dealt[0]

    @override
    def _forget_iterator(self) -> None:
        self._dealt = [0]


def _dealt_to(share: Share, batches: Iterator[Any]) -> Iterator[Any]:
    """The batches at the share's positions. Those that padding repeats are the first ones, and kept for that."""
    first: list[Any] = []
    mine = range(share.start + share.rank, share.start + share.rank + len(share) * share.world_size, share.world_size)
    for number, batch in zip(range(min(mine[-1] + 1, share.length)), batches, strict=False):
        if share.uneven == "pad" and number < share.world_size:
            first.append(batch)
        if number in mine:
            yield batch
    yield from (first[number % share.length] for number in mine if number >= share.length)
