"""A file appears whole or not at all, and what a killed writer has left is told from what is being written."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ddp_ext.checkpoint.atomic_file import atomic_write, find_leftovers, remove_leftovers

HOUR = 3600.0


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=50)), st.integers(1, 20))
def test_all_that_is_written_arrives(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], most: int) -> None:
    """The file is the pieces one after another, even where the system takes less at a time than it is given."""
    path, write = tmp_path_factory.mktemp("whole") / "it", os.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, view: write(descriptor, view[:most]))
        with atomic_write(path) as sink:
            assert [sink.write(memoryview(piece)) for piece in pieces] == [len(piece) for piece in pieces]
            assert not path.exists()
    assert path.read_bytes() == b"".join(pieces)
    assert names(path.parent) == ["it"]


def test_a_symbolic_link_is_replaced(tmp_path: Path) -> None:
    """A link at the path gives way to the file; what it pointed to stays as it was."""
    (tmp_path / "other").write_bytes(b"other")
    (tmp_path / "it").symlink_to("other")
    with atomic_write(tmp_path / "it") as sink:
        sink.write(b"new")
    assert not (tmp_path / "it").is_symlink()
    assert [(tmp_path / name).read_bytes() for name in ("it", "other")] == [b"new", b"other"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_who_may_read_follows_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    """The file has the mode that any new file of this process has."""
    before = os.umask(umask)
    try:
        with atomic_write(tmp_path / "it") as sink:
            sink.write(b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "it").stat().st_mode) == mode


def make_old(path: Path, age: float = 2 * HOUR) -> None:
    moment = time.time() - age
    os.utime(path, (moment, moment), follow_symlinks=False)


def test_what_nobody_writes_is_a_leftover(tmp_path: Path) -> None:
    """Files and links with a name of ours are found with size and age, and removed; nothing is followed."""
    (tmp_path / "precious").write_bytes(b"precious")
    rest, link, old_link = [tmp_path / f".ddpx-{name}" for name in ("0123456789abcdef.partial", "ab12.link", "47.link")]
    rest.write_bytes(bytes(5))
    trap = tmp_path / ".ddpx-bbbbbbbbbbbbbbbb.partial"
    for each in (link, old_link, trap):
        each.symlink_to("precious")
    (tmp_path / ".ddpx-aaaaaaaaaaaaaaaa.partial").mkdir()
    for name in (".ddpx-0123.partial", "ddpx-0123456789abcdef.partial", ".ddpx-0123456789abcdef.partial.ckpt"):
        (tmp_path / name).touch()
    for path in tmp_path.iterdir():
        make_old(path)
    found = {leftover.path: leftover for leftover in find_leftovers(tmp_path)}
    assert set(found) == {rest, link, old_link}
    assert (found[rest].size, found[rest].age > HOUR) == (5, True)
    before = names(tmp_path)
    remove_leftovers(tmp_path)
    assert set(before) - set(names(tmp_path)) == {path.name for path in found}
    assert (tmp_path / "precious").read_bytes() == b"precious"
