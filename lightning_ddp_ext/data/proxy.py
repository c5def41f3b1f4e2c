"""Copy a loader, and show it with another iterator.

A loader is shown through a proxy, which has its class and attributes, but another
iterator: Lightning and users get a proxy of the loader, which iterates over ours. A
sampler is shown as well, while a copy of its loader reads other indices.

Loaders and samplers may have any class of the user's, so their type is ``Any``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from lightning_ddp_ext.data.inspection import index_sampler_of

T = TypeVar("T")


# Copies.


def copy_attributes(original: T) -> T:
    """Return an object of the same class with the same attributes.

    ``copy.copy`` would call ``__reduce__`` and ``__getstate__``, which may refuse, or
    leave out what cannot be sent to another process, such as a lock. Of a proxy, the
    original is copied.

    >>> class Loader:
    ...     def __getstate__(self):
    ...         return {}
    >>> loader = Loader()
    >>> loader.lock = "a lock"
    >>> copy_attributes(loader).lock
    'a lock'
    """
    source: Any = _without_proxy(original)
    copied: T = object.__new__(type(source))
    state: Any = object.__getstate__(source)  # a tuple if the class has slots
    attributes, slots = state if isinstance(state, tuple) else (state, {})
    vars(copied).update(attributes or {})
    for name, value in slots.items():
        object.__setattr__(copied, name, value)
    return copied


def own_copy(loader: Any) -> Any:
    """Return a copy of a ``DataLoader`` that can be changed and read independently.

    Other iterables are returned as they are, since nothing changes them.
    """
    if not isinstance(loader, DataLoader):
        return loader
    copied = copy_attributes(loader)
    forget_workers(copied)
    return copied


def forget_workers(loader: DataLoader[Any]) -> None:
    """Make the next iterator start new workers.

    Torch keeps the first iterator of persistent workers in this attribute, and has no
    public way to drop it. A subclass of ``DataLoader`` may refuse to set attributes, so
    its ``__setattr__`` is not called.
    """
    object.__setattr__(loader, "_iterator", None)


# Proxies.


class Proxy:
    """Base class of the proxies that :func:`show` returns.

    The class of a proxy inherits from this class and from the class of the original,
    which is a user's object. Lightning and users can do with a proxy what they do with
    a loader:

    - Read and set attributes. Both objects share one ``__dict__``, so that a change of
      one is a change of the other. What only the proxy has is kept in slots.
    - Iterate over it, and get its length. Both are those of the other iterable.
    - Create a loader by ``type(loader)(...)``. ``__new__`` returns one of the
      original's class.
    - Copy or pickle it. The result is a copy of the original, because the other
      iterable belongs to the training of this process.
    """

    __slots__ = ("_ddpx_iterable", "_ddpx_original")
    _ddpx_original: Any
    _ddpx_iterable: Any
    _ddpx_class: type  # of the original

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an object of the original's class; :func:`show` does not call this."""
        return cls._ddpx_class(*args, **kwargs)

    def __init_subclass__(cls) -> None:
        """Skip the original class's hook, which expects only subclasses of users."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ddpx_iterable)

    def __len__(self) -> int:
        return len(self._ddpx_iterable)

    def __bool__(self) -> bool:
        return True  # by default Python calls ``__len__``, which fails for streams

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return copy.copy, (self._ddpx_original,)


def show(original: Any, iterable: Any) -> Any:
    """Return a proxy of ``original`` whose iterator and length are those of ``iterable``.

    The proxy is an instance of the original's class, and both have the same attributes.
    If Python allows no such subclass, as with ``list``, the proxy only has the name of
    the class. A proxy of a proxy shows the same original.

    >>> class Loader:
    ...     batch_size = 2
    >>> original = Loader()
    >>> shown = show(original, range(3))
    >>> shown.batch_size = 4
    >>> isinstance(shown, Loader), original.batch_size, list(shown), list(show([1], "ab"))
    (True, 4, [0, 1, 2], ['a', 'b'])
    """
    original = _without_proxy(original)
    proxy: Any = object.__new__(_proxy_class(type(original)))  # type: ignore[arg-type]
    # An original without ``__dict__`` is put into one, where `inspection.all_below` finds it.
    attributes = getattr(original, "__dict__", {"_ddpx_original": original})
    # Users' classes may refuse to set attributes, as a DataLoader does.
    object.__setattr__(proxy, "_ddpx_original", original)
    object.__setattr__(proxy, "_ddpx_iterable", iterable)
    object.__setattr__(proxy, "__dict__", attributes)
    return proxy


def read_instead(loader: DataLoader[Any], items: Iterable[Any]) -> None:
    """Make one of our loaders read the indices in ``items``, and still show its own sampler.

    ``items`` stays in all epochs, because torch's persistent workers keep the sampler of
    the first iterator. It must return a new iterator each time, without side effects: for
    one iterator of a loader with workers, torch creates two, and reads the second.
    """
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    # A DataLoader refuses to change it.
    object.__setattr__(loader, name, show(index_sampler_of(loader), items))


def iterable_of(obj: object) -> Any:
    """Return the ``iterable`` of a proxy; ``None`` for any other object."""
    return obj._ddpx_iterable if isinstance(obj, Proxy) else None


@cache
def _proxy_class(original: type) -> type:
    """Return a subclass of ``Proxy`` and, if Python allows it, of the original class."""
    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "_ddpx_class": original,
    }
    try:
        return type(original.__name__, (Proxy, original), namespace)
    except TypeError:  # it has slots, is implemented in C, or cannot have subclasses
        return type(original.__name__, (Proxy,), namespace)


def _without_proxy(obj: Any) -> Any:
    return obj._ddpx_original if isinstance(obj, Proxy) else obj
