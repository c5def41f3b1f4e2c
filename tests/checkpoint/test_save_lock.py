"""One of the surviving ranks saves: the one that is furthest."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from pathlib import Path

import pytest

from lightning_ddp_ext.checkpoint.save_lock import lock_of, save_if_furthest

pytestmark = pytest.mark.unit


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
