"""A wrapped loader is the loader that it wraps, except that a pass over it begins when its first batch is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_ddp_ext.data.batch_sampler import PermanentBatchSampler
from lightning_ddp_ext.data.loader import DistributedLoader, LazyIterator, forget_workers, set_index_sampler


class Begun:
    """Reads the loader, and writes down which passes were begun; the first ones may fail."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = [*errors]
        self.passes: list[LazyIterator] = []

    def __call__(self, loader: DistributedLoader, iterator: LazyIterator) -> Iterator[Any]:
        if self.errors:
            raise self.errors.pop()
        self.passes.append(iterator)
        return iter(loader.loader)


def read(loader: DistributedLoader, iterator: LazyIterator) -> Iterator[Any]:
    return iter(loader.loader)


def test_a_pass_begins_with_its_first_batch() -> None:
    """Not with its iterator, and once, also where it was begun by hand; a pass that has ended stays ended."""
    begun = Begun()
    loader = DistributedLoader([1, 2, 3], begun)
    _, read, by_hand = iter(loader), iter(loader), iter(loader)
    assert begun.passes == []
    assert isinstance(by_hand, LazyIterator)
    assert by_hand.begin() is by_hand.begin()
    assert [*read] == [*by_hand] == [1, 2, 3]
    assert [*read] == [*by_hand] == []
    assert begun.passes == [by_hand, read]


def test_a_pass_that_cannot_begin_is_begun_again_when_it_is_asked_again() -> None:
    """An error in beginning a pass is the reader's, each time that it asks."""
    iterator = iter(DistributedLoader([1, 2], Begun(ValueError("no data"))))
    with pytest.raises(ValueError, match="no data"):
        next(iterator)
    assert [*iterator] == [1, 2]


def test_the_length_is_the_loaders_unless_another_is_given() -> None:
    """The length follows the loader's, a given one replaces it, and a stream has none."""
    batches = [1, 2, 3]
    loader, shorter = DistributedLoader(batches, read), DistributedLoader(batches, read)
    shorter.length = 2
    batches.append(4)
    assert (len(loader), len(shorter)) == (4, 2)
    with pytest.raises(TypeError):
        len(DistributedLoader(iter(batches), read))


def test_attributes_are_the_loaders() -> None:
    """Reading and writing reach our copy of the loader, but for the wrapper's own; the user's loader stays as it is."""
    source = DataLoader(range(6), batch_size=2)
    loader = DistributedLoader(source, read)
    loader.timeout, loader.hint, loader.position = 3, "ours", "here"
    assert (loader.batch_size, loader.dataset) == (2, source.dataset)
    assert (loader.loader.timeout, loader.loader.hint, loader.timeout, loader.hint) == (3, "ours", 3, "ours")
    assert (source.timeout, hasattr(source, "hint")) == (0, False)
    assert (loader.position, hasattr(loader.loader, "position")) == ("here", False)


@settings(max_examples=40, deadline=None)
@given(length=st.integers(0, 12), skips=st.lists(st.integers(0, 14), max_size=4))
def test_each_pass_leaves_out_as_many_items_as_it_was_told(length: int, skips: list[int]) -> None:
    """What is left is the end of the whole order, in each iterator of the pass; a loader with workers makes two."""
    sampler = PermanentBatchSampler(range(length))
    for skip in [*skips, 0]:
        sampler.skip(skip)
        iterators = iter(sampler), iter(sampler)
        assert [[*each] for each in iterators] == [[*range(length)][skip:]] * 2
        assert len(sampler) == length


def test_the_last_item_is_repeated_up_to_a_length() -> None:
    """A spare one, where there is none to repeat; attributes and batches stay the wrapped sampler's."""
    own = BatchSampler(SequentialSampler(range(5)), 2, False)
    padded: Any = PermanentBatchSampler(own, padded_to=5)
    assert list(padded) == [[0, 1], [2, 3], [4], [4], [4]]
    assert (len(padded), padded.sampler, padded.batch_size) == (5, own.sampler, 2)
    with pytest.raises(AttributeError, match="'BatchSampler' object has no attribute 'nothing'"):
        padded.nothing  # noqa: B018
    assert list(PermanentBatchSampler([], padded_to=2, spare=7)) == [7, 7]
    assert list(PermanentBatchSampler([1], padded_to=2, spare=7)) == [1, 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_enters_each_pass_where_its_permanent_sampler_is_told(workers: int) -> None:
    """Also one whose persistent workers keep the sampler of the first pass for good."""
    loader = DataLoader(range(10), 2, num_workers=workers, persistent_workers=workers > 0)
    sampler = PermanentBatchSampler(loader.batch_sampler, padded_to=6)  # type: ignore[arg-type]
    set_index_sampler(loader, sampler)
    passes = []
    for skip in (3, 0, 4):
        sampler.skip(skip)
        passes.append([int(number) for batch in loader for number in batch])
    forget_workers(loader)
    assert passes == [[6, 7, 8, 9, 8, 9], [*range(10), 8, 9], [8, 9, 8, 9]]
    assert len(loader) == 6
