"""Samplers for loaders whose own sampler knows one rank only: in torch's order, and in any other sampler's."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lightning_ddp_ext.data.checks import length_of, samples_of
from lightning_ddp_ext.data.epochs import tell_epoch
from lightning_ddp_ext.data.partition import Uneven
from lightning_ddp_ext.data.samplers import GlobalOrderSampler, Order, identity
from lightning_ddp_ext.data.streams import Streams, mix, with_wrapped
from lightning_ddp_ext.errors import SamplerError


class TorchOrderSampler(GlobalOrderSampler):
    """Bit for bit the order of ``torch.utils.data.DistributedSampler``, entered at any position by any number of ranks.

    The arguments are the same. An epoch's order takes 8 bytes a sample, and the time to draw it.
    """

    kind: ClassVar[str] = "torch"

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        length = samples_of(dataset)
        uneven: Uneven = "drop" if drop_last else "pad"
        super().__init__(
            dataset, length, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed, uneven=uneven
        )

    @override
    def _order(self) -> Order:
        if not self.shuffle:
            return identity
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: NDArray[np.int64] = torch.randperm(self.length, generator=generator).numpy()
        return order.__getitem__


class SharedSampler(GlobalOrderSampler):
    """Shares out what any other sampler yields; all ranks have the same list, whatever the state of their generators.

    Every rank draws the whole list of an epoch, with all generators that the sampler can reach seeded from ``seed``
    and the epoch.

    Args:
        sampler: any sampler with a length; if it has ``set_epoch``, it is called with the epoch.
        num_replicas: as for ``ScalableDistributedSampler``.
        rank: as for ``ScalableDistributedSampler``.
        seed: the same on every rank, not negative.
        uneven: as for ``ScalableDistributedSampler``.

    Raises:
        SamplerError: the sampler has no length; when iterated: it yields fewer indices than that.

    >>> weighted = torch.utils.data.WeightedRandomSampler([1.0, 0.0, 2.0], 6)
    >>> len(SharedSampler(weighted, num_replicas=2, rank=0))
    3
    """

    kind: ClassVar[str] = "shared"

    def __init__(
        self,
        sampler: Iterable[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        uneven: Uneven = "pad",
    ) -> None:
        self.sampler = sampler
        super().__init__(
            sampler, self.length, num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed, uneven=uneven
        )

    @property
    @override
    def length(self) -> int:
        """The wrapped sampler's length, now."""
        return length_of(self.sampler, "sampler", "give it a __len__ that says how many indices it yields")

    @override
    def _tell_wrapped(self) -> None:
        tell_epoch(self.sampler, self.epoch)

    @override
    def _order(self) -> Order:
        length = self.length
        with Streams(mix(self.seed, self.epoch), *with_wrapped(self.sampler)).running():
            drawn = np.fromiter(islice(self.sampler, length), dtype=object)
        if len(drawn) < length:
            raise SamplerError(
                f"sampler must yield as many indices as its length, {length} (got {len(drawn)});"
                f" correct {type(self.sampler).__name__}.__len__"
            )
        return drawn.__getitem__
