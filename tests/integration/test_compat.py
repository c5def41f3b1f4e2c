"""What is private to Lightning is read and replaced in one place, which says what is missing, and is put back."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from typing import Any

import pytest
from lightning.pytorch.loops.fit_loop import _FitLoop

from lightning_ddp_ext.integration import compat
from lightning_ddp_ext.integration.compat import ReplacedMethods
from lightning_ddp_ext.integration.timed_validation import TimedValidation
from tests.harness.training import make_trainer


class Owner:
    """An object with two methods, which is equal to another one that says the same."""

    def __init__(self, number: int) -> None:
        self.number = number

    def tell(self) -> int:
        return self.number

    def double(self) -> int:
        return 2 * self.number


class Heir(Owner):
    """Has its methods from another class."""


def test_a_replaced_method_is_that_of_one_object() -> None:
    """Another object of the class, and another method of the object, are what they were."""
    one, other = Heir(1), Heir(2)
    ReplacedMethods().replace(one, "tell", lambda: 10)
    assert (one.tell(), one.double(), other.tell()) == (10, 2, 2)


def test_all_methods_are_put_back_together() -> None:
    """Nothing of ours stays in any object: each copies, pickles and compares as before, once or often."""
    owners, replaced = [Heir(1), Owner(2)], ReplacedMethods()
    before = [dict(vars(owner)) for owner in owners]
    for _ in range(2):
        for owner in owners:
            replaced.replace(owner, "tell", lambda: 10)
            replaced.replace(owner, "double", lambda: 20)
            replaced.replace(owner, "double", lambda: 30)
        assert [(owner.tell(), owner.double()) for owner in owners] == [(10, 30)] * 2
        replaced.put_back()
        assert [vars(owner) for owner in owners] == before
    replaced.put_back()
    for each in (*owners, *copy.deepcopy(owners), *pickle.loads(pickle.dumps(owners))):
        assert (each.tell(), each.double()) == (each.number, 2 * each.number)


def test_a_replacement_can_call_the_method_that_it_replaces() -> None:
    """The class's own method is there all the time."""
    owner, replaced = Owner(3), ReplacedMethods()
    replaced.replace(owner, "tell", lambda: -type(owner).tell(owner))
    assert owner.tell() == -3
    replaced.put_back()
    assert owner.tell() == 3


def test_a_method_that_another_one_has_taken_away_is_no_error() -> None:
    """Two that replace the same method of an object leave nothing of either, in any order."""
    owner, first, second = Owner(1), ReplacedMethods(), ReplacedMethods()
    first.replace(owner, "tell", lambda: 10)
    second.replace(owner, "tell", lambda: 20)
    first.put_back()
    second.put_back()
    assert (owner.tell(), vars(owner)) == (1, {"number": 1})


def test_a_method_that_is_missing_is_named() -> None:
    """The error names the class, the method, the version of Lightning and the remedy, and nothing is replaced."""
    owner, replaced = Heir(1), ReplacedMethods()
    replaced.replace(owner, "tell", lambda: 10)
    with pytest.raises(ImportError, match=r"needs .*test_compat\.Heir\.forget, which \S+ \d\S* does not .*; install"):
        replaced.replace(owner, "forget", lambda: None)
    assert not hasattr(owner, "forget")
    replaced.put_back()
    assert owner.tell() == 1


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (compat.combined_loader_of, "_combined_loader"),
        (compat.iterators_of, "_combined_loader"),
        (compat.mode_of, "_mode"),
        (compat.fetcher_of, "_data_fetcher"),
        (compat.active_loop_of, "_active_loop"),
        (compat.results_of, "_results"),
    ],
)
def test_a_private_attribute_that_is_missing_is_named(read: Any, name: str) -> None:
    """With a Lightning that has it no more, the error says what was needed."""
    with pytest.raises(ImportError, match=rf"needs .*test_compat\.Owner\.{name}, which"):
        read(Owner(1))


def test_a_loop_without_loaders_has_no_iterators() -> None:
    """Before a loop has its loaders, there is nothing that it reads."""
    loop = _FitLoop(make_trainer("auto", devices=1))
    assert compat.combined_loader_of(loop) is None
    assert compat.iterators_of(loop) == []


def test_a_lightning_without_timed_validation_has_no_interval() -> None:
    """Older versions validate by no clock, and nobody looks for one."""
    assert compat.validation_interval_of(Owner(1)) is None
    assert compat.last_validation_of(Owner(1)) is None


@pytest.mark.parametrize(
    ("interval", "last"), [(None, 5.0), (timedelta(seconds=1), None)], ids=["without an interval", "before training"]
)
def test_ranks_do_not_wait_for_each_other_where_no_clock_decides(
    interval: timedelta | None, last: float | None
) -> None:
    """Nothing is sent, which without a process group would be an error, and Lightning's own time stays."""
    trainer = make_trainer("ddp", devices=2, val_check_interval=interval)
    if last is not None:
        compat.set_last_validation(trainer, last)
    TimedValidation().before_batch(trainer)
    assert (trainer.world_size, compat.last_validation_of(trainer)) == (2, last)


def test_a_single_rank_goes_by_lightnings_own_clock() -> None:
    """The time of its last validation stays what it was."""
    trainer = make_trainer("auto", devices=1, val_check_interval=timedelta(seconds=1))
    compat.set_last_validation(trainer, 5.0)
    TimedValidation().before_batch(trainer)
    assert compat.last_validation_of(trainer) == 5.0
