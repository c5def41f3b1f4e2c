"""Objects that do something else in some of their methods, and are otherwise, and in copies, what they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_OWN = "_ddpx_own"


def disguise(thing: object, methods: Mapping[str, Callable[..., Any]]) -> None:
    """Make an object an instance of a class made from its own, with other ``methods``; copies are of its own class.

    Args:
        thing: whatever has a Python class that can be extended.
        methods: by name.

    Raises:
        TypeError: its class is built in, or cannot be extended; or whatever that class raises.

    >>> class Greeting:
    ...     def __str__(self):
    ...         return "hello"
    >>> greeting = Greeting()
    >>> disguise(greeting, {"__str__": lambda self: "good-bye"})
    >>> str(greeting), isinstance(greeting, Greeting)
    ('good-bye', True)
    >>> undisguise(greeting)
    >>> str(greeting), type(greeting) is Greeting
    ('hello', True)
    """
    own: Any = own_class(thing)
    # No slots keep the memory layout, which a change of class needs. Methods come afterwards, because the metaclass of
    # torch's data pipes wraps an __iter__ that it finds, and theirs is wrapped already.
    names = {"__slots__": (), "__module__": own.__module__, "__qualname__": own.__qualname__, _OWN: own}
    made = type(own)(own.__name__, (own,), names)
    for name, method in methods.items():
        setattr(made, name, method)
    made.__reduce_ex__ = _reduced_as(own, made)
    object.__setattr__(thing, "__class__", made)


def undisguise(thing: object) -> None:
    """Give an object its own class back, if it has another."""
    if own_class(thing) is not type(thing):
        object.__setattr__(thing, "__class__", own_class(thing))


def own_class(thing: object) -> type:
    """The class of an object, below what it has been disguised as."""
    own: type = vars(type(thing)).get(_OWN, type(thing))
    return own


def _reduced_as(own: type, made: type) -> Callable[..., Any]:
    """Return a ``__reduce_ex__`` with which copies and pickles are of the object's own class."""

    def reduce(thing: object, protocol: Any) -> Any:
        object.__setattr__(thing, "__class__", own)
        try:
            reduced = thing.__reduce_ex__(protocol)
        finally:
            object.__setattr__(thing, "__class__", made)
        if isinstance(reduced, str):
            return reduced
        # pickle refuses copyreg.__newobj__, which it knows by its name, for a class that is not the object's.
        return (_call, reduced[:2], *reduced[2:])

    return reduce


def _call(function: Callable[..., object], arguments: tuple[object, ...]) -> object:
    return function(*arguments)
