"""Show an object to others by a proxy: of its class and with its attributes, but iterated over in another way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any


class Proxy:
    """Base of the proxies that :func:`show` returns; each class of objects has a subclass."""

    __slots__ = ("_ddpx_iterable", "_ddpx_own")
    _ddpx_iterable: Any
    _ddpx_own: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make another object like the one that is shown: Lightning makes some by ``type(loader)(...)``."""
        return cls.__bases__[-1](*args, **kwargs)

    def __init_subclass__(cls) -> None:
        """Skip the subclass hook of the object's class, which is for subclasses that users write."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ddpx_iterable)

    def __len__(self) -> int:
        return len(self._ddpx_iterable)

    def __bool__(self) -> bool:
        return True  # without calling ``__len__``, which streams lack

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return copy.copy, (self._ddpx_own,)  # a copy is detached from the training run


def show(own: Any, iterable: Any) -> Any:
    """Return a proxy of ``own`` that is iterated over as ``iterable`` is, and has its length.

    The proxy is of the class of ``own`` and shares its ``__dict__``, so that both see the same attributes.
    If a class does not allow such a proxy, as ``list`` does not, the proxy only has its name.

    >>> class Loader:
    ...     batch_size = 2
    >>> own = Loader()
    >>> shown = show(own, range(3))
    >>> shown.batch_size = 4
    >>> isinstance(shown, Loader), own.batch_size, list(shown), list(show([1], "ab"))
    (True, 4, [0, 1, 2], ['a', 'b'])
    """
    proxy: Any = object.__new__(_proxy_class(type(own)))  # type: ignore[arg-type]
    attributes = getattr(own, "__dict__", {"_ddpx_own": own})  # where `data.epochs` finds it
    for name, value in (("_ddpx_own", own), ("_ddpx_iterable", iterable), ("__dict__", attributes)):
        object.__setattr__(proxy, name, value)
    return proxy


def iterable_of(shown: object) -> Any:
    """Return the ``iterable`` of a proxy; ``None`` for another object."""
    return shown._ddpx_iterable if isinstance(shown, Proxy) else None


@cache
def _proxy_class(own: type) -> type:
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    try:
        return type(own.__name__, (Proxy, own) if own.__dictoffset__ else (Proxy,), names)
    except TypeError:  # instances also have slots, or are implemented in C
        return type(own.__name__, (Proxy,), names)
