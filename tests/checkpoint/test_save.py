"""A checkpoint is written to a path or URL whole, or the error names a remedy and an
existing file is untouched.
"""

import errno
import os
import stat
import tempfile
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
NOBODY = 65534  # a user id without privileges


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


def test_a_file_is_whole_although_the_system_writes_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may write only the first bytes of what it gets, here 999."""
    url = f"file://{tmp_path}/it.ckpt"
    write_all = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, view: write_all(descriptor, view[:999]))
    write(kinds(), url)
    assert same(loaded(url), kinds())


@pytest.fixture
def private_umask() -> Iterator[None]:
    """Have new files readable by their owner only."""
    umask = os.umask(0o077)
    yield
    os.umask(umask)


@pytest.mark.usefixtures("private_umask")
def test_a_symbolic_link_is_replaced_by_a_new_file(tmp_path: Path) -> None:
    """The file has the mode of the umask, and the link's target is untouched."""
    path = tmp_path / "it.ckpt"
    target = tmp_path / "target"
    target.write_bytes(b"target")
    path.symlink_to(target)
    write({"new": 1}, path)
    assert loaded(str(path)) == {"new": 1}
    assert not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert target.read_bytes() == b"target"


def test_checksums_are_recorded_with_any_setting_of_torch(tmp_path: Path) -> None:
    """The user's setting still applies to the user's own files, and is unchanged
    afterwards.
    """
    with without_checksums():
        write(kinds(), tmp_path / "it.ckpt")
        assert not torch.serialization.get_crc32_options()
    assert not restored(tmp_path / "it.ckpt").lacks_checksums


# Ways in which a full disk or store breaks off a save. A real one would need a file system
# of the test's own.


def raise_full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def full_in_the_middle(patch: pytest.MonkeyPatch) -> None:
    """The first bytes are written."""

    def save_half(checkpoint: Any, file: Any) -> None:
        file.write(b"half of it")
        raise_full()

    patch.setattr(torch, "save", save_half)


def full_when_closed(patch: pytest.MonkeyPatch) -> None:
    """All bytes are written; a network file system may report only then that it is full."""
    close = os.close

    def close_and_fail(descriptor: int) -> None:
        close(descriptor)
        raise_full()

    patch.setattr(os, "close", close_and_fail)


@pytest.mark.parametrize(
    ("url", "break_off"),
    [
        pytest.param(LOCAL, full_in_the_middle, id="in the middle, on a disk"),
        pytest.param(IN_STORE, full_in_the_middle, id="in the middle, in a store"),
        pytest.param(LOCAL, full_when_closed, id="when the file is closed"),
    ],
    indirect=["url"],
)
def test_a_save_that_breaks_off_leaves_the_old_file(
    url: str, break_off: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the system's reason and the URL; the next save succeeds."""
    write({"old": 1}, url)
    with monkeypatch.context() as patch:
        break_off(patch)
        with pytest.raises(
            CheckpointSaveError, match="No space left on device; check its space and permissions"
        ) as caught:
            write({"new": 2}, url)
    assert caught.value.path == url
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == errno.ENOSPC
    assert loaded(url) == {"old": 1}
    files = [path for path in Path().rglob("*") if path.is_file()]
    files += map(Path, MemoryFileSystem.store)
    assert [path.name for path in files] == ["it.ckpt"], "a part of the new file is left"
    write({"new": 2}, url)
    assert loaded(url) == {"new": 2}


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    """The error names the object, and no file is left behind."""
    with pytest.raises(CheckpointSaveError, match=r"<locals>\.<lambda>"):
        write({"function": lambda: None}, tmp_path / "it.ckpt")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def own_directory() -> Iterator[Path]:
    """Make a directory, and be its owner during the test: a user whom permissions bind.

    They do not bind root, who therefore becomes another user. That user can enter ``/tmp``,
    but neither ``tmp_path`` nor the tests' own directory for temporary files.
    """
    with tempfile.TemporaryDirectory(prefix="own-", dir="/tmp") as directory:
        if os.getuid() == 0:
            os.chown(directory, NOBODY, -1)
            os.seteuid(NOBODY)
        yield Path(directory)
        os.seteuid(os.getuid())


def test_a_directory_that_refuses_changes_is_named(own_directory: Path) -> None:
    """Errors of saving and removing name the path and the system's reason."""
    path = own_directory / "it.ckpt"
    write({}, path)
    own_directory.chmod(0o500)
    with pytest.raises(CheckpointSaveError, match=r"it\.ckpt: Permission denied"):
        write({}, path)
    with pytest.raises(CheckpointError, match=r"cannot remove .*it\.ckpt: Permission denied"):
        remove(path)


def test_remove_deletes_files_and_directories(url: str) -> None:
    """A missing path is not an error."""
    directory = url.rpartition("/")[0]
    for path in (url, directory):
        write({}, url)
        remove(path)
        assert not locate(path).fs.exists(locate(path).path)
        remove(url)
