"""Notes that outlive their rank, and the choice of the one that saves."""

from __future__ import annotations

import contextlib
import os
import threading
from functools import partial
from pathlib import Path

import pytest

from lightning_ddp_ext.checkpoint import rank_notes
from lightning_ddp_ext.checkpoint.rank_notes import (
    Kind,
    RankNotes,
    lock_of,
    open_notes,
    save_if_furthest,
)

pytestmark = pytest.mark.unit


@pytest.fixture
def notes() -> RankNotes:
    return open_notes(lambda value: [value], 0)[0]


@pytest.mark.parametrize("cut", [1, 8, 20, 24, 28, 29, 999])
def test_the_newest_notes_are_read_without_one_that_was_cut_short(
    cut: int, notes: RankNotes
) -> None:
    """A kill leaves the beginning of the new note and the end of the old one."""
    for batches in range(8):
        notes.write(Kind.BUFFERS, batches, b"old", b"er")
        notes.write(Kind.WINDOW, batches, b"other")
    file = notes._descriptor
    begin = 4 * Kind.BUFFERS * rank_notes._SLOT
    older = os.pread(file, 37, begin)
    notes.write(Kind.BUFFERS, 9, b"new", b"er")
    os.pwrite(file, older[cut:], begin + cut)
    newest = b"newer" if cut == 999 else None
    assert [notes.find(batches, Kind.BUFFERS) for batches in (9, 7, 5, 4)] == [
        newest,
        b"older",
        b"older",
        None,
    ]


def test_the_newest_note_after_the_same_batches_is_found(notes: RankNotes) -> None:
    """Of the kinds that are sought, the last note counts."""
    for kind, content in (
        (Kind.BATCH, b"a"),
        (Kind.EPOCH, b"b"),
        (Kind.BATCH, b"c"),
        (Kind.WINDOW, b"d"),
    ):
        notes.write(kind, 3, content)
    notes.write(Kind.BATCH, 4, b"e")
    assert notes.find(3, *Kind.up_to(Kind.EPOCH)) == b"c"
    assert notes.find(3, *Kind) == b"d"


def test_a_full_disk_is_an_error(notes: RankNotes, disk: Path) -> None:
    """The error is raised by the write that finds no space."""
    with pytest.raises(OSError, match="No space left on device"):
        RankNotes(os.open(disk / "notes", os.O_RDWR | os.O_CREAT)).write(
            Kind.BUFFERS, 1, bytes(5 << 20)
        )


def test_no_file_is_left_and_ranks_that_cannot_note_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notes are in shared memory, else in the temporary directory, and the files have
    no name.
    """
    monkeypatch.setattr(rank_notes, "_MEMORY", str(tmp_path / "missing"))  # as in a chroot
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    open_notes(lambda value: [value], 0)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(OSError, match=r"rank 0: .*No such file"):
        open_notes(lambda value: [value], 0)


def test_no_file_is_left_if_another_rank_dies_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is removed although the exchange with the other ranks raises."""
    monkeypatch.setattr(rank_notes, "_MEMORY", str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        open_notes(lambda value: 1 / 0, 0)
    assert list(tmp_path.iterdir()) == []


def test_the_rank_that_is_further_saves(tmp_path: Path) -> None:
    """A rank with fewer batches, or with as many, leaves the file of its run as it is."""
    path = str(tmp_path / "it.ckpt")
    saves = []
    for run, batches, rank in (("a", 4, 1), ("a", 4, 2), ("a", 3, 3), ("a", 5, 4), ("b", 1, 5)):
        save_if_furthest(path, run, batches, lambda rank=rank: saves.append(rank), 1)
    assert saves == [1, 4, 5]


def test_a_lock_file_with_other_content_does_not_prevent_a_save(tmp_path: Path) -> None:
    """A rank was killed while it wrote the file, or the disk was full."""
    path = str(tmp_path / "it.ckpt")
    for content in (b"", b"a", b"a ", b"\xff {", b"a 7x"):
        Path(lock_of(path)).write_bytes(content)
        assert save_if_furthest(path, "a", 1, lambda: None, 1)


def test_a_full_disk_after_the_save_is_ignored(disk: Path) -> None:
    """Another survivor saves the same step again."""
    path = str(disk / "it.ckpt")
    for _ in range(2):
        assert save_if_furthest(path, "a", 1, partial(fill, disk / "filler"), 1)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while file.write(bytes(1 << 10)):
            pass


def test_a_failed_save_leaves_it_to_the_next_one_and_a_held_lock_is_not_waited_for_without_end(
    tmp_path: Path,
) -> None:
    """The lock is free after an error, and a rank waits for another one up to
    ``save_deadline``.
    """
    path = str(tmp_path / "it.ckpt")
    with pytest.raises(ZeroDivisionError):
        save_if_furthest(path, "a", 4, lambda: 1 / 0, 1)
    is_held = threading.Event()
    may_end = threading.Event()

    def hold() -> None:
        is_held.set()
        may_end.wait()

    holder = threading.Thread(target=save_if_furthest, args=(path, "a", 4, hold, 1))
    holder.start()
    is_held.wait()
    with pytest.raises(TimeoutError, match="save_deadline"):
        save_if_furthest(path, "a", 5, lambda: None, 0.01)
    may_end.set()
    holder.join()
