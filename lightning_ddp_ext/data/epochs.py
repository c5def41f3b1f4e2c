"""Start an epoch in a loader: set the epoch of all objects in it, and of its workers.

The sections below are: workers, objects with an epoch, and the search for these objects.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from inspect import getattr_static, signature
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_ddp_ext.data.random_state import seed_generators

# What the search follows, see `set_epoch`.
_DATA = (Sampler, Dataset, DataLoader)
_CONTAINERS = (list, tuple, dict)
# A Trainer is not followed either, because it has none of the methods that the search
# looks for: ``__iter__``, ``__getitem__`` and ``set_epoch``.
_NOT_FOLLOWED = (torch.Tensor, np.ndarray, torch.nn.Module, str, bytes, bytearray, range, type)
# Longer collections count as samples, unless their first element may need the epoch.
_SHORT = 32


# Workers.


def prepare_workers(loader: Any, epoch: int, *, rank: int, seed: int | None = None) -> None:
    """Make the workers of a loader's next iterator belong to an epoch.

    Call it before the loader is iterated over. Persistent workers would not see the new
    epoch. So the next iterator starts new workers if a dataset has ``set_epoch``, if
    the dataset is iterable, or if ``seed`` is given.

    Args:
        loader: the loader to be iterated over. If it is a ``DataLoader``, its
            ``worker_init_fn`` is replaced. Of the loaders below it, which belong to the
            user, only persistent workers are replaced, since they would keep an old
            epoch; their ``worker_init_fn`` is left as it is.
        epoch: the epoch, from 0.
        rank: this process's rank.
        seed: if given, the workers' generators are seeded from (``seed``, epoch, rank,
            worker).
    """
    if isinstance(loader, DataLoader):
        users_function = loader.worker_init_fn
        if isinstance(users_function, StartWorker):  # of an earlier epoch
            users_function = users_function.users_function
        loader.worker_init_fn = StartWorker(users_function, epoch, rank, seed)
    for each in all_below(loader):
        if (
            isinstance(each, DataLoader)
            and each.persistent_workers
            and (seed is not None or _depends_on_epoch(each.dataset))
        ):
            forget_workers(each)


def _depends_on_epoch(dataset: object) -> bool:
    """Whether a worker's copy of a dataset may depend on the epoch.

    An iterable dataset may draw its order in the worker.
    """
    return isinstance(dataset, IterableDataset) or any(map(has_set_epoch, all_below(dataset)))


@dataclass(frozen=True)
class StartWorker:
    """A ``worker_init_fn`` that calls the user's and seeds the worker.

    The worker also leaves the Unix process group of its rank. torchrun, schedulers and
    terminals send signals to all processes of a group. Such a signal would kill the
    workers, which the rank needs until it stops.

    Attributes:
        users_function: the loader's function before, or ``None``.
        epoch: from 0.
        rank: from 0.
        seed: ``None`` leaves the generators as torch and the user's function seed them.
    """

    users_function: Callable[[int], None] | None
    epoch: int
    rank: int
    seed: int | None

    def __call__(self, worker: int) -> None:
        """Start a worker."""
        with suppress(OSError):  # a session leader cannot change its group
            os.setpgid(0, 0)
        if self.users_function is not None:
            self.users_function(worker)
        if self.seed is not None:
            seed_generators(self.seed, epoch=self.epoch, rank=self.rank, worker=worker)


def forget_workers(loader: DataLoader[Any]) -> None:
    """Make the next iterator start new workers.

    Torch keeps the first iterator of persistent workers in this attribute, and has no
    public way to drop it. A subclass of ``DataLoader`` may refuse to set attributes, so
    its ``__setattr__`` is not called.
    """
    object.__setattr__(loader, "_iterator", None)


# Objects with an epoch.


def set_epoch(loaders: object, epoch: int, *, except_for: Collection[object] = ()) -> None:
    """Call ``set_epoch(epoch)`` once on each object below ``loaders`` that has it.

    ``loaders`` itself is included.

    Inner objects come first, so an object that prepares its batches in ``set_epoch``
    finds the new epoch in the objects that it wraps. Not collective. Exceptions raised
    by ``set_epoch`` propagate.

    The search follows all attributes of these objects:

    - instances of torch's ``DataLoader``, ``Sampler`` and ``Dataset``,
    - objects that have a method ``set_epoch``,
    - other objects with ``__iter__`` or ``__getitem__``, such as a combined loader or a
      user's own loader class,
    - lists, tuples and dicts, and their elements. If one has more than 32 elements,
      these are searched only if the first of them is a loader, sampler or dataset, or
      has ``set_epoch``.

    The search does not follow modules (such as a ``LightningModule``), a ``Trainer``,
    tensors, arrays, strings or classes, and does not read properties.

    Args:
        loaders: a loader, or any nesting of lists, tuples, dicts and combined loaders
            that contains loaders.
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


# The search.


def all_below(root: object) -> list[object]:
    """Return ``root`` and all objects below it that the search follows.

    Each object appears once, after the objects below it.
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


def samplers_below(root: object) -> list[Any]:
    """Return a sampler and the samplers among its attributes, at any depth.

    Datasets are not searched.
    """
    samplers = [] if root is None else [root]
    for owner in samplers:  # including those that are appended
        for name, value in sorted(getattr(owner, "__dict__", {}).items()):
            is_named = name in ("sampler", "batch_sampler") and hasattr(value, "__iter__")
            is_new = not any(value is sampler for sampler in samplers)
            if is_new and (is_named or isinstance(value, Sampler)):
                samplers.append(value)
    return samplers


def _is_followed(obj: object) -> bool:
    if isinstance(obj, (*_DATA, *_CONTAINERS)):
        return True
    if isinstance(obj, _NOT_FOLLOWED):
        return False
    is_collection = hasattr(type(obj), "__iter__") or hasattr(type(obj), "__getitem__")
    return is_collection or has_set_epoch(obj)


def _elements(obj: object) -> Collection[object]:
    """Return the elements of a collection that the search follows."""
    elements: Collection[object] = ()
    if isinstance(obj, dict):
        elements = obj.values()
    elif isinstance(obj, (list, tuple)):
        elements = obj
    first = next(iter(elements), None)
    may_need_epoch = isinstance(first, _DATA) or has_set_epoch(first)
    return elements if len(elements) <= _SHORT or may_need_epoch else ()
