"""Saves in the background copy one moment, keep their order, bound their memory, and
report their errors once.
"""

from __future__ import annotations

import io
import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ddp_ext.checkpoint.async_save import Saver
from lightning_ddp_ext.checkpoint.snapshot import Buffer, aligned
from tests.checkpoint.content import kinds, numbers, same, unusual
from tests.harness.outcomes import output_of_all
from tests.harness.ranks import launch_ranks

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")


class Disk:
    """Where a Saver writes; holds one path until it is let go, and fails for others.

    Leaves no thread behind.
    """

    def __init__(self, held: str = "", failing: tuple[str, ...] = ()) -> None:
        self.events: list[str] = []
        self.contents: dict[str, Any] = {}
        self.held = held
        self.failing = failing
        self.reached = threading.Event()
        self.let_go = threading.Event()
        self.saver = Saver()

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go.set()
        self.saver.join()
        assert not [
            thread.name for thread in threading.enumerate() if thread.name.startswith("ddpx")
        ]

    def save(self, path: str, x: Any = None) -> None:
        self.saver.save_later(
            path, {"x": numbers(1) if x is None else x}, lambda content: self.write(content, path)
        )

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
        self.saver.follow_up(
            path, lambda: self.events.append(f"removed {path}"), later=True, postpone=True
        )


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=8))
def test_saves_and_removals_keep_their_order(calls: list[tuple[bool, bool]]) -> None:
    """Jobs run in the order of the calls; removals wait for a save that succeeds; the
    first error is raised.
    """
    failing = tuple(
        str(number) for number, (is_save, fails) in enumerate(calls) if is_save and fails
    )
    expected = list[str]()
    postponed = list[str]()
    has_failed = False
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
    """A removal that waits for a save that succeeds is dropped if the save writes the
    same path.
    """
    with Disk(failing=("next",)) as it:
        it.save("next")
        it.remove("last")
        it.save("last")
        with pytest.raises(OSError, match="no room"):
            it.saver.wait()
    assert it.events == ["failed next", "wrote last"]


def fail(content: Any) -> None:
    raise OSError("no room")


def save_and_exit(rank: int, world_size: int) -> None:
    Saver().save_later("it.ckpt", {"x": 1}, fail)


def fork(rank: int, world_size: int) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=save_and_exit, args=(rank, world_size)
    )
    process.start()
    process.join()


@pytest.mark.parametrize("work", [save_and_exit, fork])
def test_an_error_that_is_not_raised_is_logged(work: Callable[[int, int], None]) -> None:
    """The process logs it at its end, after it has waited for the save, also if
    multiprocessing forked it.
    """
    assert output_of_all(launch_ranks(work, 1)).count("no room") == 1


def test_every_kind_of_tensor_is_taken() -> None:
    """The snapshot accepts what a save in the foreground accepts, and torch saves it
    exactly like the original.
    """
    original = kinds() | unusual()
    expected = kinds() | unusual()
    taken = Buffer().snapshot(original)
    for name, tensor in kinds().items():
        if tensor.layout == torch.strided and name != "expanded":
            original[name].detach().zero_()
    found = as_saved(taken())
    wanted = as_saved(expected)
    assert [name for name in wanted if not same(found[name], wanted[name])] == []


def as_saved(content: Any) -> Any:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_the_buffer_is_used_again() -> None:
    """New memory is allocated only for a snapshot that is larger than all before; views
    share one piece of it.
    """
    buffer = Buffer()
    sizes = list[int]()
    for length in (1000, 1000, 10, 999, 2000, 1000, 0):
        base = numbers(length)
        content = {"a": base, "again": base, "part": base[length // 2 :], "b": numbers(length // 2)}
        assert same(buffer.snapshot(content)(), content)
        sizes.append(buffer.size)
    small = aligned(4000) + aligned(2000)
    large = aligned(8000) + aligned(4000)
    assert sizes == [small] * 4 + [large] * 3
