"""Objects with other methods are otherwise, and in copies, what they were."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from lightning_ddp_ext.data.disguise import disguise, undisguise
from lightning_ddp_ext.integration.watching import Watch


class Plain:
    def __init__(self) -> None:
        self.items = [1, 2]

    def __iter__(self) -> Any:
        return iter(self.items)


class Slots:
    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items = [1, 2]

    def __iter__(self) -> Any:
        return iter(self.items)


class Frozen(Plain):
    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, "items"):
            raise AttributeError(name)
        super().__setattr__(name, value)


@pytest.mark.parametrize("kind", [Plain, Slots, Frozen])
def test_copies_and_pickles_are_of_the_own_class(kind: type) -> None:
    """A disguised object is an instance of its class and does something else; its copies do not."""
    thing: Any = kind()
    disguise(thing, {"__iter__": lambda self: iter("ab")})
    assert type(thing).__mro__[1] is kind
    assert list(thing) == ["a", "b"]
    copies: list[Any] = [copy.copy(thing), copy.deepcopy(thing), pickle.loads(pickle.dumps(thing))]
    for same in copies:
        assert type(same) is kind
        assert list(same) == [1, 2]
    assert list(thing) == ["a", "b"]
    undisguise(thing)
    assert type(thing) is kind


@pytest.mark.parametrize("kind", [Plain, Slots, Frozen])
def test_a_watched_loader_says_when_it_is_iterated_over(kind: type) -> None:
    """Once for each iterator, until the watch ends; a second watch takes the first one's place."""
    seen: list[object] = []
    thing: Any = kind()
    first, watch = Watch(lambda _: seen.append("first")), Watch(seen.append)
    first.add(thing)
    watch.add(thing)
    assert list(thing) == list(thing) == [1, 2]
    assert seen == [thing, thing]
    assert watch.end() == [thing]
    assert list(thing) == [1, 2]
    assert len(seen) == 2
    assert type(thing) is kind


def test_what_has_no_class_of_its_own_is_left_alone() -> None:
    """A list of batches stays a list."""
    watch = Watch(lambda _: None)
    watch.add([1, 2])
    assert watch.end() == []
