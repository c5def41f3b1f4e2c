"""Share out whole batches among the ranks, so that the batches are the same on every number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
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

AHEAD = 64  # batches drawn at once: swapping the generators in and out takes as long as drawing twenty


@dataclass
class _Count:
    """How many batches an iterator has handed out."""

    handed_out: int = 0


class DistributedBatchSamplerWrapper(Resumable, Sampler[list[int]]):
    """Shares out the batches of any batch sampler among the ranks, for ``DataLoader(batch_sampler=...)``.

    Every rank draws the batches of all ranks, some at a time, with all generators that it can reach seeded from
    ``seed`` and the epoch, and yields its own: the k-th batch belongs to rank k modulo the number of ranks.
    ``position`` counts batches of all ranks. Resuming draws the batches before ``position`` again.

    Args:
        batch_sampler: anything that yields batches and has a length; ``set_epoch`` is called on it and what it wraps.
        num_replicas: as for ``ScalableDistributedSampler``.
        rank: as for ``ScalableDistributedSampler``.
        seed: the same on every rank, not negative.
        uneven: ``"pad"`` reads the epoch's first batches again, ``"drop"`` leaves the last ones out, ``"exact"`` gives
            some ranks one more batch.

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
        self.length  # noqa: B018  # refuse at once what has none

    @property
    @override
    def length(self) -> int:
        """Batches of an epoch, of all ranks together."""
        return length_of(self.batch_sampler, "batch_sampler", "give it a __len__ that says how many batches it yields")

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches from ``position`` on, as the batch sampler makes them."""
        count = self._progress = _Count()
        share = self.share()
        for batch in _select(share, self._draw(share.length)):
            count.handed_out += 1
            yield batch

    def _draw(self, length: int) -> Iterator[Any]:
        """Draw the epoch's batches of all ranks, with the generators swapped in only while drawing."""
        streams = Streams(mix(self.seed, self.epoch), *with_wrapped(self.batch_sampler))
        with streams.running():
            batches = iter(self.batch_sampler)
        drawn = 0
        while drawn < length:
            with streams.running():
                some = [copy.copy(batch) for batch in islice(batches, min(AHEAD, length - drawn))]
            if not some:
                raise SamplerError(
                    f"batch_sampler must yield as many batches as its length, {length} (got {drawn});"
                    f" correct {type(self.batch_sampler).__name__}.__len__"
                )
            drawn += len(some)
            yield from some

    @override
    def _tell_wrapped(self) -> None:
        for sampler in with_wrapped(self.batch_sampler):
            tell_epoch(sampler, self.epoch)


def _select(share: Share, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches at the share's positions; the first ones are kept for padding, which repeats them."""
    mine = range(share.start + share.rank, share.start + share.rank + len(share) * share.world_size, share.world_size)
    if not mine:
        return
    first: list[Any] = []
    for number, batch in zip(range(min(mine[-1] + 1, share.length)), batches, strict=False):
        if share.uneven == "pad" and number < share.world_size:
            first.append(batch)
        if number in mine:
            yield batch
    yield from (first[number % share.length] for number in mine if number >= share.length)
