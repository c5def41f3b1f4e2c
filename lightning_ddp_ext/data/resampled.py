"""Put another sampler into a copy of a loader without calling its constructor.

Constructors of users' classes take arguments that no attribute may hold, so a loader
that is created again can silently get a default. A copy has all attributes of the
original.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from math import inf
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from lightning_ddp_ext.data.epochs import samplers_below
from lightning_ddp_ext.data.global_order import GlobalOrderSampler
from lightning_ddp_ext.data.loader import batches_of, index_sampler_of, is_stateful, own_copy
from lightning_ddp_ext.data.proxy import show
from lightning_ddp_ext.data.random_state import generators_of, preserve_random_state
from lightning_ddp_ext.errors import SamplingError

_PLAIN = (int, float, str, bytes, type(None))

REMEDY = (
    "pass batch_sampler=DistributedBatchSamplerWrapper(...) around it, or set "
    "Trainer(use_distributed_sampler=False) and divide the data yourself"
)


def with_sampler(loader: Any, sampler: GlobalOrderSampler) -> Any:
    """Return a copy of a ``DataLoader`` that reads another sampler, or ``None``.

    The result is ``None`` if a copy may not read the sampler. The batch sampler is
    created again if that needs no unknown arguments. Otherwise it is also copied, and
    the copy raises if it yields a batch without having read the sampler.
    """
    if is_stateful(loader):
        return None
    copied = own_copy(loader)
    if _holds_derived_state(copied):
        return None
    # A DataLoader refuses to change its attributes.
    attributes = vars(copied)
    batch_sampler = loader.batch_sampler
    if batch_sampler is not None:
        attributes["batch_sampler"] = _exchange(batch_sampler, sampler)
        if attributes["batch_sampler"] is None:
            return None
    if batch_sampler is None or type(batch_sampler) is BatchSampler:
        attributes["sampler"] = sampler
    keeps_length = _has_length_of_sampler(copied) or not _has_length_of_sampler(loader)
    return copied if keeps_length else None


def with_batches_of(loader: Any, other: DataLoader[Any]) -> Any:
    """Return a copy of a loader that reads the batch sampler of another one."""
    copied = own_copy(loader)
    names = ("batch_sampler", "sampler", "batch_size", "drop_last")
    vars(copied).update({name: getattr(other, name) for name in names})
    return copied


def _exchange(batch_sampler: Any, sampler: GlobalOrderSampler) -> Any:
    """Return a batch sampler like the given one that reads another sampler.

    The result is ``None`` if the given one holds no sampler.
    """
    if _is_like_torch(batch_sampler):
        return _create_like(batch_sampler, sampler)
    read = getattr(batch_sampler, "__dict__", {}).get("sampler")
    if not hasattr(read, "__iter__") or hasattr(read, "batch_size"):
        # It may be a batch sampler itself.
        return None
    copied = copy.copy(batch_sampler)
    vars(copied)["sampler"] = sampler
    whole = batches_of(batch_sampler)
    is_divided = batches_of(copied) < whole or batches_of(sampler) == batches_of(read)
    return show(copied, CheckedBatches(copied, sampler, at_least=0 if is_divided else whole))


class CheckedBatches:
    """Yields the batches of a copied batch sampler, and checks their origin.

    It raises if the batches do not come from the sampler put into the copy.

    Args:
        batch_sampler: the copy.
        sampler: the sampler that it must read.
        at_least: the number of batches that it must yield because its length announces
            them.
    """

    def __init__(self, batch_sampler: Any, sampler: GlobalOrderSampler, *, at_least: float) -> None:
        self._batch_sampler = batch_sampler
        self._sampler = sampler
        self._at_least = at_least

    def __iter__(self) -> Iterator[Any]:
        given = 0
        for batch in self._batch_sampler:
            given += 1
            if not self._sampler.was_read:
                raise self._error(
                    "yields indices that it does not read from its attribute 'sampler'"
                )
            yield batch
        if given < self._at_least < inf:
            raise self._error(
                f"yields {given} of this rank's batches, but its length is {len(self)} for all"
                " ranks"
            )

    def __len__(self) -> int:
        return len(self._batch_sampler)

    def _error(self, finding: str) -> SamplingError:
        name = type(self._batch_sampler).__name__
        return SamplingError(
            f"batch_sampler {name} {finding}, so it cannot be divided among the ranks; {REMEDY}"
        )


def _is_like_torch(batch_sampler: Any) -> bool:
    """Whether a batch sampler can be created with torch's three arguments.

    A trial must have attributes equal to those of the batch sampler.
    """
    if type(batch_sampler) is BatchSampler:
        return True
    try:
        with preserve_random_state(generators_of(*samplers_below(batch_sampler))):
            trial = _create_like(batch_sampler, batch_sampler.sampler)
    except Exception:  # of a constructor or property that someone else wrote
        return False
    return _comparable_attributes(trial) == _comparable_attributes(batch_sampler)


def _create_like(batch_sampler: Any, sampler: Any) -> Any:
    options = {"batch_size": batch_sampler.batch_size, "drop_last": batch_sampler.drop_last}
    return type(batch_sampler)(sampler, **options)


def _comparable_attributes(thing: object) -> dict[str, Any]:
    """Return the plain attributes, and class and length of the others."""
    return {
        name: value if isinstance(value, _PLAIN) else (type(value), batches_of(value))
        for name, value in vars(thing).items()
    }


def _holds_derived_state(loader: Any) -> bool:
    """Whether a loader has other attributes made from its sampler.

    An iterator that has started is one of them.
    """
    names = ("sampler", "batch_sampler")
    samplers = [each for each in (loader.sampler, loader.batch_sampler) if each is not None]
    others = [value for name, value in vars(loader).items() if name not in names]
    return any(
        isinstance(other, Iterator) or any(other is each for each in samplers) for other in others
    )


def _has_length_of_sampler(loader: Any) -> bool:
    return batches_of(loader) == batches_of(index_sampler_of(loader))
