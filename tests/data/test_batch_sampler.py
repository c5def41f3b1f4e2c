"""A skipping sampler leaves out the first items of another sampler, for one pass, and is otherwise that sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler

from lightning_ddp_ext.data.batch_sampler import PermanentBatchSampler
from lightning_ddp_ext.data.loader import forget_workers, set_index_sampler


class Telling(Sampler[int]):
    """Writes down what is drawn from it."""

    def __init__(self, log: list[Any], length: int = 4) -> None:
        self.log = log
        self.length = length

    def __iter__(self) -> Iterator[int]:
        self.log.append("order")
        for index in range(self.length):
            self.log.append(index)
            yield index

    def __len__(self) -> int:
        return self.length


@settings(max_examples=40, deadline=None)
@given(length=st.integers(0, 12), skips=st.lists(st.integers(0, 14), max_size=4))
def test_each_pass_leaves_out_as_many_items_as_it_was_told(length: int, skips: list[int]) -> None:
    """What is left is the end of the whole order, and nothing where more is left out than there is."""
    sampler = PermanentBatchSampler(range(length))
    for skip in skips:
        sampler.skip(skip)
        assert [*sampler] == [*range(length)][skip:]
        assert len(sampler) == length
        sampler.skip(0)
        assert [*sampler] == [*range(length)]


def test_all_iterators_of_a_pass_begin_at_its_position() -> None:
    """A loader with workers makes two iterators and reads one: both skip."""
    sampler = PermanentBatchSampler("abcd")
    sampler.skip(2)
    unused, used = iter(sampler), iter(sampler)
    assert [*used] == ["c", "d"]
    assert [*unused] == ["c", "d"]


def recording(log: list[Any]) -> Callable[[], Any]:
    @contextmanager
    def generators() -> Iterator[None]:
        log.append("then")
        yield
        log.append("now")

    return generators


def test_the_random_numbers_of_then_are_used_for_what_is_left_out_alone() -> None:
    """The context is entered while the order is drawn and items are left out, and left before an item is read."""
    log: list[Any] = []
    sampler = PermanentBatchSampler(Telling(log))
    sampler.skip(2, generators=recording(log))
    assert [*sampler] == [2, 3]
    assert log == ["then", "order", 0, 1, "now", 2, 3]
    sampler.skip(0)
    assert [*sampler] == [0, 1, 2, 3]
    assert log.count("then") == 1


def test_attributes_are_the_wrapped_samplers() -> None:
    """A batch size, a policy or a method is found through the wrapper; what is missing is missing in the sampler."""
    wrapped = BatchSampler(SequentialSampler(range(5)), 2, drop_last=True)
    sampler = PermanentBatchSampler(wrapped)
    assert (sampler.batch_size, sampler.drop_last, sampler.sampler) == (2, True, wrapped.sampler)
    assert (sampler.batch_sampler, len(sampler)) == (wrapped, 2)
    with pytest.raises(AttributeError, match="'BatchSampler' object has no attribute 'nothing'"):
        sampler.nothing  # noqa: B018


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_enters_each_pass_where_it_is_told(workers: int) -> None:
    """Also one whose persistent workers keep the sampler of the first pass for good."""
    loader = DataLoader(range(10), 2, num_workers=workers, persistent_workers=workers > 0)
    sampler = PermanentBatchSampler(loader.batch_sampler)  # type: ignore[arg-type]
    set_index_sampler(loader, sampler)
    read = []
    for skip in (3, 0, 4, 5, 0):
        sampler.skip(skip)
        read.append([int(number) for batch in loader for number in batch])
    forget_workers(loader)
    assert read == [[*range(2 * skip, 10)] for skip in (3, 0, 4, 5, 0)]


def test_the_last_item_is_repeated_up_to_a_length() -> None:
    """A spare one, where there is none to repeat; attributes and batches stay the wrapped sampler's."""
    own = BatchSampler(SequentialSampler(range(5)), 2, False)
    padded: Any = PermanentBatchSampler(own, padded_to=5)
    assert list(padded) == [[0, 1], [2, 3], [4], [4], [4]]
    assert (len(padded), padded.sampler, padded.batch_size) == (5, own.sampler, 2)
    assert list(PermanentBatchSampler([], padded_to=2, spare=7)) == [7, 7]
    assert list(PermanentBatchSampler([1], padded_to=2, spare=7)) == [1, 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_reads_repeated_batches_again_and_again(workers: int) -> None:
    """Put into a loader that exists already, with workers too."""
    loader = DataLoader(range(3), 2, num_workers=workers)  # type: ignore[arg-type]
    set_index_sampler(loader, PermanentBatchSampler(loader.batch_sampler, padded_to=3))  # type: ignore[arg-type]
    assert [[batch.tolist() for batch in loader] for _ in range(2)] == [[[0, 1], [2], [2]]] * 2
    assert len(loader) == 3
