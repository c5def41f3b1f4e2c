"""Saves in the background copy one moment, keep their order, bound their memory, and
report their errors once.
"""

import io
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ddp_ext import RankZeroCheckpointIO
from lightning_ddp_ext.checkpoint import async_save
from lightning_ddp_ext.checkpoint.async_save import Saver
from lightning_ddp_ext.checkpoint.snapshot import Buffer, aligned
from tests.checkpoint.content import kinds, numbers, same, unusual
from tests.harness.ranks import launch_ranks, output_of_all

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")


class Disk:
    """A disk without room for some paths, on which a Saver works in the background.

    Attributes:
        events: what was done, and what was raised, in order.
    """

    def __init__(self, *failing: str) -> None:
        self.saver = Saver()
        self.events: list[str] = []
        self._failing = failing

    def save(self, path: str) -> None:
        try:
            self.saver.save_later(path, {"x": numbers(1)}, lambda content: self._write(path))
        except OSError as error:
            self.events.append(f"raised: {error}")

    def _write(self, path: str) -> None:
        if path in self._failing:
            self.events.append(f"no room for {path}")
            raise OSError(f"no room for {path}")
        self.events.append(f"wrote {path}")

    def remove(self, path: str) -> None:
        self.saver.follow_up(
            path, lambda: self.events.append(f"removed {path}"), later=True, postpone=True
        )

    def wait(self) -> None:
        try:
            self.saver.wait()
        except OSError as error:
            self.events.append(f"raised: {error}")


Call = Literal["save", "failing save", "remove"]


def expected_events(calls: list[Call]) -> list[str]:
    """Return the events of calls that each have their number as their path."""
    events: list[str] = []
    removals: list[str] = []
    unraised: str | None = None
    last_save_failed = False
    for number, call in enumerate(calls):
        if call == "remove":
            removals.append(f"removed {number}")
        elif unraised is not None:  # this save raises it, and is not attempted
            events.append(unraised)
            unraised = None
        elif call == "failing save":
            events.append(f"no room for {number}")
            unraised = f"raised: no room for {number}"
            last_save_failed = True
        else:
            events.append(f"wrote {number}")
            last_save_failed = False
        if not last_save_failed:
            events += removals
            removals.clear()
    return events if unraised is None else [*events, unraised]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(get_args(Call)), max_size=8))
def test_saves_and_removals_keep_their_order(calls: list[Call]) -> None:
    """Jobs run in the order of the calls, but a removal after a failed save waits until a
    save succeeds. The next save, or the wait at the end, raises the error.
    """
    disk = Disk(*(str(number) for number, call in enumerate(calls) if call == "failing save"))
    for number, call in enumerate(calls):
        act = disk.remove if call == "remove" else disk.save
        act(str(number))
    disk.wait()
    assert disk.events == expected_events(calls)


def test_a_checkpoint_that_outlived_a_failed_save_is_not_removed_once_it_is_saved_again() -> None:
    """A removal that waits for a save that succeeds is dropped if the save writes the
    same path.
    """
    disk = Disk("next")
    disk.save("next")
    disk.remove("last")
    disk.wait()
    disk.save("last")
    disk.wait()
    assert disk.events == ["no room for next", "raised: no room for next", "wrote last"]


class Failing:
    """Content whose save in the background fails, but not before ``may_fail`` is set."""

    may_fail = threading.Event()

    def __reduce__(self) -> Any:
        return fail_in_background, ()


def fail_in_background() -> None:
    Failing.may_fail.wait()
    raise OSError("no room")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Return content whose save fails at the latest when another thread waits for it."""
    sleep = time.sleep

    def let_fail_and_sleep(seconds: float) -> None:
        Failing.may_fail.set()
        sleep(seconds)

    Failing.may_fail.clear()
    monkeypatch.setattr(time, "sleep", let_fail_and_sleep)
    return Failing()


def fail_before_line(number: int) -> Callable[[FrameType, str, Any], Any]:
    """Return a trace function that lets the save fail before a line of the saver runs."""
    lines = count()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        is_line = event == "line" and frame.f_code.co_filename == async_save.__file__
        if is_line and next(lines) == number:
            for thread in threading.enumerate():
                if thread.name == "ddpx-checkpoints":
                    Failing.may_fail.set()
                    thread.join()
        return trace

    return trace


@pytest.mark.parametrize("line", range(8))
def test_an_error_is_raised_once_whenever_it_occurs(
    line: int, failing: Failing, tmp_path: Path
) -> None:
    """The next save raises it, whichever line that save has reached."""
    checkpoint_io = RankZeroCheckpointIO(background=True)
    checkpoint_io.save_checkpoint({"it": failing}, tmp_path / "it.ckpt")
    tracing = sys.gettrace()
    sys.settrace(fail_before_line(line))
    try:
        with pytest.raises(OSError, match="no room"):
            checkpoint_io.save_checkpoint({}, tmp_path / "next.ckpt")
    finally:
        sys.settrace(tracing)
    checkpoint_io.wait()
    assert list(tmp_path.iterdir()) == [], "the next save is not attempted"


def test_a_save_in_the_foreground_does_not_hide_that_the_one_before_it_failed(
    failing: Failing, tmp_path: Path
) -> None:
    """The foreground save raises the error, and the last good checkpoint is kept.

    A started rank hands over its weights in such a file.
    """
    checkpoint_io = RankZeroCheckpointIO(background=True)
    last = tmp_path / "last.ckpt"
    checkpoint_io.save_checkpoint({}, last)
    checkpoint_io.save_checkpoint({"it": failing}, tmp_path / "next.ckpt")
    with pytest.raises(OSError, match="no room"):
        checkpoint_io.save_checkpoint({}, tmp_path / ".temp.ckpt")
    checkpoint_io.remove_checkpoint(last)
    checkpoint_io.wait()
    assert last.exists()


class Signals:
    """Content that receives a signal while it is copied."""

    def __reduce__(self) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return str, ("copied",)


def test_a_signal_handler_can_save_while_a_save_copies(tmp_path: Path) -> None:
    """Lightning's handler of a SLURM job's last signal does so; both files are complete."""
    checkpoint_io = RankZeroCheckpointIO(background=True)
    hpc = tmp_path / "hpc_ckpt_1.ckpt"
    handler = signal.signal(
        signal.SIGUSR1, lambda *_: checkpoint_io.save_checkpoint({"it": "of the handler"}, hpc)
    )
    try:
        checkpoint_io.save_checkpoint({"it": Signals()}, tmp_path / "it.ckpt")
    finally:
        signal.signal(signal.SIGUSR1, handler)
    checkpoint_io.wait()
    assert torch.load(hpc) == {"it": "of the handler"}
    assert torch.load(tmp_path / "it.ckpt") == {"it": "copied"}


def save_and_exit(rank: int, world_size: int) -> None:
    Disk("it.ckpt").save("it.ckpt")


def save_in_a_fork_during_a_save(rank: int, world_size: int) -> None:
    disk = Disk("it.ckpt")
    is_writing = threading.Event()
    child_has_exited = threading.Event()

    def write_slowly(content: Any) -> None:
        is_writing.set()
        child_has_exited.wait()

    disk.saver.save_later("other.ckpt", {}, write_slowly)
    disk.saver.follow_up("old.ckpt", child_has_exited.wait, later=True)
    is_writing.wait()
    process = multiprocessing.get_context("fork").Process(target=disk.save, args=("it.ckpt",))
    process.start()
    process.join()
    child_has_exited.set()


@pytest.mark.parametrize("work", [save_and_exit, save_in_a_fork_during_a_save])
def test_an_error_that_is_not_raised_is_logged(work: Callable[[int, int], None]) -> None:
    """The process waits for the save at its end, also if multiprocessing forked it."""
    assert output_of_all(launch_ranks(work, 1)).count("no room") == 1


def test_every_kind_of_tensor_is_taken() -> None:
    """A snapshot is saved exactly like the original, with the values of its moment."""
    content = kinds() | unusual()
    taken = Buffer().snapshot(content)
    for name, tensor in kinds().items():
        if tensor.layout == torch.strided and name != "expanded":
            content[name].detach().zero_()
    of_snapshot = as_saved(taken())
    of_original = as_saved(kinds() | unusual())
    assert [name for name in of_original if not same(of_snapshot[name], of_original[name])] == []


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
        content = {
            "base": base,
            "again": base,
            "view": base[length // 2 :],
            "other": numbers(length // 2),
        }
        assert same(buffer.snapshot(content)(), content)
        sizes.append(buffer.size)
    # Of the numbers, 4 bytes each, of "base" and "other".
    for_1000 = aligned(4 * 1000) + aligned(4 * 500)
    for_2000 = aligned(4 * 2000) + aligned(4 * 1000)
    assert sizes == [for_1000] * 4 + [for_2000] * 3
