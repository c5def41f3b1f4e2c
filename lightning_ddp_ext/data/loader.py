"""Wrap a loader so that its iterators start when the first batch is requested."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_ext.data.epochs import forget_workers, samplers_below
from lightning_ddp_ext.data.proxy import iterable_of, show

StartIterator = Callable[["DistributedLoader", "LazyIterator"], Iterator[Any]]


class DistributedLoader:
    """A loader that starts each iterator when its first batch is requested.

    Lightning creates iterators long before it reads them, and some that it never reads.
    An iterator of this loader therefore does nothing until its first batch, when
    ``start_iterator`` looks up the epoch and the position.

    Args:
        source: the loader that the Trainer was given; any iterable. It is not changed
            unless it has a state.
        start_iterator: given this loader and the new iterator, returns the iterator
            that yields the batches.

    Attributes:
        source: as given.
        loader: the loader to read: a copy of ``source`` if that is a ``DataLoader``
            without a state.
        length: the number of batches that replaces the loader's own length; ``None`` to
            keep it.
        position: the training position in the loader; ``None`` for an evaluation
            loader.
        start_evaluation: starts an iterator over an evaluation loader; ``None`` if
            nothing depends on its steps.
        on_iterator: called when an iterator is created.

    >>> loader = DistributedLoader([1, 2], lambda loader, iterator: iter(loader.loader))
    >>> len(loader), list(loader), list(loader)
    (2, [1, 2], [1, 2])
    """

    def __init__(self, source: Any, start_iterator: StartIterator) -> None:
        self.source = source
        # Its owner may read that state.
        self.loader = source if is_stateful(source) else own_copy(source)
        self.start_iterator = start_iterator
        self.length: int | None = None
        self.position: Any = None
        self.start_evaluation: Callable[[], Iterator[Any]] | None = None
        self.on_iterator: Callable[[], object] = lambda: None

    def shown(self) -> Any:
        """Return this loader with the class and attributes of ``loader``.

        The Trainer and its users see this object.
        """
        return show(self.loader, self)

    def __iter__(self) -> Iterator[Any]:
        self.on_iterator()
        return LazyIterator(self)

    def __len__(self) -> int:
        return len(self.loader) if self.length is None else self.length


class LazyIterator(Iterator[Any]):
    """An iterator of a :class:`DistributedLoader` that starts at its first batch.

    Attributes:
        loader: the loader.
        before_next: called for each request of a batch, also after the end, if any.
        is_announced: whether it was already called for the first request.
    """

    def __init__(self, loader: DistributedLoader) -> None:
        self.loader = loader
        self.before_next: Callable[[], object] | None = None
        self.is_announced = False
        self._batches: Iterator[Any] | None = None

    def start(self) -> Iterator[Any]:
        """Start the iterator, unless it has started."""
        if self._batches is None:
            self._batches = self.loader.start_iterator(self.loader, self)
        return self._batches

    def __next__(self) -> Any:
        batches = self.start()
        if self.before_next is not None and not self.is_announced:
            self.before_next()
        self.is_announced = False
        return next(batches)


def source_of(loader: Any) -> Any:
    """Return the user's loader behind a shown one, or another loader unchanged."""
    distributed = iterable_of(loader)
    return distributed.source if isinstance(distributed, DistributedLoader) else loader


def is_stateful(loader: object) -> bool:
    """Whether a loader has a state, as torchdata's ``StatefulDataLoader`` does."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def own_copy(loader: Any) -> Any:
    """Return a copy of a ``DataLoader`` that can be changed and read independently.

    Other iterables are returned as they are, since nothing changes them.
    """
    if not isinstance(loader, DataLoader):
        return loader
    copied = copy.copy(loader)
    forget_workers(copied)
    return copied


def index_sampler_of(loader: Any) -> Any:
    """Return the batch sampler or sampler that a loader reads, or ``None``."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


class PermanentBatchSampler:
    """Yields the items of another sampler, or of an order set for the next iterator.

    A loader always keeps the same one, because with persistent workers torch keeps the
    sampler of the first iterator. The length is that of a whole epoch, because loops
    count batches from the beginning of the epoch.

    Args:
        batch_sampler: a batch sampler, or a sampler if the loader does not make
            batches.

    >>> sampler = PermanentBatchSampler(["a", "b", "c"])
    >>> sampler.draw_next_by(lambda: iter(["c"]))
    >>> list(sampler), list(sampler), len(sampler)
    (['c'], ['a', 'b', 'c'], 3)
    """

    def __init__(self, batch_sampler: Iterable[Any]) -> None:
        self.batch_sampler = batch_sampler
        self._draw: Callable[[], Iterator[Any]] | None = None

    def draw_next_by(self, draw: Callable[[], Iterator[Any]]) -> None:
        """Make the next iterator yield the items of ``draw()``.

        ``draw`` is called when the first item is requested.
        """
        self._draw = draw

    def __iter__(self) -> Iterator[Any]:
        # A generator, as a loader with workers reads the second of two iterators.
        draw = self._draw
        self._draw = None
        yield from iter(self.batch_sampler) if draw is None else draw()

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]


def make_permanent(
    loader: DataLoader[Any], items: Iterable[Any] | None = None
) -> PermanentBatchSampler:
    """Wrap the index sampler of one of our loaders, and return the wrapper.

    If ``items`` is given, the loader reads these, and still shows its own sampler.
    """
    own = index_sampler_of(loader)
    permanent = PermanentBatchSampler(own if items is None else items)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    object.__setattr__(loader, name, show(own, permanent))  # a DataLoader refuses to change it
    return permanent


def name_of(loader: Any) -> str:
    """Return a name for a loader's data in errors.

    The name consists of the classes that the user chose.
    """
    samplers = [type(each).__name__ for each in samplers_below(index_sampler_of(loader))]
    return " over ".join(samplers) or type(getattr(loader, "dataset", loader)).__name__


_PARAMETERS = (
    "batch_size",
    "drop_last",
    "_num_samples",
    "num_samples",
    "replacement",
    "seed",
    "shuffle",
)


def identity_of(sampler: object) -> str:
    """Describe a sampler and those inside it by class and parameters.

    Samplers with equal descriptions yield the same items.

    >>> from torch.utils.data import BatchSampler, SequentialSampler
    >>> identity_of(BatchSampler(SequentialSampler(range(3)), 2, drop_last=False))
    'BatchSampler(batch_size=2, drop_last=False) over SequentialSampler()'
    """
    found = []
    for each in samplers_below(sampler):
        own = getattr(each, "__dict__", {})
        values = [
            f"{name.lstrip('_')}={own[name]!r}"
            for name in _PARAMETERS
            if isinstance(own.get(name), (int, str))
        ]
        found.append(f"{type(each).__name__}({', '.join(values)})")
    return " over ".join(found)


def parameters_of(loader: Any) -> dict[str, Any]:
    """Return the parameters that determine a loader's samples.

    The number of workers is one of them if the loader has no indices or has a state.
    """
    sampler = index_sampler_of(loader)
    workers = (
        getattr(loader, "num_workers", None) if sampler is None or is_stateful(loader) else None
    )
    batch_size = getattr(loader, "batch_size", None)
    return {"batch_size": batch_size, "sampler": identity_of(sampler), "num_workers": workers}


def batches_of(loader: Any) -> float:
    """Return the length of a loader; ``inf`` if it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return float("inf")
