"""A skipping sampler leaves out the first items of another sampler, for one pass, and is otherwise that sampler."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler

from lightning_ddp_ext.data.batch_sampler import SkippingSampler
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
    sampler = SkippingSampler(range(length))
    for skip in skips:
        sampler.skip(skip)
        assert [*sampler] == [*range(length)][skip:]
        assert len(sampler) == length
        sampler.skip(0)
        assert [*sampler] == [*range(length)]


def test_all_iterators_of_a_pass_begin_at_its_position() -> None:
    """A loader with workers makes two iterators and reads one: both skip."""
    sampler = SkippingSampler("abcd")
    sampler.skip(2)
    unused, used = iter(sampler), iter(sampler)
    assert [*used] == ["c", "d"]
    assert [*unused] == ["c", "d"]


def test_an_iterator_that_nobody_reads_draws_no_order() -> None:
    """Nothing is drawn before the first item is asked for, and then only as many as are left out and read."""
    log: list[Any] = []
    sampler = SkippingSampler(Telling(log))
    sampler.skip(2)
    iterator = iter(sampler)
    assert log == []
    assert next(iterator) == 2
    assert log == ["order", 0, 1, 2]


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
    sampler = SkippingSampler(Telling(log))
    sampler.skip(2, generators=recording(log))
    assert [*sampler] == [2, 3]
    assert log == ["then", "order", 0, 1, "now", 2, 3]
    sampler.skip(0)
    assert [*sampler] == [0, 1, 2, 3]
    assert log.count("then") == 1


def test_attributes_are_the_wrapped_samplers() -> None:
    """A batch size, a policy or a method is found through the wrapper; what is missing is missing in the sampler."""
    wrapped = BatchSampler(SequentialSampler(range(5)), 2, drop_last=True)
    sampler = SkippingSampler(wrapped)
    assert (sampler.batch_size, sampler.drop_last, sampler.sampler) == (2, True, wrapped.sampler)
    assert (sampler.batch_sampler, len(sampler)) == (wrapped, 2)
    with pytest.raises(AttributeError, match="'BatchSampler' object has no attribute 'nothing'"):
        sampler.nothing  # noqa: B018


def test_a_sampler_without_a_length_stays_without_one() -> None:
    """Asking for it is the error that it is without the wrapper."""
    with pytest.raises(TypeError):
        len(SkippingSampler(iter(range(3))))


def test_copies_begin_where_the_original_would() -> None:
    """Copies and pickled ones keep the sampler and the position."""
    sampler = SkippingSampler([[0, 1], [2, 3], [4]])
    sampler.skip(1)
    for each in (copy.copy(sampler), copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert [*each] == [[2, 3], [4]]
        each.skip(0)
        assert len([*each]) == 3
    assert [*sampler] == [[2, 3], [4]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_enters_each_pass_where_it_is_told(workers: int) -> None:
    """Also one whose persistent workers keep the sampler of the first pass for good."""
    loader = DataLoader(range(10), 2, num_workers=workers, persistent_workers=workers > 0)
    sampler = SkippingSampler(loader.batch_sampler)  # type: ignore[arg-type]
    set_index_sampler(loader, sampler)
    read = []
    for skip in (3, 0, 4, 5, 0):
        sampler.skip(skip)
        read.append([int(number) for batch in loader for number in batch])
    forget_workers(loader)
    assert read == [[*range(2 * skip, 10)] for skip in (3, 0, 4, 5, 0)]
