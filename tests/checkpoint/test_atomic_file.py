"""A file appears whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ddp_ext.checkpoint.atomic_file import atomic_write


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
    assert list(path.parent.iterdir()) == [path]


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
