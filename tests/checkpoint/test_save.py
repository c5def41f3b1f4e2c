"""A checkpoint is written to a path or URL whole, or the error names a remedy and an
existing file is untouched.
"""

import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from torch.serialization import get_crc32_options

from lightning_ddp_ext.checkpoint.location import locate
from lightning_ddp_ext.checkpoint.save import remove, write
from lightning_ddp_ext.errors import CheckpointError, CheckpointSaveError
from tests.checkpoint.content import kinds, opened, same, without_checksums


@pytest.fixture(params=["relative", "file", "memory"])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Return a path in a missing directory: on the disk, or in a store in memory."""
    monkeypatch.chdir(tmp_path)
    store = MemoryFileSystem()
    urls = {
        "relative": "a/it.ckpt",
        "file": f"file://{tmp_path}/a/it.ckpt",
        "memory": "memory://bucket/a/it.ckpt",
    }
    yield urls[request.param]
    store.store.clear()
    store.pseudo_dirs[:] = [""]


def loaded(url: str) -> Any:
    place = locate(url)
    with place.fs.open(place.path, "rb") as file:
        return torch.load(file, weights_only=False)


def test_a_store_may_not_count_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose ``write`` returns nothing, as paramiko's, gets every byte once."""
    write_all = MemoryFile.write

    def write_silently(file: MemoryFile, data: memoryview) -> None:
        assert file.tell() < 1 << 20, "the same bytes are written again and again"
        write_all(file, data)

    monkeypatch.setattr(MemoryFile, "write", write_silently)
    write(kinds(), "memory://silent.ckpt")
    assert same(loaded("memory://silent.ckpt"), kinds())
    remove("memory://silent.ckpt")


def test_a_new_file_is_whole_and_has_its_own_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It follows the umask and replaces a symbolic link instead of the link's target.

    The system may write only a few bytes at a time.
    """
    path = tmp_path / "it.ckpt"
    other = tmp_path / "other"
    write_all = os.write
    other.write_bytes(b"other")
    path.symlink_to("other")
    monkeypatch.setattr(os, "write", lambda descriptor, view: write_all(descriptor, view[:999]))
    umask = os.umask(0o077)
    try:
        write(kinds(), path)
    finally:
        os.umask(umask)
    assert same(loaded(str(path)), kinds())
    assert not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert other.read_bytes() == b"other"


def test_checksums_are_recorded_with_any_setting_of_torch(tmp_path: Path) -> None:
    """The user's setting still applies to the user's own files, and is unchanged
    afterwards.
    """
    with without_checksums():
        write(kinds(), tmp_path / "it.ckpt")
        assert not get_crc32_options()
    with opened(tmp_path / "it.ckpt") as archive:
        assert archive.has_checksums


def test_an_upload_that_breaks_off_leaves_the_old_object(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the store's reason and the URL; the next save succeeds."""

    def fail_halfway(checkpoint: Any, file: Any) -> None:
        file.write(b"half of it")
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    write({"old": 1}, url)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail_halfway)
        with pytest.raises(
            CheckpointSaveError, match="Connection reset by peer; check its space and permissions"
        ) as caught:
            write({"new": 2}, url)
    assert caught.value.path == url
    assert loaded(url) == {"old": 1}
    write({"new": 2}, url)
    assert loaded(url) == {"new": 2}


def test_an_error_of_closing_the_file_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may report only then that the disk is full."""
    path = tmp_path / "it.ckpt"
    close = os.close

    def close_on_full_disk(descriptor: int) -> None:
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        close(descriptor)
        if is_file:
            raise OSError(errno.ENOSPC, "No space left on device")

    write({"old": 1}, path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close_on_full_disk)
        with pytest.raises(CheckpointSaveError, match="No space left on device"):
            write({"new": 2}, path)
    assert loaded(str(path)) == {"old": 1}
    assert os.listdir(tmp_path) == ["it.ckpt"]


@pytest.mark.parametrize(
    ("path", "number", "says"),
    [
        ("directory", errno.EISDIR, "Is a directory"),
        ("file/it.ckpt", errno.EEXIST, "File exists"),
        ("file/deeper/it.ckpt", errno.ENOTDIR, "Not a directory"),
        ("x" * 300, errno.ENAMETOOLONG, "File name too long"),
    ],
)
def test_paths_that_cannot_be_written_to(tmp_path: Path, path: str, number: int, says: str) -> None:
    """The error has the system's reason and number, and no file is left behind."""
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointSaveError, match=says) as caught:
        write({}, tmp_path / path)
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == number
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["directory", "file"]


def test_a_disk_that_refuses_is_named(disk: Path, tmp_path: Path) -> None:
    """Errors of read-only file systems and other users' directories name the path and the
    system's reason.
    """
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(CheckpointSaveError, match=r"disk/it\.ckpt: Read-only file system"):
        write({}, disk / "it.ckpt")
    path = tmp_path / "it.ckpt"
    write({}, path)
    os.seteuid(65534)
    try:
        with pytest.raises(CheckpointSaveError, match=r"it\.ckpt: Permission denied"):
            write({}, path)
        with pytest.raises(CheckpointError, match=r"cannot remove .*it\.ckpt: Permission denied"):
            remove(path)
    finally:
        os.seteuid(os.getuid())


def test_removing(url: str) -> None:
    """Files and whole directories are removed; a missing path is not an error."""
    directory = url.rpartition("/")[0]
    for path in (url, directory):
        write({}, url)
        remove(path)
        assert not locate(path).fs.exists(locate(path).path)
        remove(url)
