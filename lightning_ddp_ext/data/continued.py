"""The rest of an epoch: the batches of a sampler that have not been trained on yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader


class Continued:
    """A batch sampler (or, where there are no batches, a sampler) that leaves away what has been done.

    Its length is the whole epoch's, done and not yet done: loops count batches from the epoch's beginning.

    Args:
        inner: the sampler that is continued; all else that is asked of this object is asked of it.
        skip: so many of its items have been done, and are left away by each iterator.
        length: of the whole epoch, in items.
        as_then: entered around the leaving away, with the generators as they were when the epoch began.

    >>> rest = Continued(["a", "b", "c"], skip=2, length=3)
    >>> list(rest), len(rest)
    (['c'], 3)
    """

    def __init__(
        self,
        inner: Iterable[Any],
        *,
        skip: int,
        length: int,
        as_then: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._inner = inner
        self._skip = skip
        self._length = length
        self._as_then = as_then

    def __iter__(self) -> Iterator[Any]:
        # A generator: DataLoader makes two iterators of this one if it has workers, and uses the second.
        with self._as_then():
            iterator = iter(self._inner)
            for _ in islice(iterator, self._skip):
                pass
        yield from iterator

    def __len__(self) -> int:
        return self._length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_inner" not in vars(self):
            raise AttributeError(name)
        return getattr(self._inner, name)


def index_sampler_name(loader: DataLoader[Any]) -> str:
    """Which attribute of a loader gives the indices to read: those of batches, or, without batches, of samples."""
    return "batch_sampler" if loader.batch_sampler is not None else "sampler"


def put_index_sampler(loader: DataLoader[Any], sampler: Any) -> None:
    """Have a loader read what ``sampler`` says; its next iterator does."""
    object.__setattr__(loader, index_sampler_name(loader), sampler)  # DataLoader itself refuses it once it is made
