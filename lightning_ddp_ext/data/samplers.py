"""Samplers that share out one global order of an epoch among the ranks and can start at any position of it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from lightning_ddp_ext.data.checks import samples_of, uneven_of
from lightning_ddp_ext.data.partition import Share, Uneven
from lightning_ddp_ext.data.permutation import Permutation
from lightning_ddp_ext.data.resumable import Resumable
from lightning_ddp_ext.data.streams import mix
from lightning_ddp_ext.errors import SamplerError

FIRST_BLOCK, BLOCK = 256, 1 << 14  # indices computed at once: few at first, so that the first one comes soon
CHUNK = 1 << 10  # indices converted to Python at once: few enough that the next ones find their memory in the cache

Order = Callable[[NDArray[np.int64]], NDArray[Any]]


class GlobalOrderSampler(Resumable, DistributedSampler[int]):  # type: ignore[override]  # asks for the ranks when used
    """Base of our samplers: a subclass says in ``_order`` what stands at a position of an epoch's global order.

    It is a ``DistributedSampler`` because Lightning wraps anything else in one of its own.
    """

    def __init__(
        self,
        dataset: Any,
        length: int,
        *,
        num_replicas: int | None,
        rank: int | None,
        shuffle: bool,
        seed: int,
        uneven: Uneven,
    ) -> None:
        Resumable.__init__(self, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed, uneven=uneven)
        self.dataset = dataset
        self._length = length

    def _order(self) -> Order:
        """Return the order of ``self.epoch``: a function from positions to what the sampler yields for them."""
        raise NotImplementedError

    @property
    @override
    def length(self) -> int:
        """Positions of the global order of an epoch."""
        return self._length

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        """Whether the last samples are left out where the ranks do not divide the rest."""
        return self.uneven == "drop"

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """The length, by the name that torch gives it."""
        return len(self)

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """What all ranks together read in an epoch."""
        return self.length if self.uneven == "exact" else len(self) * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices from ``position`` on; nothing is computed before the first one is asked for."""
        return chain.from_iterable(self._chunks())

    def _chunks(self) -> Iterator[Iterator[int]]:
        chunks = self._progress = _Chunks(self.share(), self._order())
        yield from chunks


class _Chunks:
    """Iterators over the parts of a share, one after another; the newest one knows how much of it is left."""

    def __init__(self, share: Share, order: Order) -> None:
        self._share = share
        self._order = order
        self._end = 0
        self._chunk: Iterator[Any] = iter(())

    @property
    def handed_out(self) -> int:
        return self._end - operator.length_hint(self._chunk)

    def __iter__(self) -> Iterator[Iterator[Any]]:
        size = FIRST_BLOCK
        while self._end < len(self._share):
            indices = self._order(self._share.positions(self._end, self._end + size))
            for begin in range(0, len(indices), CHUNK):
                chunk = indices[begin : begin + CHUNK].tolist()
                self._end += len(chunk)
                self._chunk = iter(chunk)
                yield self._chunk
            size = BLOCK


class ScalableDistributedSampler(GlobalOrderSampler):
    """A ``DistributedSampler`` that shuffles without a list: any length costs no memory and no time to start.

    The order of an epoch is a keyed permutation, see ``data.permutation``, that depends on ``seed`` and ``epoch``
    alone (mixed, not added). Each rank computes only the indices that it yields. A state can be loaded on any number
    of ranks, which then read what has not been read before.

    Args:
        dataset: anything with a length, up to 2**62.
        num_replicas: number of ranks; None: the process group's when it is asked for, else 1.
        rank: this rank; None: the process group's when it is asked for, else 0.
        shuffle: whether the order is random, or the dataset's.
        seed: the same on every rank, not negative.
        drop_last: the same as ``uneven="drop"``.
        uneven: what happens when the ranks do not divide the length: ``"pad"`` reads the epoch's first samples again,
            ``"drop"`` leaves the last ones out, ``"exact"`` gives some ranks one more sample.

    Raises:
        SamplerError: the dataset has no length, or is empty and to be shuffled; an argument is out of range;
            ``drop_last=True`` with another policy.

    >>> sampler = ScalableDistributedSampler(range(10), num_replicas=2, rank=0, seed=3)
    >>> samples = iter(sampler)
    >>> read = [next(samples), next(samples)]
    >>> state = sampler.state_dict()
    >>> state["position"]
    4
    >>> resumed = [ScalableDistributedSampler(range(10), num_replicas=3, rank=rank, seed=3) for rank in range(3)]
    >>> for each in resumed:
    ...     each.load_state_dict(state)
    >>> [each.left for each in resumed]
    [2, 2, 2]
    """

    kind: ClassVar[str] = "scalable"

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        uneven: Uneven = "pad",
    ) -> None:
        length = samples_of(dataset)
        if shuffle and length == 0:
            raise SamplerError(
                "dataset must not be empty with shuffle=True (got length 0);"
                " look for what filters its samples out, or pass shuffle=False"
            )
        if drop_last and uneven_of(uneven) == "exact":
            raise SamplerError("uneven must be 'drop' with drop_last=True (got 'exact'); leave out one of the two")
        policy: Uneven = "drop" if drop_last else uneven_of(uneven)
        super().__init__(
            dataset, length, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed, uneven=policy
        )

    @override
    def _order(self) -> Order:
        if not self.shuffle:
            return identity
        return Permutation(self.length, mix(self.seed, self.epoch)).apply


class ExactDistributedSampler(ScalableDistributedSampler):
    """Each sample on exactly one rank, for evaluation: nothing is repeated and nothing left out.

    Ranks may get one sample more than others, or none at all, so batch counts may differ. The arguments and errors are
    those of ``ScalableDistributedSampler``; without ``shuffle`` the dataset may be empty.

    >>> [list(ExactDistributedSampler(range(5), num_replicas=2, rank=rank)) for rank in range(2)]
    [[0, 2, 4], [1, 3]]
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, uneven="exact")


def identity(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The dataset's own order."""
    return positions
