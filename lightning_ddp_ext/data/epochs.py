"""Start an epoch in a loader: call ``set_epoch`` on all objects that have it, also in workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from inspect import getattr_static
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_ddp_ext.data.seeding import seed_generators

_DATA = (Sampler, Dataset, DataLoader)
_CONTAINERS = (list, tuple, dict)
_NOT_FOLLOWED = (torch.Tensor, np.ndarray, torch.nn.Module, str, bytes, bytearray, range, type)
_SHORT = 32  # a longer list or dict holds samples, unless its first element is a loader, sampler or dataset


def start_epoch(loader: Any, epoch: int, *, rank: int, seed: int | None = None) -> bool:
    """Call ``set_epoch`` on every sampler, dataset and loader inside a loader, before it is iterated over.

    Persistent workers would miss that: if a dataset takes epochs, or with a seed, the next iterator starts
    new ones.

    Args:
        loader: a loader of our own, see ``loader.own_copy``, since its ``worker_init_fn`` may be replaced.
        epoch: the epoch, from 0.
        rank: this process's rank.
        seed: with one, the generators of the loader's workers are seeded by ``seed_generators``.

    Returns:
        whether the workers of one epoch are also those of the next one.
    """
    set_epoch(loader, epoch)
    if isinstance(loader, DataLoader):
        own = loader.worker_init_fn
        loader.worker_init_fn = StartWorker(own.own if isinstance(own, StartWorker) else own, epoch, rank, seed)
    kept = [each for each in all_below(loader) if isinstance(each, DataLoader) and each.persistent_workers]
    keeps_workers = False
    for each in kept:
        is_stream = isinstance(each.dataset, IterableDataset)  # its workers may draw its order
        if seed is not None or is_stream or any(has_set_epoch(below) for below in all_below(each.dataset)):
            forget_workers(each)
        else:
            keeps_workers |= each is loader
    return keeps_workers


@dataclass(frozen=True)
class StartWorker:
    """A ``worker_init_fn`` that leaves the rank's process group, calls the loader's own one, and seeds the worker.

    torchrun, schedulers and terminals send a signal to all processes of a group. It would kill the workers, which a
    rank needs until it stops.

    Attributes:
        own: the loader's own function.
        epoch: from 0.
        rank: from 0.
        seed: for :func:`seed_generators`; ``None`` to leave the generators as torch and ``own`` seed them.
    """

    own: Callable[[int], None] | None
    epoch: int
    rank: int
    seed: int | None

    def __call__(self, worker: int) -> None:
        """Start a worker."""
        with suppress(OSError):  # a session leader cannot change its group
            os.setpgid(0, 0)
        if self.own is not None:
            self.own(worker)
        if self.seed is not None:
            seed_generators(self.seed, epoch=self.epoch, rank=self.rank, worker=worker)


def forget_workers(loader: DataLoader[Any]) -> None:
    """Have the next iterator start new workers.

    torch keeps the iterator of ``persistent_workers``, and in it the sampler of the loader's first iterator.
    """
    object.__setattr__(loader, "_iterator", None)


def set_epoch(loaders: object, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` once on each object at or below ``loaders`` that has this method.

    Inner objects come first. So one that makes its batches in ``set_epoch`` makes them from objects that already have
    the epoch. Not collective. Exceptions of a ``set_epoch`` propagate.

    The search follows all attributes of these objects:

    - instances of torch's ``DataLoader``, ``Sampler`` and ``Dataset``,
    - objects that have a method ``set_epoch``,
    - other objects with ``__iter__`` or ``__getitem__``, such as a combined loader or a user's own loader class,
    - lists, tuples and dicts, and their elements. Of one with more than 32 elements it only looks at the first, and
      continues if that is a loader, sampler or dataset, or has ``set_epoch``.

    It does not follow modules (a ``LightningModule`` is one), a ``Trainer``, tensors, arrays, strings and classes, and
    it reads no properties.

    Args:
        loaders: a loader, or any nesting of lists, tuples, dicts and combined loaders, with loaders in it.
        epoch: the next epoch, from 0.
    """
    for thing in all_below(loaders):
        if has_set_epoch(thing):
            thing.set_epoch(epoch)  # type: ignore[attr-defined]


def has_set_epoch(thing: object) -> bool:
    """Whether an object has a method ``set_epoch``."""
    # Looked up statically: an object with __getattr__ may claim any method, and a property may fail.
    return callable(getattr_static(thing, "set_epoch", None))


def all_below(root: object) -> list[object]:
    """Return ``root`` and all objects below it that are followed, each once and after those below it."""
    seen: set[int] = set()
    found: list[object] = []
    stack = [(root, False)]  # not recursive: datasets may be nested a thousand levels deep
    while stack:
        thing, is_done = stack.pop()
        if is_done:
            found.append(thing)
        elif id(thing) not in seen and _is_followed(thing):
            seen.add(id(thing))
            stack.append((thing, True))
            children = [*_elements(thing), *getattr(thing, "__dict__", {}).values()]
            stack += [(child, False) for child in reversed(children)]
    return found


def samplers_below(root: object) -> list[Any]:
    """Return a sampler, and the samplers that are its attributes, at any depth; datasets are not searched."""
    found = [] if root is None else [root]
    for owner in found:
        for name, value in sorted(getattr(owner, "__dict__", {}).items()):
            is_named = name in ("sampler", "batch_sampler") and hasattr(value, "__iter__")
            if (is_named or isinstance(value, Sampler)) and not any(value is other for other in found):
                found.append(value)
    return found


def _is_followed(thing: object) -> bool:
    if isinstance(thing, (*_DATA, *_CONTAINERS)):
        return True
    if isinstance(thing, _NOT_FOLLOWED):
        return False
    return hasattr(type(thing), "__iter__") or hasattr(type(thing), "__getitem__") or has_set_epoch(thing)


def _elements(thing: object) -> Collection[object]:
    elements = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else ()
    first = next(iter(elements), None)
    return elements if len(elements) <= _SHORT or isinstance(first, _DATA) or has_set_epoch(first) else ()
