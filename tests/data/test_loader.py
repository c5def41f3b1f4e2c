"""A wrapped loader is the loader that it wraps, except that a pass over it begins when its first batch is asked for."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ddp_ext.data.loader import (
    DistributedLoader,
    LazyIterator,
    forget_workers,
    index_sampler_of,
    is_stateful,
    own_copy,
    set_index_sampler,
)


class Stream(IterableDataset[int]):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


class Processes(Dataset[int]):
    """Each sample is the process that read it."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return os.getpid()


class Stateful:
    """A loader with a state of its own, as far as its names tell."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Begun:
    """Reads the loader, and writes down which passes were begun."""

    def __init__(self) -> None:
        self.passes: list[tuple[DistributedLoader, LazyIterator]] = []

    def __call__(self, loader: DistributedLoader, iterator: LazyIterator) -> Iterator[Any]:
        self.passes.append((loader, iterator))
        return iter(loader.loader)


def read(loader: DistributedLoader, iterator: LazyIterator) -> Iterator[Any]:
    return iter(loader.loader)


def test_an_iterator_that_nobody_reads_begins_nothing() -> None:
    """A pass begins with its first batch, and not with its iterator."""
    begun = Begun()
    loader = DistributedLoader([1, 2, 3], begun)
    unused, used = iter(loader), iter(loader)
    assert begun.passes == []
    assert next(used) == 1
    assert begun.passes == [(loader, used)]
    assert [*used] == [2, 3]
    assert len(begun.passes) == 1
    assert next(unused) == 1
    assert len(begun.passes) == 2


def test_a_pass_that_was_started_by_hand_is_not_begun_again() -> None:
    """``begin`` begins the pass without a batch, once, and reading goes on with that pass."""
    begun = Begun()
    iterator = iter(DistributedLoader([1, 2, 3], begun))
    assert isinstance(iterator, LazyIterator)
    assert iterator.begin() is iterator.begin()
    assert [*iterator] == [1, 2, 3]
    assert len(begun.passes) == 1


def test_a_pass_that_has_ended_stays_ended() -> None:
    """Asking on after the last batch begins nothing, also where there was no batch at all."""
    for batches in ([], [1]):
        begun = Begun()
        iterator = iter(DistributedLoader(batches, begun))
        assert [*iterator] == batches
        assert [*iterator] == []
        assert len(begun.passes) == 1


def test_a_pass_that_cannot_begin_is_begun_again_when_it_is_asked_again() -> None:
    """An error in beginning a pass is the reader's, each time that it asks."""
    errors = iter([ValueError("no data"), None])

    def begin(loader: DistributedLoader, iterator: LazyIterator) -> Iterator[Any]:
        error = next(errors)
        if error is not None:
            raise error
        return iter(loader.loader)

    iterator = iter(DistributedLoader([1, 2], begin))
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
        len(DistributedLoader(DataLoader(Stream()), read))


def test_attributes_are_the_loaders() -> None:
    """What is not the wrapper's own is read from the loader and written to it; the user's own loader stays as it is."""
    source = DataLoader(range(6), batch_size=2)
    loader = DistributedLoader(source, read)
    loader.timeout, loader.hint = 3, "ours"
    loader.position, loader.length = "here", 7
    assert loader.batch_size == 2
    assert loader.dataset is source.dataset
    assert (loader.loader.timeout, loader.loader.hint, loader.timeout, loader.hint) == (3, "ours", 3, "ours")
    assert (source.timeout, hasattr(source, "hint")) == (0, False)
    assert (loader.position, len(loader), hasattr(loader.loader, "position")) == ("here", 7, False)


def test_copies_of_a_wrapper_are_the_loader() -> None:
    """A copy, and a pickle, belong to nobody's training: they are what is wrapped."""
    loader = DistributedLoader(DataLoader(range(4), batch_size=2), read)
    for each in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert type(each) is DataLoader
        assert [batch.tolist() for batch in each] == [[0, 1], [2, 3]]


def test_what_keeps_a_state_and_what_is_no_dataloader_is_read_itself() -> None:
    """Only a ``DataLoader`` is copied: the owner of any other loader goes on asking it for its state."""
    plain, stateful, loader = [1, 2], Stateful(), DataLoader(range(3))
    assert own_copy(plain) is plain
    assert own_copy(stateful) is stateful
    assert own_copy(loader) is not loader
    assert DistributedLoader(stateful, read).loader is stateful
    assert (DistributedLoader(loader, read).source, is_stateful(loader), is_stateful(stateful)) == (loader, False, True)
    wrapped = DistributedLoader.around(stateful, read)
    assert is_stateful(type(wrapped))  # where Lightning looks, from Python 3.12 on
    assert not is_stateful(DistributedLoader.around(plain, read))


def test_a_copy_has_workers_of_its_own() -> None:
    """Persistent workers of the user's loader go on; those of the copy are others, kept until forgotten."""
    source = DataLoader(Processes(), num_workers=1, persistent_workers=True)
    own = own_copy(source)
    theirs, ours, again = _process(source), _process(own), _process(own)
    forget_workers(own)
    later, at_last = _process(own), _process(source)
    forget_workers(own)
    forget_workers(source)
    assert ours == again
    assert theirs == at_last
    assert len({os.getpid(), theirs, ours, later}) == 4


def _process(loader: DataLoader[int]) -> int:
    (process,) = {int(process) for process in loader}
    return process


@pytest.mark.parametrize("batch_size", [2, None])
def test_the_index_sampler_of_a_copy_can_be_replaced(batch_size: int | None) -> None:
    """The batch sampler, or without batches the sampler, says what is read; the user's loader reads what it read."""
    source = DataLoader(torch.arange(6), batch_size=batch_size)  # type: ignore[arg-type]
    own = own_copy(source)
    expected = [each.tolist() for each in source]
    assert [*index_sampler_of(own)] == ([0, 1, 2, 3, 4, 5] if batch_size is None else [[0, 1], [2, 3], [4, 5]])
    replacement = [5, 3] if batch_size is None else [[5, 3], [1]]
    set_index_sampler(own, replacement)
    assert index_sampler_of(own) is replacement
    assert ([each.tolist() for each in own], len(own)) == (replacement, 2)
    assert [each.tolist() for each in source] == expected
