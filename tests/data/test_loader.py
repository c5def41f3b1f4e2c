"""A wrapped loader is the loader that it wraps, except that a pass over it begins when its first batch is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_ddp_ext.data.loader import DistributedLoader, LazyIterator


def test_a_pass_begins_with_its_first_batch() -> None:
    """Not with its iterator, and once, also where it was begun by hand; a pass that has ended stays ended."""
    passes = []

    def begin(loader: DistributedLoader, iterator: LazyIterator) -> Iterator[Any]:
        passes.append(iterator)
        return iter(loader.loader)

    loader = DistributedLoader([1, 2, 3], begin)
    _, read, by_hand = iter(loader), iter(loader), iter(loader)
    assert passes == []
    assert isinstance(by_hand, LazyIterator)
    assert by_hand.begin() is by_hand.begin()
    assert [*read] == [*by_hand] == [1, 2, 3]
    assert [*read] == [*by_hand] == []
    assert passes == [by_hand, read]


def test_attributes_are_the_loaders() -> None:
    """Reading and writing reach our copy of the loader, but for the wrapper's own; the user's loader stays as it is."""
    source = DataLoader(range(6), batch_size=2)
    loader = DistributedLoader(source, lambda loader, iterator: iter(loader.loader))
    loader.timeout, loader.hint, loader.position = 3, "ours", "here"
    assert (loader.batch_size, loader.dataset) == (2, source.dataset)
    assert (loader.loader.timeout, loader.loader.hint, loader.timeout, loader.hint) == (3, "ours", 3, "ours")
    assert (source.timeout, hasattr(source, "hint")) == (0, False)
    assert (loader.position, hasattr(loader.loader, "position")) == ("here", False)
