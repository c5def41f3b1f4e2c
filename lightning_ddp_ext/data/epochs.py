"""What below a loader can be told which epoch it is, and telling it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator
from types import MemberDescriptorType

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

__all__ = ["data_loaders", "epoch_takers", "set_epoch", "tell_epoch", "unseedable_shufflers"]

_DATA_CLASSES = (Sampler, Dataset, DataLoader)
_CONTAINERS = (list, tuple, dict)
_NEVER_FOLLOWED = (torch.Tensor, np.ndarray, torch.nn.Module, str, bytes, bytearray, range, type)
_LIGHTNING = frozenset({"lightning", "lightning_fabric", "pytorch_lightning"})
_OFTEN_PROPERTIES = ("dataset", "sampler", "batch_sampler", "iterables")
_SHORT = 32  # elements of a container that are all looked at; a longer one is judged by its first
_NESTING = 8  # containers in containers that are opened to see the first element of a long one


def epoch_takers(loaders: object) -> list[object]:
    """Return all distinct objects below ``loaders`` that have a callable ``set_epoch``, the innermost ones first.

    Looked through are the attributes of loaders, samplers and datasets, whatever their names, what these hold in turn,
    and lists, tuples and dicts on the way. Only such objects are followed:

    - instances of torch's ``DataLoader``, ``Sampler`` and ``Dataset``,
    - objects with a callable ``set_epoch``,
    - other objects with ``__iter__`` or ``__getitem__``, such as a combined loader or a loader of one's own,
    - ``loaders`` itself, whatever it is.

    Not followed, and never told anything: modules (a ``LightningModule`` is one), a ``Trainer``, a ``DataModule`` and
    whatever else of Lightning's cannot be iterated over, tensors, arrays, strings, classes; nor lists, tuples and dicts
    of more than 32 elements, unless the first one is a loader, sampler or dataset, or has a callable ``set_epoch``.

    Args:
        loaders: a loader, or any nesting of lists, tuples, dicts and objects with ``iterables``, with loaders in it.

    Example:
        >>> from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
        >>> sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
        >>> loader = DataLoader(range(8), batch_sampler=BatchSampler(sampler, batch_size=2, drop_last=False))
        >>> epoch_takers({"train": [loader]}) == [sampler]
        True
    """
    return [thing for thing in _below(loaders) if _takes_epochs(thing)]


def set_epoch(loaders: object, epoch: int) -> None:
    """Give ``epoch`` to everything that ``epoch_takers`` finds below ``loaders``.

    To the innermost ones first: one that makes its batches in ``set_epoch`` makes them from something that knows the
    epoch already, and one that hands the epoch on hands on the one that is there. Not collective. What a ``set_epoch``
    raises is raised.

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
        taker.set_epoch(epoch)  # type: ignore[attr-defined]


def data_loaders(loaders: object) -> list[DataLoader[object]]:
    """Return all distinct instances of torch's ``DataLoader`` at or below ``loaders``.

    Args:
        loaders: as for ``epoch_takers``.
    """
    return [thing for thing in _below(loaders) if isinstance(thing, DataLoader)]


def tell_epoch(thing: object, epoch: int) -> None:
    """Give ``epoch`` to this one thing, if it takes one."""
    if _takes_epochs(thing):
        thing.set_epoch(epoch)  # type: ignore[attr-defined]


def unseedable_shufflers(loaders: object) -> list[object]:
    """Return the samplers below ``loaders`` that say that they shuffle and cannot be told the epoch.

    They have a true attribute ``shuffle`` and no callable ``set_epoch``, and nothing that holds them has one, which
    might hand it on (torch's and Lightning's own, and what has a true attribute ``shares_out``, do not). One that
    makes its order from a fixed seed has the same order in every epoch. A sampler is an instance of torch's
    ``Sampler``, what is called ``sampler`` or ``batch_sampler``, and what such a one holds; never a dataset or a
    loader. torch's own ``RandomSampler`` has no attribute ``shuffle`` and is not among them.

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
    everything = list(_below(loaders))
    told = {id(thing) for thing in _below([thing for thing in everything if _hands_epochs_on(thing)])}
    untold = [thing for thing in _samplers(everything) if id(thing) not in told and not _takes_epochs(thing)]
    return [thing for thing in untold if _says_that_it_shuffles(thing)]


def _below(loaders: object, *, stop_at: tuple[type, ...] = ()) -> Iterator[object]:
    """Yield ``loaders`` and all that is worth following below, each once, and after what is below it."""
    if _is_a(loaders, _NEVER_FOLLOWED) and not _is_a(loaders, _DATA_CLASSES):
        return
    seen = {id(loaders): loaders}  # the values keep what a property has made alive, and so its id its own
    path = [(loaders, _children(loaders, stop_at))]
    while path:
        thing, children = path[-1]
        child = next((child for child in children if id(child) not in seen), None)
        if child is None:
            path.pop()
            yield thing
        else:
            seen[id(child)] = child
            path.append((child, _children(child, stop_at)))


def _children(thing: object, stop_at: tuple[type, ...]) -> Iterator[object]:
    if _is_a(thing, stop_at):
        return iter(())
    held = [*_elements(thing), *_attributes(thing)]
    return (child for child in held if _is_worth_following(child))


def _is_worth_following(thing: object) -> bool:
    if _is_a(thing, (*_DATA_CLASSES, *_CONTAINERS)):
        return True
    if _is_a(thing, _NEVER_FOLLOWED):
        return False
    if hasattr(type(thing), "__iter__") or hasattr(type(thing), "__getitem__"):
        return True
    return _takes_epochs(thing) and not _is_lightnings(type(thing))


def _is_a(thing: object, classes: tuple[type, ...]) -> bool:
    return issubclass(type(thing), classes)  # unlike isinstance, runs nothing of the object's own


def _is_lightnings(cls: type) -> bool:
    return any(base.__module__.partition(".")[0] in _LIGHTNING for base in cls.__mro__)


def _elements(thing: object) -> Collection[object]:
    with contextlib.suppress(Exception):  # a list or dict of the user's own can do anything
        elements = _as_collection(thing)
        if len(elements) <= _SHORT or _leads_to_data(elements):
            return list(elements)
    return ()


def _as_collection(thing: object) -> Collection[object]:
    if isinstance(thing, dict):
        return thing.values()
    return thing if isinstance(thing, (list, tuple)) else ()


def _leads_to_data(elements: Collection[object]) -> bool:
    """Look at the first element, and if that is a container at its first, and so on."""
    first = next(iter(elements), None)
    for _ in range(_NESTING):
        if _is_a(first, _CONTAINERS):
            first = next(iter(_as_collection(first)), None)
    return _is_a(first, _DATA_CLASSES) or (not _is_a(first, _NEVER_FOLLOWED) and _takes_epochs(first))


def _attributes(thing: object) -> Iterator[object]:
    """Yield what the object's own attributes hold, of properties only those that loaders are known for."""
    own = _own_attributes(thing)
    yield from list(own.values())
    for base in type(thing).__mro__:
        if "__slots__" in vars(base):
            members = (member for member in vars(base).values() if isinstance(member, MemberDescriptorType))
            yield from itertools.chain.from_iterable(_values_of(member.__get__, thing) for member in members)
    for name in _OFTEN_PROPERTIES:
        if name not in own and _has_in_class(type(thing), name):
            yield from _values_of(getattr, thing, name)


def _own_attributes(thing: object) -> dict[str, object]:
    try:
        return vars(thing)
    except Exception:  # no __dict__, or a property that fails in its place
        return {}


def _values_of(read: Callable[..., object], *args: object) -> list[object]:
    try:
        return [read(*args)]
    except Exception:  # an empty slot, or a property that is not ready
        return []


def _has_in_class(cls: type, name: str) -> bool:
    return any(name in vars(base) for base in cls.__mro__)


def _attribute(thing: object, name: str) -> object:
    """Return the attribute if the object or its class really has it; ``__getattr__`` may promise anything."""
    if not _has_in_class(type(thing), name) and name not in _own_attributes(thing):
        return None
    return next(iter(_values_of(getattr, thing, name)), None)


def _takes_epochs(thing: object) -> bool:
    return not _is_a(thing, (type,)) and callable(_attribute(thing, "set_epoch"))


def _hands_epochs_on(thing: object) -> bool:
    """Whether what a thing holds may be told the epoch by it."""
    module = str(getattr(getattr(type(thing), "set_epoch", None), "__module__", ""))
    is_known = module.partition(".")[0] in ("torch", *_LIGHTNING) or _attribute(thing, "shares_out")
    return _takes_epochs(thing) and not is_known


def _samplers(everything: list[object]) -> list[object]:
    """Return the samplers among ``everything``, and what they hold that is neither a dataset nor a loader."""
    called = [_attribute(thing, name) for thing in everything for name in ("sampler", "batch_sampler")]
    roots = [thing for thing in (*everything, *called) if isinstance(thing, Sampler)] + called
    found = {id(thing): thing for root in roots for thing in _below(root, stop_at=(Dataset, DataLoader))}
    return [thing for thing in found.values() if not isinstance(thing, (Dataset, DataLoader))]


def _says_that_it_shuffles(thing: object) -> bool:
    shuffle = _attribute(thing, "shuffle")
    return isinstance(shuffle, (bool, int, np.bool_)) and bool(shuffle)
