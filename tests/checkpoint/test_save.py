"""A checkpoint is written to a path or URL whole, or the error says what to do and what was there is untouched."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_ddp_ext.checkpoint.location import locate
from lightning_ddp_ext.checkpoint.save import link, remove, write
from lightning_ddp_ext.checkpoint.zip_crc import open_archive
from lightning_ddp_ext.errors import CheckpointError, CheckpointSaveError
from tests.checkpoint.content import kinds, numbers, same

URLS = pytest.mark.parametrize("where", ["file", "memory"])


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    """The object store in memory, empty before and after."""
    fs = MemoryFileSystem()
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def loaded(url: str) -> Any:
    place = locate(url)
    with place.fs.open(place.path, "rb") as file:
        return torch.load(file, weights_only=False)


def url_in(where: str, directory: Path) -> str:
    return str(directory / "a" / "it.ckpt") if where == "file" else "memory://bucket/a/it.ckpt"


@URLS
def test_all_kinds_come_back(where: str, tmp_path: Path, memory: MemoryFileSystem) -> None:
    """Every kind of tensor is read by torch as it was written; directories are made."""
    url = url_in(where, tmp_path)
    write(kinds(), url)
    assert same(loaded(url), kinds())


@URLS
def test_checksums_are_recorded_whatever_torch_is_told(where: str, tmp_path: Path, memory: MemoryFileSystem) -> None:
    """A user's setting holds for the user's own files, and is what it was afterwards."""
    url = url_in(where, tmp_path)
    set_crc32_options(False)
    try:
        write(kinds(), url)
        assert not get_crc32_options()
    finally:
        set_crc32_options(True)
    (tmp_path / "copy").write_bytes(locate(url).fs.cat_file(locate(url).path))
    assert open_archive(tmp_path / "copy").has_checksums


def test_a_relative_path_and_a_file_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path counts from the working directory; ``file://`` is local, and an object store is not."""
    monkeypatch.chdir(tmp_path)
    assert locate("a/b.ckpt").local == tmp_path / "a" / "b.ckpt"
    assert locate(f"file://{tmp_path}/b.ckpt").local == tmp_path / "b.ckpt"
    assert locate(Path("b.ckpt")).url == "b.ckpt"
    assert locate("memory://a").local is None


def test_an_unknown_kind_of_url_is_named() -> None:
    """A URL of a kind that nobody here knows is refused by name."""
    with pytest.raises(CheckpointError, match="'nosuch://x/y' needs a file system that is not there"):
        locate("nosuch://x/y")


@URLS
def test_what_cannot_be_pickled_is_named(where: str, tmp_path: Path, memory: MemoryFileSystem) -> None:
    """The error names the entry to blame, after some was written already, and the old checkpoint stays."""
    url = url_in(where, tmp_path)
    write({"old": 1}, url)
    with pytest.raises(CheckpointSaveError, match="entry 'bad' cannot be pickled, so take it out") as caught:
        write({"good": numbers(5000), "bad": threading.Lock()}, url)
    assert caught.value.path == url
    assert loaded(url) == {"old": 1}
    assert len(locate(url).fs.ls(locate(url).fs._parent(locate(url).path))) == 1


class FailsToPickle:
    """Raises what it was given when it is pickled."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


def test_a_checkpoint_that_is_no_mapping(tmp_path: Path) -> None:
    """An error without an entry to blame is named all the same, and an error of ours is left as it is."""
    with pytest.raises(CheckpointSaveError, match=r"it.ckpt: KeyError: 'mine'; what was there before is untouched"):
        write(FailsToPickle(KeyError("mine")), tmp_path / "it.ckpt")
    with pytest.raises(CheckpointError, match=r"^ours$"):
        write(FailsToPickle(CheckpointError("ours")), tmp_path / "it.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_an_object_that_breaks_off_leaves_the_old_one(
    memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the middle of an upload leaves the object as it was, and the next save succeeds."""
    url = "memory://bucket/it.ckpt"
    write({"old": 1}, url)

    def fail_halfway(checkpoint: Any, file: Any) -> None:
        file.write(b"half of it")
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail_halfway)
        with pytest.raises(CheckpointSaveError, match="Connection reset by peer; look at the file system") as caught:
            write({"new": 2}, url)
    assert caught.value.errno == errno.ECONNRESET
    assert loaded(url) == {"old": 1}
    write({"new": 2}, url)
    assert loaded(url) == {"new": 2}


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(3)], ids=["interrupt", "exit"])
def test_whoever_is_interrupted_while_writing_is_told_so(
    end: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not, in torch's words, that the file is too short; what was there before is untouched."""
    path = tmp_path / "it.ckpt"
    write({"number": 1}, path)

    write_some, calls = os.write, list[int]()

    def interrupted(descriptor: int, view: memoryview) -> int:
        calls.append(descriptor)
        if len(calls) == 4:
            raise end
        return write_some(descriptor, view)

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(type(end)):
        write(kinds(), path)
    assert loaded(str(path)) == {"number": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["it.ckpt"]


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, r"free some space \(\d+ MiB are left on the file system of /"),
        (errno.EDQUOT, r"free some space"),
        (errno.EACCES, r"let user \S+ write to /"),
        (errno.EROFS, "mounted read-only: save elsewhere"),
        (errno.EIO, "look at the file system, or save elsewhere"),
    ],
)
def test_errors_of_the_disk_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str) -> None:
    """The error has the system's number, says what to do, and the earlier checkpoint is untouched."""

    def fail(descriptor: int, view: memoryview) -> int:
        raise OSError(number, "because")

    write({"old": 1}, tmp_path / "it.ckpt")
    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(CheckpointSaveError, match=f"it.ckpt: because; .*{says}") as caught:
        write({"new": 2}, tmp_path / "it.ckpt")
    assert caught.value.errno == number
    assert torch.load(tmp_path / "it.ckpt") == {"old": 1}


@pytest.mark.parametrize(
    ("path", "number", "says"),
    [
        ("directory", errno.EISDIR, "there is a directory at that path"),
        ("file/it.ckpt", errno.EEXIST, "a file stands where the path needs a directory"),
        ("file/deeper/it.ckpt", errno.ENOTDIR, "a file stands where the path needs a directory"),
        ("x" * 300, errno.ENAMETOOLONG, "shorten the file name"),
    ],
)
def test_paths_that_cannot_be_written_to(tmp_path: Path, path: str, number: int, says: str) -> None:
    """A directory at the path, a file in its way, a name that is too long: each is named, and nothing is left."""
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointSaveError, match=says) as caught:
        write({}, tmp_path / path)
    assert caught.value.errno == number
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["directory", "file"]


@URLS
def test_removing(where: str, tmp_path: Path, memory: MemoryFileSystem) -> None:
    """A file goes, a directory goes with all in it, and where nothing is nothing happens."""
    url = url_in(where, tmp_path)
    write({}, url)
    directory = url.rpartition("/")[0]
    remove(url)
    assert not locate(url).fs.exists(locate(url).path)
    remove(url)
    write({}, url)
    remove(directory)
    assert not locate(url).fs.exists(locate(directory).path)
    remove(url)
    if where == "file":  # a link goes itself, and only that
        for target in (tmp_path, tmp_path / "nothing"):
            (tmp_path / "link").symlink_to(target)
            remove(tmp_path / "link")
            assert list(tmp_path.iterdir()) == []


def test_a_removal_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says that the checkpoint cannot be removed, and why."""

    def fail(self: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "it.ckpt").touch()
    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(CheckpointError, match=r"cannot remove checkpoint .*it.ckpt: Permission denied; let user"):
        remove(tmp_path / "it.ckpt")


@pytest.mark.parametrize("there", ["nothing", "link", "file"])
def test_a_link_takes_the_place_of_whatever_is_there(there: str, tmp_path: Path) -> None:
    """In one step, and it is read like the file."""
    target, path = tmp_path / "it.ckpt", tmp_path / "last.ckpt"
    write({"x": 1}, target)
    if there == "link":
        path.symlink_to("elsewhere")
    elif there == "file":
        path.touch()
    link(target, path)
    assert path.is_symlink()
    assert torch.load(path) == {"x": 1}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["it.ckpt", "last.ckpt"]


@pytest.mark.parametrize("function", ["symlink", "replace"])
def test_where_there_are_no_links_it_is_said(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without symbolic links, or a directory in the way: the error says what to do instead."""

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, function, refuse)
    with pytest.raises(CheckpointSaveError, match=r"last.ckpt to .*it.ckpt: Operation not permitted; save_last=True"):
        link(tmp_path / "it.ckpt", tmp_path / "last.ckpt")
    assert list(tmp_path.iterdir()) == []
