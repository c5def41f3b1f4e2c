"""`checkpoint verify` tells whether a file is what was written, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from tests.cli.command import checkpoint, save
from tests.harness.damage import WouldRun, flip, without_checksums


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "it.ckpt"


def test_a_damaged_tensor_is_named(path: Path) -> None:
    """Which tensors, where in the file, and status 1; code in the file is not run to learn their names."""
    weight = torch.ones(300)
    save(path, state_dict={"fine": torch.zeros(300), "tied": weight, "it": weight}, run=WouldRun(path.parent / "ran"))
    flip(flip(path, "data/1"), "data/3")
    ended = checkpoint("verify", path)
    assert ended.status == 1
    assert ended.row("data/1")[2:] == ["1.2 KiB", "state_dict.tied, state_dict.it"]
    names = ["state_dict.tied", "state_dict.it", "optimizer_states.0.state.0.step"]
    assert f"checkpoint {path} is damaged: {', '.join(names)} differ from what was written" in ended.stderr
    document = checkpoint("verify", "--json", path).document
    assert document["whole"] is False
    assert [each["tensors"] for each in document["damaged"]] == [names[:2], names[2:]]
    assert not (path.parent / "ran").exists()


def test_damage_beside_tensors_goes_by_the_name_of_its_record(path: Path) -> None:
    """A damaged pickle is not unpickled to learn names, so a tensor damaged with it has none, either."""
    ended = checkpoint("verify", flip(flip(save(path), "data.pkl"), "data/0"))
    assert ended.status == 1
    assert ended.row("data.pkl")[-1] == ended.row("data/0")[-1] == "?"
    assert "is damaged: data.pkl, data/0 differ from" in ended.stderr


def test_an_object_of_a_store_is_verified(path: Path) -> None:
    """A URL that fsspec knows is fetched; one that it does not is refused in a sentence."""
    store = MemoryFileSystem()
    store.pipe_file("/cli/good.ckpt", save(path).read_bytes())
    store.pipe_file("/cli/bad.ckpt", flip(path, "data/0").read_bytes())
    assert "memory://cli/good.ckpt is whole" in checkpoint("verify", "memory://cli/good.ckpt").stdout
    assert "checkpoint memory://cli/bad.ckpt is damaged" in checkpoint("verify", "memory://cli/bad.ckpt").stderr
    store.rm("/cli", recursive=True)


def test_several_files_are_verified(path: Path, tmp_path: Path) -> None:
    """Each has its sentence, and the status is that of the worst."""
    good, bad, unknown = save(path), flip(save(tmp_path / "bad.ckpt"), "data/0"), tmp_path / "unknown.ckpt"
    with without_checksums():
        save(unknown)
    ended = checkpoint("verify", good, bad, unknown)
    assert ended.status == 1
    assert f"{good} is whole: " in ended.stdout
    assert f"checkpoint {bad} is damaged" in ended.stderr
    assert f"{unknown} has no checksums, so altered" in ended.stdout
    statuses = [checkpoint("verify", *files).status for files in ([good], [good, unknown])]
    assert statuses == [0, 3]
    document = checkpoint("verify", "--json", good, bad, unknown).document
    assert [each["whole"] for each in document["files"]] == [True, False, None]


def test_a_file_from_before_checksums_is_not_called_whole(path: Path) -> None:
    """Nothing wrong was found, but nothing could be checked: that has a status of its own, and nothing is run."""
    torch.save(WouldRun(path.parent / "ran"), path, _use_new_zipfile_serialization=False)
    ended = checkpoint("verify", path)
    assert ended.status == 3
    assert "has no checksums (torch wrote it before" in ended.stdout
    assert not (path.parent / "ran").exists()
