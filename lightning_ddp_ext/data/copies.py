"""Copy a user's object without the methods of its class that are meant for pickling."""

from __future__ import annotations

from typing import Any, TypeVar

from lightning_ddp_ext.data.proxy import Proxy

T = TypeVar("T")


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
