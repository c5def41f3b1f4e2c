"""Saves in the background keep their order, bound their memory, and report their errors once."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ddp_ext.checkpoint.async_save import Saver
from tests.checkpoint.content import numbers
from tests.harness.outcomes import output_of_all
from tests.harness.ranks import launch_ranks


class Disk:
    """Where a Saver writes; holds one path until it is let go, and fails for others. Leaves no thread behind."""

    def __init__(self, held: str = "", failing: tuple[str, ...] = ()) -> None:
        self.events: list[str] = []
        self.contents: dict[str, Any] = {}
        self.held = held
        self.failing = failing
        self.reached, self.let_go = threading.Event(), threading.Event()
        self.saver = Saver()

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go.set()
        self.saver.join()
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ddpx")]

    def save(self, path: str, x: Any = None) -> None:
        self.saver.save_later(path, {"x": numbers(1) if x is None else x}, lambda content: self.write(content, path))

    def write(self, checkpoint: Any, path: str) -> None:
        if path == self.held:
            self.reached.set()
            assert self.let_go.wait(60)
        if path in self.failing:
            self.events.append(f"failed {path}")
            raise OSError(f"no room for {path}")
        self.contents[path] = checkpoint["x"].tolist()
        self.events.append(f"wrote {path}")

    def remove(self, path: str) -> None:
        self.saver.follow_up(path, lambda: self.events.append(f"removed {path}"), later=True, postpone=True)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=8))
def test_saves_and_removals_keep_their_order(calls: list[tuple[bool, bool]]) -> None:
    """Jobs run in the order of the calls; removals wait for a save that succeeds; the first error is raised."""
    failing = tuple(str(number) for number, (is_save, fails) in enumerate(calls) if is_save and fails)
    expected, postponed, has_failed = list[str](), list[str](), False
    with Disk(failing=failing) as it:
        for number, (is_save, fails) in enumerate(calls):
            if is_save:
                it.save(str(number))
                expected.append(f"{'failed' if fails else 'wrote'} {number}")
                has_failed = fails
            else:
                it.remove(str(number))
                postponed.append(f"removed {number}")
            if not has_failed:
                expected += postponed
                postponed.clear()
        if failing:
            with pytest.raises(OSError, match=rf"^no room for {failing[0]}$"):
                it.saver.wait()
        it.saver.wait()
    assert it.events == expected


def test_a_checkpoint_that_outlived_a_failed_save_is_not_removed_once_it_is_saved_again() -> None:
    with Disk(failing=("next",)) as it:
        it.save("next")
        it.remove("last")
        it.save("last")
        with pytest.raises(OSError, match="no room"):
            it.saver.wait()
    assert it.events == ["failed next", "wrote last"]


def test_training_continues_with_one_snapshot_at_a_time() -> None:
    """A save returns before the write finishes; the next one waits for that, and then takes its copy."""
    x = numbers(5)
    with Disk(held="first") as it:
        it.save("first", x)
        assert it.reached.wait(60)
        x.fill_(-1)
        other = threading.Thread(target=it.save, args=("second", x))
        other.start()
        other.join(0.05)
        assert other.is_alive()
        x.fill_(7)
        it.let_go.set()
        other.join(60)
        it.saver.wait()
    assert it.events == ["wrote first", "wrote second"]
    assert it.contents == {"first": [0, 1, 2, 3, 4], "second": [7] * 5}


def fail(content: Any) -> None:
    raise OSError("no room")


def save_and_exit(rank: int, world_size: int) -> None:
    Saver().save_later("it.ckpt", {"x": 1}, fail)


def fork(rank: int, world_size: int) -> None:
    process = multiprocessing.get_context("fork").Process(target=save_and_exit, args=(rank, world_size))
    process.start()
    process.join()


@pytest.mark.parametrize("work", [save_and_exit, fork])
def test_an_error_that_is_not_raised_is_logged(work: Callable[[int, int], None]) -> None:
    """The process logs it at its end, after it has waited for the save, also if multiprocessing forked it."""
    assert output_of_all(launch_ranks(work, 1)).count("no room") == 1
