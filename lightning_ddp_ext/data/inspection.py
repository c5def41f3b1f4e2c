"""Look into a loader of any class: how it reads, by which samplers, and what needs the epoch.

A loader may be any iterable of the user's, so its type is ``Any``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from inspect import getattr_static, signature
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

_END = object()


# How a loader reads.


def each_of(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield the items that are left in an iterator.

    A ``for`` loop over the iterator would call its ``__iter__``, which starts a loader
    anew if that is its own iterator.

    >>> list(each_of(iter("abc")))
    ['a', 'b', 'c']
    """
    while (item := next(iterator, _END)) is not _END:
        yield item


def length_or_inf(loader: Any) -> float:
    """Return the length of a loader, sampler or dataset; ``inf`` if it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return float("inf")


def is_of_torch(loader: object, *methods: str) -> bool:
    """Whether these methods of a loader are those of torch's or torchdata's ``DataLoader``."""
    if not isinstance(loader, DataLoader):
        return False
    modules = [getattr(type(loader), name).__module__ for name in methods]
    return all(module.partition(".")[0] in ("torch", "torchdata") for module in modules)


def yields_in_order(loader: Any) -> bool:
    """Whether a loader yields a batch for each item of its index sampler, in their order."""
    return is_of_torch(loader, "__iter__") and bool(
        loader.num_workers == 0 or getattr(loader, "in_order", True)
    )


def is_stateful(loader: object) -> bool:
    """Whether a loader has a state, as torchdata's ``StatefulDataLoader`` does."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


# Its samplers.


def index_sampler_of(loader: Any) -> Any:
    """Return the batch sampler or sampler that a loader reads, or ``None``."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def samplers_below(root: Any) -> list[Any]:
    """Return a sampler and the samplers among its attributes, at any depth.

    The nearest ones come first, and each appears once. Datasets are not searched.
    """
    found: list[Any] = []
    to_visit = deque([] if root is None else [root])
    while to_visit:
        sampler = to_visit.popleft()
        if not any(sampler is each for each in found):
            found.append(sampler)
            to_visit += _samplers_among(getattr(sampler, "__dict__", {}))
    return found


def _samplers_among(attributes: dict[str, Any]) -> list[Any]:
    """Return the samplers, in the order of the names.

    A user's class need not be a ``Sampler``, and is then recognised by torch's name.
    """
    return [
        value
        for name, value in sorted(attributes.items())
        if isinstance(value, Sampler)
        or (name in ("sampler", "batch_sampler") and hasattr(value, "__iter__"))
    ]


def name_of(loader: Any) -> str:
    """Return a name for a loader in errors: its samplers' classes, or else its data's.

    >>> name_of(DataLoader(range(4), shuffle=True)), name_of([1, 2])
    ('BatchSampler over RandomSampler', 'list')
    """
    samplers = [type(sampler).__name__ for sampler in samplers_below(index_sampler_of(loader))]
    return " over ".join(samplers) or type(getattr(loader, "dataset", loader)).__name__


# What needs the epoch.


def set_epoch(loaders: object, epoch: int, *, except_for: Collection[object] = ()) -> None:
    """Call ``set_epoch(epoch)`` once on each object in ``loaders`` that has it.

    Inner objects come first, so an object that prepares its batches in ``set_epoch``
    finds the new epoch in the objects that it wraps. Not collective. Exceptions raised
    by ``set_epoch`` propagate.

    Args:
        loaders: a loader, or any nesting of lists, tuples, dicts and combined loaders
            that contains loaders; :func:`all_below` finds the objects in it.
        epoch: the next epoch, from 0.
        except_for: objects whose method is not called.
    """
    excepted = set(map(id, except_for))
    for obj in all_below(loaders):
        if id(obj) not in excepted and has_set_epoch(obj):
            obj.set_epoch(epoch)  # type: ignore[attr-defined]


def has_set_epoch(obj: Any) -> bool:
    """Whether an object has a method ``set_epoch`` that takes one positional argument.

    >>> has_set_epoch(torch.utils.data.DistributedSampler([1], 1, 0)), has_set_epoch([1])
    (True, False)
    """
    # Static, because __getattr__ may claim any method, and a property may raise.
    if not callable(getattr_static(obj, "set_epoch", None)):
        return False
    try:
        with suppress(ValueError):  # a method in C may have no signature
            signature(obj.set_epoch).bind(0)
    except TypeError:
        return False
    return True


def all_below(root: object) -> list[object]:
    """Return ``root`` and all objects below it that may need the epoch, or contain such objects.

    Each object appears once, after the objects below it. An object is below another one
    as an attribute, or as an element of a list, tuple or dict. Properties are not read.
    """
    seen: set[int] = set()
    in_order: list[object] = []
    # Not recursive, because datasets may be nested a thousand levels deep. Each object is
    # visited twice: before those below it, and after them.
    stack = [(root, False)]
    while stack:
        obj, is_after_children = stack.pop()
        if is_after_children:
            in_order.append(obj)
        elif id(obj) not in seen and _is_followed(obj):
            seen.add(id(obj))
            stack.append((obj, True))
            children = [*_elements(obj), *getattr(obj, "__dict__", {}).values()]
            stack += [(child, False) for child in reversed(children)]
    return in_order


_DATA = (Sampler, Dataset, DataLoader)
_SHORT = 32
_NOT_FOLLOWED = (torch.Tensor, np.ndarray, torch.nn.Module, str, bytes, bytearray, range, type)


def _is_followed(obj: object) -> bool:
    """Whether an object may need the epoch, or contain objects that do.

    ====================================================  ==============================
    Object                                                Followed
    ====================================================  ==============================
    torch's samplers, datasets and loaders                yes
    lists, tuples and dicts                               yes
    tensors, arrays, modules, strings, ranges, classes    no
    any other with ``__iter__`` or ``__getitem__``        yes: a user's own loader, or a
                                                          combined one
    any other with ``set_epoch``                          yes
    any other, such as a ``Trainer``                      no
    ====================================================  ==============================
    """
    if isinstance(obj, (*_DATA, list, tuple, dict)):
        return True
    if isinstance(obj, _NOT_FOLLOWED):
        return False
    is_collection = hasattr(type(obj), "__iter__") or hasattr(type(obj), "__getitem__")
    return is_collection or has_set_epoch(obj)


def _elements(obj: object) -> Collection[object]:
    """Return the elements of a list, tuple or dict, except of a list of samples.

    A dataset may keep millions of samples in a list, and a search of them would take
    long. So the elements of a long collection are only searched if the first one is a
    sampler, dataset or loader, or has ``set_epoch``.
    """
    if not isinstance(obj, (list, tuple, dict)):
        return ()
    elements: Collection[object] = obj.values() if isinstance(obj, dict) else obj
    first = next(iter(elements), None)
    is_searched = len(elements) <= _SHORT or isinstance(first, _DATA) or has_set_epoch(first)
    return elements if is_searched else ()
