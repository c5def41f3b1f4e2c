"""`checkpoint verify` tells whether a file is what was written, and what is not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.serialization import set_crc32_options

from tests.cli.command import WouldRun, checkpoint, save
from tests.harness.damage import flip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "it.ckpt"


@contextmanager
def without_checksums() -> Iterator[None]:
    """Files that are saved in here have none."""
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(True)


def test_a_whole_file(path: Path) -> None:
    """One sentence on stdout, and status 0."""
    ended = checkpoint("verify", save(path))
    assert (ended.status, ended.stderr) == (0, "")
    assert f"{path} is whole: " in ended.stdout
    document = checkpoint("verify", "--json", path).document
    assert (document["whole"], document["damaged"], document["without_checksum"]) == (True, [], [])


def test_a_damaged_tensor_is_named(path: Path) -> None:
    """Which tensors, where in the file, and status 1."""
    weight = torch.ones(300)
    save(path, state_dict={"fine": torch.zeros(300), "tied": weight, "it": weight})
    flip(flip(path, "data/1"), "data/3")
    ended = checkpoint("verify", path)
    assert ended.status == 1
    assert ended.row("data/1")[2:] == ["1.2 KiB", "state_dict.tied, state_dict.it"]
    names = ["state_dict.tied", "state_dict.it", "optimizer_states.0.state.0.step"]
    assert f"checkpoint {path} is damaged: {', '.join(names)} differ from what was written" in ended.stderr
    document = checkpoint("verify", "--json", path).document
    assert document["whole"] is False
    assert [each["tensors"] for each in document["damaged"]] == [names[:2], names[2:]]


@pytest.mark.parametrize("record", ["data.pkl", "version"])
def test_damage_beside_tensors_goes_by_the_name_of_its_record(record: str, path: Path) -> None:
    """A damaged pickle is not unpickled to learn names, so a tensor damaged with it has none, either."""
    ended = checkpoint("verify", flip(flip(save(path), record), "data/0"))
    assert ended.status == 1
    assert ended.row(record)[-1] == "?"
    assert f"{record} differ" in ended.stderr or f"{record}, " in ended.stderr


def test_code_in_a_damaged_file_is_not_run(path: Path) -> None:
    """The names of its tensors are learnt without that."""
    save(path, it=WouldRun(path.parent / "ran"))
    ended = checkpoint("verify", flip(path, "data/0"))
    assert ended.status == 1
    assert "is damaged: state_dict.out.weight differs" in ended.stderr
    assert not (path.parent / "ran").exists()


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garbage(path: Path) -> None:
    path.write_bytes(b"not a checkpoint")


def archive(path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(path, "w") as file:
        file.writestr("notes/today.txt", "nothing")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def missing(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (truncated, "was probably cut off"),
        (empty, "is empty"),
        (garbage, "is not a checkpoint: it begins with b'not '"),
        (archive, "is not a checkpoint: it is a zip archive without data.pkl"),
        (directory, "is a directory"),
        (missing, "does not exist"),
    ],
)
def test_what_is_no_whole_checkpoint_is_told_in_one_sentence(
    spoil: Callable[[Path], None], says: str, path: Path
) -> None:
    """Status 1, one sentence on stderr, and the same sentence in JSON."""
    spoil(save(path))
    ended = checkpoint("verify", path)
    assert (ended.status, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert says in ended.stderr
    document = checkpoint("verify", "--json", path).document
    assert document["whole"] is False
    assert says in document["error"]


def test_an_object_of_a_store_is_verified(path: Path) -> None:
    """A URL that fsspec knows is fetched; one that it does not is refused in a sentence."""
    store = MemoryFileSystem()
    store.pipe_file("/cli/good.ckpt", save(path).read_bytes())
    store.pipe_file("/cli/bad.ckpt", flip(path, "data/0").read_bytes())
    assert "memory://cli/good.ckpt is whole" in checkpoint("verify", "memory://cli/good.ckpt").stdout
    assert "checkpoint memory://cli/bad.ckpt is damaged" in checkpoint("verify", "memory://cli/bad.ckpt").stderr
    assert "memory://cli/no.ckpt does not exist" in checkpoint("verify", "memory://cli/no.ckpt").stderr
    store.rm("/cli", recursive=True)
    ended = checkpoint("verify", "nosuch://bucket/it.ckpt")
    assert (ended.status, ended.stderr.count("\n")) == (1, 1)
    assert "'nosuch://bucket/it.ckpt' needs a file system that is not there" in ended.stderr


def test_several_files_are_verified(path: Path, tmp_path: Path) -> None:
    """Each has its sentence, and the status is that of the worst."""
    good, bad, unknown = save(path), flip(save(tmp_path / "bad.ckpt"), "data/0"), tmp_path / "unknown.ckpt"
    with without_checksums():
        save(unknown)
    ended = checkpoint("verify", good, bad, unknown)
    assert ended.status == 1
    assert f"{good} is whole" in ended.stdout
    assert f"checkpoint {bad} is damaged" in ended.stderr
    assert f"{unknown} has no checksums" in ended.stdout
    assert checkpoint("verify", good, unknown).status == 3
    document = checkpoint("verify", "--json", good, bad, unknown).document
    assert [each["whole"] for each in document["files"]] == [True, False, None]


def without_any(path: Path) -> None:
    with without_checksums():
        save(path, it=WouldRun(path.parent / "ran"))


def from_before_torch_1_6(path: Path) -> None:
    torch.save({"a": torch.ones(300)}, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    ("write", "says"),
    [(without_any, "has no checksums, so altered"), (from_before_torch_1_6, "has no checksums (torch wrote it before")],
)
def test_a_file_without_checksums_is_not_called_whole(write: Callable[[Path], None], says: str, path: Path) -> None:
    """Nothing wrong was found, but nothing could be checked: that has a status of its own, and nothing is run."""
    write(path)
    ended = checkpoint("verify", path)
    assert ended.status == 3
    assert says in ended.stdout
    assert checkpoint("verify", "--json", path).document["whole"] is None
    assert not (path.parent / "ran").exists()
