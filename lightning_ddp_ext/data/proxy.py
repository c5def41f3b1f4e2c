"""Show an object to others by a proxy: of its class and with its attributes, but iterated over in another way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any


class Proxy:
    """What :func:`show` returns; each class of objects has a subclass."""

    __slots__ = ("_ddpx_iterable", "_ddpx_own")
    _ddpx_iterable: Any
    _ddpx_own: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return another object like the one that is shown: Lightning makes some by ``type(loader)(...)``."""
        return cls.__bases__[-1](*args, **kwargs)

    def __init_subclass__(cls) -> None:
        """Leave out what the object's class does for subclasses that its users write."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ddpx_iterable)

    def __len__(self) -> int:
        return len(self._ddpx_iterable)

    def __bool__(self) -> bool:
        return True  # without asking for a length, which streams do not have

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return copy.copy, (self._ddpx_own,)  # a copy is detached from the training run


class _Delegating(Proxy):
    """Of an object that keeps its attributes elsewhere than in a ``__dict__``, such as a list."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._ddpx_own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ddpx_own, name, value)


def show(own: Any, iterable: Any) -> Any:
    """Return a proxy of ``own`` that is iterated over as ``iterable`` is, and has its length.

    The proxy is of the class of ``own`` and shares its ``__dict__``, so that whatever one of them sets, both have. For
    an object without a ``__dict__``, or with more than that, it is of a class of the same name, and delegates.

    >>> class Loader:
    ...     batch_size = 2
    >>> own = Loader()
    >>> shown = show(own, range(3))
    >>> shown.batch_size = 4
    >>> isinstance(shown, Loader), own.batch_size, list(shown), list(show([1], "ab"))
    (True, 4, [0, 1, 2], ['a', 'b'])
    """
    kind: type = _proxy_class(type(own))  # type: ignore[arg-type]
    proxy: Any = object.__new__(kind)
    attributes = {"_ddpx_own": own} if issubclass(kind, _Delegating) else vars(own)  # where `data.epochs` finds it
    for name, value in (("_ddpx_own", own), ("_ddpx_iterable", iterable), ("__dict__", attributes)):
        object.__setattr__(proxy, name, value)
    return proxy


def iterable_of(shown: object) -> Any:
    """Return the ``iterable`` of a proxy; ``None`` for another object."""
    return shown._ddpx_iterable if isinstance(shown, Proxy) else None


@cache
def _proxy_class(own: type) -> type:
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    if own.__dictoffset__:
        try:
            return type(own.__name__, (Proxy, own), names)
        except TypeError:  # instances have slots, or are of C
            pass
    return type(own.__name__, (_Delegating,), names)
