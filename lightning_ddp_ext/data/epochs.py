"""Find what has ``set_epoch`` below a loader, and call it."""

from __future__ import annotations

from collections.abc import Collection
from inspect import getattr_static, ismemberdescriptor

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

__all__ = ["data_loaders", "epoch_takers", "set_epoch", "tell_epoch", "unseedable_shufflers"]

_DATA = (Sampler, Dataset, DataLoader)
_CONTAINERS = (list, tuple, dict)
_NOT_FOLLOWED = (torch.Tensor, np.ndarray, torch.nn.Module, str, bytes, bytearray, range, type)
_KNOWN = ("torch.", "lightning.", "pytorch_lightning.", "lightning_ddp_ext.")
_SHORT = 32  # a longer list or dict holds samples, unless its first element is a loader, sampler or dataset


def epoch_takers(loaders: object) -> list[object]:
    """Return all distinct objects at or below ``loaders`` that have a method ``set_epoch``, the innermost ones first.

    The search follows attributes, whatever their names, of these objects:

    - instances of torch's ``DataLoader``, ``Sampler`` and ``Dataset``,
    - objects that have a method ``set_epoch``,
    - other objects with ``__iter__`` or ``__getitem__``, such as a combined loader or a loader of one's own,
    - lists, tuples and dicts, and their elements. Of one with more than 32 elements it looks at the first only, and
      goes on if that is a loader, sampler or dataset, or has ``set_epoch``.

    It does not follow modules (a ``LightningModule`` is one), a ``Trainer``, tensors, arrays, strings and classes, and
    it reads no properties.

    Args:
        loaders: a loader, or any nesting of lists, tuples, dicts and combined loaders, with loaders in it.

    Example:
        >>> from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
        >>> sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
        >>> loader = DataLoader(range(8), batch_sampler=BatchSampler(sampler, batch_size=2, drop_last=False))
        >>> epoch_takers({"train": [loader]}) == [sampler]
        True
    """
    return [thing for thing in _below(loaders) if _takes_epochs(thing)]


def set_epoch(loaders: object, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` on everything that ``epoch_takers`` finds below ``loaders``.

    The innermost objects come first. So one that makes its batches in ``set_epoch`` makes them from something that
    knows the epoch already. Not collective. What a ``set_epoch`` raises is raised.

    Args:
        loaders: as for ``epoch_takers``.
        epoch: the epoch that comes next, from 0.

    Example:
        >>> from torch.utils.data import DistributedSampler
        >>> sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
        >>> set_epoch(DataLoader(range(8), sampler=sampler), 3)
        >>> sampler.epoch
        3
    """
    for taker in epoch_takers(loaders):
        tell_epoch(taker, epoch)


def tell_epoch(thing: object, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` on this one object, if it has that method."""
    if _takes_epochs(thing):
        thing.set_epoch(epoch)  # type: ignore[attr-defined]


def data_loaders(loaders: object) -> list[DataLoader[object]]:
    """Return all distinct instances of torch's ``DataLoader`` at or below ``loaders``, as ``epoch_takers`` searches."""
    return [thing for thing in _below(loaders) if isinstance(thing, DataLoader)]


def unseedable_shufflers(loaders: object) -> list[object]:
    """Return the samplers below ``loaders`` that say that they shuffle, and have no ``set_epoch``.

    Such a sampler may have the same order in every epoch. It is an instance of torch's ``Sampler``, or an attribute
    called ``sampler`` or ``batch_sampler``, and has a true attribute ``shuffle``. There are none where something of the
    user's own takes epochs, since that may hand them on in its own way.

    Args:
        loaders: as for ``epoch_takers``.

    Example:
        >>> class EvenFirst(Sampler[int]):
        ...     shuffle = True
        ...     def __iter__(self):
        ...         return iter([0, 2, 1, 3])
        >>> [type(sampler).__name__ for sampler in unseedable_shufflers(DataLoader(range(4), sampler=EvenFirst()))]
        ['EvenFirst']
    """
    everything = _below(loaders)
    if any(_takes_epochs(thing) and not _is_known(thing) for thing in everything):
        return []
    untold = [thing for thing in _samplers(everything) if not _takes_epochs(thing)]
    return [sampler for sampler in untold if getattr_static(sampler, "shuffle", False) is True]


def _samplers(everything: list[object]) -> list[object]:
    attributes = [getattr_static(thing, name, None) for thing in everything for name in ("sampler", "batch_sampler")]
    called_sampler = {id(attribute) for attribute in attributes}
    return [thing for thing in everything if isinstance(thing, Sampler) or id(thing) in called_sampler]


def _takes_epochs(thing: object) -> bool:
    # Looked up statically: an object with __getattr__ may promise anything, and a property may fail.
    return callable(getattr_static(thing, "set_epoch", None))


def _is_known(thing: object) -> bool:
    """Whether ``set_epoch`` of an object reaches no sampler without that method."""
    return str(getattr_static(thing, "set_epoch").__module__).startswith(_KNOWN)


def _below(root: object) -> list[object]:
    """Return ``root`` and all objects below it that are followed, each once, after what is below it."""
    seen: set[int] = set()
    found: list[object] = []
    stack = [(root, False)]  # not recursive: datasets may be wrapped a thousand times
    while stack:
        thing, is_done = stack.pop()
        if is_done:
            found.append(thing)
        elif id(thing) not in seen and _is_followed(thing):
            seen.add(id(thing))
            stack.append((thing, True))
            stack += [(child, False) for child in reversed([*_elements(thing), *_attributes(thing)])]
    return found


def _is_followed(thing: object) -> bool:
    if isinstance(thing, (*_DATA, *_CONTAINERS)):
        return True
    if isinstance(thing, _NOT_FOLLOWED):
        return False
    return hasattr(type(thing), "__iter__") or hasattr(type(thing), "__getitem__") or _takes_epochs(thing)


def _elements(thing: object) -> Collection[object]:
    elements = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else ()
    first = next(iter(elements), None)
    return elements if len(elements) <= _SHORT or isinstance(first, _DATA) or _takes_epochs(first) else ()


def _attributes(thing: object) -> list[object]:
    slots = [name for base in type(thing).__mro__ for name, value in vars(base).items() if ismemberdescriptor(value)]
    return [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, name, None) for name in slots)]
