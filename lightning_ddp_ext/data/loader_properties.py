"""Read a loader of any class, and what it consists of: sampler, length and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_ext.data.epochs import samplers_below

T = TypeVar("T")

_END = object()

# The attributes in which samplers of torch, and ours, have their parameters. A sampler has
# one of the two `num_samples`: `RandomSampler` has the private one, behind a property.
_PARAMETERS = (
    "batch_size",
    "drop_last",
    "_num_samples",
    "num_samples",
    "replacement",
    "seed",
    "shuffle",
)


def each_of(iterator: Iterator[T]) -> Iterator[T]:
    """Yield the items that are left in an iterator.

    A ``for`` loop over the iterator would call its ``__iter__``, which starts a loader
    anew if that is its own iterator.

    >>> list(each_of(iter("abc")))
    ['a', 'b', 'c']
    """
    item: Any
    while (item := next(iterator, _END)) is not _END:
        yield item


def index_sampler_of(loader: Any) -> Any:
    """Return the batch sampler or sampler that a loader reads, or ``None``."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def iterates_as_torch(loader: object) -> bool:
    """Whether a loader's ``__iter__`` is that of torch's or torchdata's ``DataLoader``."""
    if not isinstance(loader, DataLoader):
        return False
    return type(loader).__iter__.__module__.partition(".")[0] in ("torch", "torchdata")


def is_stateful(loader: object) -> bool:
    """Whether a loader has a state, as torchdata's ``StatefulDataLoader`` does."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def length_or_inf(loader: Any) -> float:
    """Return the length of a loader, sampler or dataset; ``inf`` if it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return float("inf")


def name_of(loader: Any) -> str:
    """Return a name for a loader in errors: its samplers' classes, or else its data's.

    >>> name_of(DataLoader(range(4), shuffle=True)), name_of([1, 2])
    ('BatchSampler over RandomSampler', 'list')
    """
    samplers = [type(sampler).__name__ for sampler in samplers_below(index_sampler_of(loader))]
    return " over ".join(samplers) or type(getattr(loader, "dataset", loader)).__name__


def identity_of(sampler: object) -> str:
    """Describe a sampler and those inside it by class and parameters.

    Contents, such as weights or a list of indices, are not part of the description.

    >>> from torch.utils.data import BatchSampler, SequentialSampler
    >>> identity_of(BatchSampler(SequentialSampler(range(3)), 2, drop_last=False))
    'BatchSampler(batch_size=2, drop_last=False) over SequentialSampler()'
    """
    return " over ".join(map(_describe, samplers_below(sampler)))


def _describe(sampler: object) -> str:
    attributes = getattr(sampler, "__dict__", {})
    parameters = [name for name in _PARAMETERS if isinstance(attributes.get(name), (int, str))]
    values = [f"{name.lstrip('_')}={attributes[name]!r}" for name in parameters]
    return f"{type(sampler).__name__}({', '.join(values)})"


def parameters_of(loader: Any) -> dict[str, Any]:
    """Return the parameters that determine a loader's samples.

    The number of workers is one of them if the loader has no indices, because each worker
    then reads its own part of the data, or has a state, which contains one for each worker.
    """
    sampler = index_sampler_of(loader)
    depends_on_workers = sampler is None or is_stateful(loader)
    return {
        "batch_size": getattr(loader, "batch_size", None),
        "sampler": identity_of(sampler),
        "num_workers": getattr(loader, "num_workers", None) if depends_on_workers else None,
    }
