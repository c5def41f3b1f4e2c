"""Split the items of any sampler or batch sampler among the ranks.

The order is the same for any number of ranks.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_ddp_ext.arguments import length_of
from lightning_ddp_ext.data.epochs import has_set_epoch, samplers_below
from lightning_ddp_ext.data.fingerprints import fingerprint_of_list
from lightning_ddp_ext.data.global_order import DrawnOrder, GlobalOrderSampler, Order
from lightning_ddp_ext.data.loader_properties import identity_of
from lightning_ddp_ext.data.partition import Uneven
from lightning_ddp_ext.data.seeding import mix, seeded
from lightning_ddp_ext.errors import ConfigurationError


class DistributedBatchSamplerWrapper(GlobalOrderSampler):
    """Splits the batches of any batch sampler among the ranks.

    Pass it as ``DataLoader(batch_sampler=...)``. When an epoch begins, every rank draws
    the batches of all ranks and yields its own: the k-th batch belongs to rank k modulo
    the number of ranks. During the draw, the global generators and those of the batch
    sampler are seeded from ``seed`` and the epoch. ``position`` counts the batches of
    all ranks.

    Args:
        batch_sampler: anything that yields batches and has a length; ``set_epoch`` is
            called on it and on the samplers that it wraps.
        num_replicas, rank, seed: as for ``ScalableDistributedSampler``.
        uneven: ``"pad"`` reads the epoch's first batches again, ``"drop"`` leaves the
            last batches out, ``"exact"`` gives some ranks one more batch.

    Raises:
        ConfigurationError: an argument is invalid; or, during iteration, fewer batches
            are drawn than the length.

    >>> from torch.utils.data import BatchSampler, SequentialSampler
    >>> batches = BatchSampler(SequentialSampler(range(6)), batch_size=2, drop_last=False)
    >>> split = DistributedBatchSamplerWrapper
    >>> [list(split(batches, num_replicas=2, rank=rank)) for rank in range(2)]
    [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]
    """

    kind: ClassVar[str] = "batches"
    _field: ClassVar[str] = "batch_sampler"  # name of the argument in errors

    def __init__(
        self,
        batch_sampler: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        seed: int = 0,
        uneven: Uneven = "pad",
    ) -> None:
        self.dataset: Any = batch_sampler  # whose length ``length`` returns
        super().__init__(batch_sampler, self.length, num_replicas, rank, True, seed, uneven)

    @property
    @override
    def length(self) -> int:
        """The current length of the wrapped sampler."""
        return length_of(
            self.dataset, self._field, "give it a __len__ that returns the number of items"
        )

    @override
    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "sampler": identity_of(self.dataset)}

    @override
    def _set_wrapped_epoch(self) -> None:
        for sampler in samplers_below(self.dataset):
            if has_set_epoch(sampler):
                sampler.set_epoch(self.epoch)

    @override
    def draw(self, epoch: int) -> DrawnOrder:
        self.set_epoch(epoch)
        items = self._items()
        return DrawnOrder(items.__getitem__, fingerprint_of_list(items.tolist()))

    @override
    def _order(self) -> Order:
        return self._items().__getitem__

    def _items(self) -> NDArray[Any]:
        """Draw the items of all ranks."""
        length = self.length
        with seeded(mix(self.seed, self.epoch), *samplers_below(self.dataset)):
            # A batch sampler may reuse one list or array.
            items = map(_copy_of_collection, islice(self.dataset, length))
            drawn = np.fromiter(items, dtype=object)
        if len(drawn) < length:
            raise ConfigurationError(
                f"{self._field} must yield at least len({self._field}) = {length} items (got"
                f" {len(drawn)}); correct {type(self.dataset).__name__}.__len__"
            )
        return drawn


def _copy_of_collection(item: Any) -> Any:
    return item.copy() if isinstance(item, (list, np.ndarray)) else item


class SharedSampler(DistributedBatchSamplerWrapper):
    """Splits the indices of any sampler with a length among the ranks in the same way.

    >>> from torch.utils.data import WeightedRandomSampler
    >>> len(SharedSampler(WeightedRandomSampler([1.0, 0.0, 2.0], 6), num_replicas=2, rank=0))
    3
    """

    kind: ClassVar[str] = "shared"
    _field: ClassVar[str] = "sampler"
