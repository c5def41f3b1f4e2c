"""Saves in the background keep their order, bound their memory, and report their errors once."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ddp_ext.checkpoint.async_save import Saver
from tests.checkpoint.content import numbers


class Disk:
    """Writes for a Saver; holds one path until it is let go, and fails for others."""

    def __init__(self, held: str = "", failing: tuple[str, ...] = ()) -> None:
        self.events: list[str] = []
        self.contents: dict[str, Any] = {}
        self.held = held
        self.failing = failing
        self.reached, self.let_go = threading.Event(), threading.Event()

    def write(self, checkpoint: Any, path: str) -> None:
        if path == self.held:
            self.reached.set()
            assert self.let_go.wait(20)
        if path in self.failing:
            self.events.append(f"failed {path}")
            raise OSError(f"no room for {path}")
        self.contents[path] = checkpoint["x"].clone()
        self.events.append(f"wrote {path}")

    def removal(self, path: str) -> Callable[[], None]:
        return lambda: self.events.append(f"removed {path}")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ddpx")]


class Writer(Saver):
    """Saves to such a disk."""

    def __init__(self, disk: Disk) -> None:
        super().__init__()
        self.disk = disk

    def write(self, checkpoint: Any, path: str) -> None:
        self.save_later(path, checkpoint, lambda content: self.disk.write(content, path))


@contextmanager
def writer_on(disk: Disk) -> Iterator[Writer]:
    """Whatever the test does, the thread has ended afterwards."""
    writer = Writer(disk)
    try:
        yield writer
    finally:
        disk.let_go.set()
        writer.join()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=8))
def test_saves_and_removals_keep_their_order(calls: list[tuple[bool, bool]]) -> None:
    """All is done in the order of the calls, but for removals after a save that failed; its error is told once."""
    failing = tuple(str(number) for number, (_, fails) in enumerate(calls) if fails)
    disk, expected, has_failed = Disk(failing=failing), [], False
    with writer_on(disk) as writer:
        for number, (is_save, fails) in enumerate(calls):
            if is_save:
                writer.write({"x": numbers(3)}, str(number))
                expected.append(f"{'failed' if fails else 'wrote'} {number}")
                has_failed = fails
            else:
                writer.follow_up(str(number), disk.removal(str(number)), later=True)
                expected += [] if has_failed else [f"removed {number}"]
        failed = [event.split()[1] for event in expected if event.startswith("failed")]
        if failed:
            with pytest.raises(OSError, match=rf"^no room for {failed[0]}$"):
                writer.wait()
        writer.wait()
    assert disk.events == expected
    assert threads() == []


def test_a_kept_checkpoint_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A removal that is left out, because its successor could not be written, is logged with its path."""
    saver, disk = Saver(), Disk(failing=("new",))
    with pytest.raises(OSError, match="no room"):
        saver.save("new", lambda: disk.write({}, "new"))
    assert saver.failed == {"new"}
    with caplog.at_level(logging.WARNING):
        saver.follow_up("old", disk.removal("old"), later=False)
    assert caplog.messages == ["leaving checkpoint old as it is: the save before has failed"]
    saver.save("new", lambda: None)
    assert saver.failed == set()
    saver.follow_up("old", disk.removal("old"), later=False)
    assert disk.events == ["failed new", "removed old"]


def test_training_goes_on_while_it_is_written() -> None:
    """A save returns before the write has ended; what changes afterwards is not in the file."""
    disk, x = Disk(held="first"), numbers(5)
    with writer_on(disk) as writer:
        writer.write({"x": x}, "first")
        assert disk.reached.wait(20)
        x.zero_()
        assert disk.events == []
        disk.let_go.set()
        writer.wait()
    assert disk.contents["first"].tolist() == [0, 1, 2, 3, 4]


def test_one_snapshot_at_a_time() -> None:
    """Who saves while the last checkpoint is still being written waits for that, and takes its own copy after it."""
    disk, x = Disk(held="first"), numbers(5)
    second_began, second_taken = threading.Event(), threading.Event()

    def save_again() -> None:
        second_began.set()
        writer.write({"x": x}, "second")
        second_taken.set()

    with writer_on(disk) as writer:
        writer.write({"x": x}, "first")
        assert disk.reached.wait(20)
        other = threading.Thread(target=save_again)
        other.start()
        assert second_began.wait(20)
        assert not second_taken.wait(0.05)
        x.fill_(7)
        disk.let_go.set()
        other.join(20)
        writer.wait()
    assert disk.events == ["wrote first", "wrote second"]
    assert disk.contents["first"].tolist() == [0, 1, 2, 3, 4]
    assert disk.contents["second"].tolist() == [7] * 5


def test_an_error_is_told_once() -> None:
    """The first of several errors comes with the next question, and only then."""
    disk = Disk(failing=("a", "b"))
    with writer_on(disk) as writer:
        for path in ("a", "b", "c"):
            writer.write({"x": numbers(1)}, path)
        with pytest.raises(OSError, match=r"^no room for a$"):
            writer.wait()
        writer.raise_error()
        writer.wait()
    assert disk.events == ["failed a", "failed b", "wrote c"]


def test_what_cannot_be_pickled_stops_nobody() -> None:
    """Its error is raised at once, nothing is written, and the next save is done."""
    disk = Disk()
    with writer_on(disk) as writer:
        with pytest.raises(AttributeError, match="lambda"):
            writer.write({"x": lambda: None}, "bad")
        writer.write({"x": numbers(1)}, "good")
        writer.wait()
    assert disk.events == ["wrote good"]


def test_waiting_ends_the_thread_and_it_can_begin_again() -> None:
    """Before the first save and after a wait there is no thread; another save starts one."""
    disk = Disk()
    with writer_on(disk) as writer:
        writer.wait()
        for path in ("first", "second"):
            assert threads() == []
            writer.write({"x": numbers(1)}, path)
            writer.wait()
        assert threads() == []
    assert disk.events == ["wrote first", "wrote second"]


@pytest.mark.parametrize("waits_again", [False, True])
def test_an_interrupted_wait_loses_nothing(waits_again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C in a wait, what was saved before and what is saved later is written, in order."""
    disk, join = Disk(held="first"), threading.Thread.join

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    with writer_on(disk) as writer:
        writer.write({"x": numbers(1)}, "first")
        monkeypatch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.wait()
        with pytest.raises(KeyboardInterrupt):
            writer.wait()
        monkeypatch.setattr(threading.Thread, "join", join)
        disk.let_go.set()
        if waits_again:
            writer.wait()
            assert disk.events == ["wrote first"]
        for path in ("second", "third"):
            writer.write({"x": numbers(1)}, path)
        writer.wait()
    assert disk.events == ["wrote first", "wrote second", "wrote third"]
    assert threads() == []


def test_several_threads_may_save() -> None:
    """Each checkpoint is written with the content that it was given, whoever gives it."""
    disk = Disk()
    with writer_on(disk) as writer:

        def save(name: int) -> None:
            writer.write({"x": numbers(9) + name}, str(name))

        savers = [threading.Thread(target=save, args=(name,)) for name in range(12)]
        for saver in savers:
            saver.start()
        for saver in savers:
            saver.join()
        writer.wait()
    assert sorted(disk.contents, key=int) == [str(name) for name in range(12)]
    assert all((content == numbers(9) + int(path)).all() for path, content in disk.contents.items())


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
@pytest.mark.parametrize("starts", [False, True])
def test_a_thread_that_cannot_be_started_holds_nobody_up(
    error: BaseException, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system refuses a thread, or Ctrl-C comes just then, that save fails, and the next one is done."""
    disk, start = Disk(), threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        if starts:
            start(self)
        raise error

    with writer_on(disk) as writer:
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(type(error)):
            writer.write({"x": numbers(1)}, "first")
        monkeypatch.setattr(threading.Thread, "start", start)
        saves = threading.Thread(target=writer.write, args=({"x": numbers(1)}, "second"))
        saves.start()
        saves.join(20)
        assert not saves.is_alive(), "it waits for ever"
        writer.wait()
    assert disk.events == ["wrote second"]


def test_a_writer_that_nobody_needs_any_more_frees_its_memory() -> None:
    """Though it would be waited for at the process's end, if it were still there."""
    disk = Disk()
    writer = Writer(disk)
    writer.write({"x": numbers(9)}, "a")
    writer.wait()
    gone = weakref.ref(writer)
    del writer
    gc.collect()
    assert gone() is None
