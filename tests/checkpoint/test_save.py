"""A checkpoint is written to a path or URL whole, or the error names a remedy and an
existing file is untouched.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from lightning_ddp_ext.checkpoint.location import locate
from lightning_ddp_ext.checkpoint.save import remove, write
from lightning_ddp_ext.errors import CheckpointError, CheckpointSaveError
from tests.checkpoint.content import kinds, restored, same, without_checksums

LOCAL = "a/it.ckpt"
IN_STORE = "memory://bucket/a/it.ckpt"


@pytest.fixture(params=[LOCAL, IN_STORE])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Return a path in a missing directory: on the disk, or in a store in memory."""
    monkeypatch.chdir(tmp_path)
    yield request.param
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


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
        write(kinds(), f"file://{path}")
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
        assert not torch.serialization.get_crc32_options()
    assert not restored(tmp_path / "it.ckpt").lacks_checksums


def run_out_of_space() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def save_half(checkpoint: Any, file: Any) -> None:
    file.write(b"half of it")
    run_out_of_space()


def close_on_full_disk(descriptor: int, close: Callable[[int], None] = os.close) -> None:
    close(descriptor)
    run_out_of_space()


@pytest.mark.parametrize(
    ("url", "module", "name", "fail"),
    [
        pytest.param(LOCAL, torch, "save", save_half, id="in the middle, on a disk"),
        pytest.param(IN_STORE, torch, "save", save_half, id="in the middle, in a store"),
        # A network file system may report only then that the disk is full.
        pytest.param(LOCAL, os, "close", close_on_full_disk, id="when the file is closed"),
    ],
    indirect=["url"],
)
def test_a_save_that_breaks_off_leaves_the_old_file(
    url: str, module: Any, name: str, fail: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the system's reason and the URL; the next save succeeds."""
    write({"old": 1}, url)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, fail)
        with pytest.raises(
            CheckpointSaveError, match="No space left on device; check its space and permissions"
        ) as caught:
            write({"new": 2}, url)
    assert caught.value.path == url
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == errno.ENOSPC
    assert loaded(url) == {"old": 1}
    assert [file.name for file in Path().rglob("*") if file.is_file()] in ([], ["it.ckpt"])
    write({"new": 2}, url)
    assert loaded(url) == {"new": 2}


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    """The error names the object, and no file is left behind."""
    with pytest.raises(CheckpointSaveError, match=r"<locals>\.<lambda>"):
        write({"function": lambda: None}, tmp_path / "it.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_refuses_changes_is_named(tmp_path: Path) -> None:
    """Errors of saving and removing name the path and the system's reason."""
    path = tmp_path / "it.ckpt"
    write({}, path)
    tmp_path.chmod(0o500)
    if os.getuid() == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(CheckpointSaveError, match=r"it\.ckpt: Permission denied"):
            write({}, path)
        with pytest.raises(CheckpointError, match=r"cannot remove .*it\.ckpt: Permission denied"):
            remove(path)
    finally:
        os.seteuid(os.getuid())
        tmp_path.chmod(0o700)


def test_remove_deletes_files_and_directories(url: str) -> None:
    """A missing path is not an error."""
    directory = url.rpartition("/")[0]
    for path in (url, directory):
        write({}, url)
        remove(path)
        assert not locate(path).fs.exists(locate(path).path)
        remove(url)
