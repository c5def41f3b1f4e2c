"""Copy a user's object, or show it through a proxy of its class with another iterator."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


class Proxy:
    """Base class of the proxies that :func:`show` returns.

    Each class of shown objects has one subclass, of this class and of that one. Its
    methods serve what Lightning and users do with a loader:

    - They read and set attributes, which are the user's object's: both have the same
      ``__dict__``, so what only the proxy has is in slots.
    - They iterate it, and ask for its length: those of the iterable.
    - Lightning makes an object of the same class, ``type(loader)(...)``: one of the
      user's class, by ``__new__``.
    - They copy it, or send it to another process: a copy of the user's object, by
      ``__reduce_ex__``, since the iterable belongs to this process's training.
    """

    __slots__ = ("_ddpx_iterable", "_ddpx_own")
    _ddpx_own: Any  # the user's object
    _ddpx_iterable: Any  # what is iterated in its place
    _ddpx_class: type  # that of the user's object

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an object of the shown class for Lightning's ``type(loader)(...)``."""
        return cls._ddpx_class(*args, **kwargs)

    def __init_subclass__(cls) -> None:
        """Skip the hook of the object's class, which is for subclasses of users."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ddpx_iterable)

    def __len__(self) -> int:
        return len(self._ddpx_iterable)

    def __bool__(self) -> bool:
        return True  # calls no ``__len__``, which streams do not have

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return copy.copy, (self._ddpx_own,)


def show(own: Any, iterable: Any) -> Any:
    """Return a proxy of ``own`` whose iterator and length are those of ``iterable``.

    The proxy has the class of ``own`` and shares its ``__dict__``, so both have the
    same attributes. If the class does not allow such a proxy, as with ``list``, the
    proxy only has the name of the class.

    >>> class Loader:
    ...     batch_size = 2
    >>> own = Loader()
    >>> shown = show(own, range(3))
    >>> shown.batch_size = 4
    >>> isinstance(shown, Loader), own.batch_size, list(shown), list(show([1], "ab"))
    (True, 4, [0, 1, 2], ['a', 'b'])
    """
    own = own._ddpx_own if isinstance(own, Proxy) else own
    proxy: Any = object.__new__(_proxy_class(type(own)))  # type: ignore[arg-type]
    # An object without ``__dict__`` is put into one, for `data.epochs.all_below` to find.
    attributes = getattr(own, "__dict__", {"_ddpx_own": own})
    for name, value in (("_ddpx_own", own), ("_ddpx_iterable", iterable), ("__dict__", attributes)):
        object.__setattr__(proxy, name, value)
    return proxy


def iterable_of(shown: object) -> Any:
    """Return the ``iterable`` of a proxy; ``None`` for any other object."""
    return shown._ddpx_iterable if isinstance(shown, Proxy) else None


def copy_attributes(original: T) -> T:
    """Return an object of the same class with the same attributes.

    ``copy.copy`` would call ``__reduce__`` and ``__getstate__``, which may refuse, or
    leave out what cannot be sent to another process, such as a lock.

    >>> class Loader:
    ...     def __getstate__(self):
    ...         return {}
    >>> loader = Loader()
    >>> loader.lock = "a lock"
    >>> copy_attributes(loader).lock
    'a lock'
    """
    source: Any = original._ddpx_own if isinstance(original, Proxy) else original
    copied: T = object.__new__(type(source))
    state: Any = object.__getstate__(source)
    attributes, slots = state if isinstance(state, tuple) else (state, {})
    vars(copied).update(attributes or {})
    for name, value in slots.items():
        object.__setattr__(copied, name, value)
    return copied


@cache
def _proxy_class(own: type) -> type:
    """Return a subclass of ``Proxy`` and ``own``; of ``Proxy`` only if ``own`` allows none."""
    namespace = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "_ddpx_class": own,
    }
    try:
        return type(own.__name__, (Proxy, own) if own.__dictoffset__ else (Proxy,), namespace)
    except TypeError:  # instances also have slots, or are implemented in C
        return type(own.__name__, (Proxy,), namespace)
