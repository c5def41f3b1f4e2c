"""Notes that outlive their rank, and the choice of the one that saves."""

from __future__ import annotations

import os
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
