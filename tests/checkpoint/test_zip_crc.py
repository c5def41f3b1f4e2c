"""The records of a checkpoint file are known to the byte, and whatever has happened to one of them is noticed."""

from __future__ import annotations

import os
import random
import shutil
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ddp_ext.checkpoint import load
from lightning_ddp_ext.checkpoint.zip_crc import find_damage, open_archive
from lightning_ddp_ext.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError
from tests.checkpoint.content import flip, numbers, read_alone, same, saved
from tests.harness.damage import with_overlapping_records

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")


def small() -> dict[str, Any]:
    return {
        "state_dict": {"a": numbers(20), "b": torch.ones(3, dtype=torch.int8)},
        "empty": torch.empty(0),
        "rest": [1, "two", None],
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint that nobody changes."""
    path = tmp_path_factory.mktemp("archive") / "it.ckpt"
    torch.save(small(), path)
    return path


@pytest.fixture(scope="module")
def legacy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as torch wrote it before 1.6."""
    path = tmp_path_factory.mktemp("archive") / "old.ckpt"
    torch.save(small(), path, _use_new_zipfile_serialization=False)
    return path


def test_records_are_the_tensors_bytes(path: Path) -> None:
    """Offset, size and checksum of each record are those of the content, in the file's order."""
    archive = open_archive(path)
    content = path.read_bytes()
    found = {record.name: content[record.offset : record.offset + record.size] for record in archive.records}
    assert found["data/0"] == bytes(small()["state_dict"]["a"].numpy())
    assert found["data/1"] == b"\1\1\1"
    assert found["data/2"] == b""
    assert all(zlib.crc32(found[record.name]) == record.crc for record in archive.records)
    with zipfile.ZipFile(path) as entries:
        expected = {name.partition("/")[2]: entries.read(name) for name in entries.namelist()}
    assert found == expected
    offsets = [record.offset for record in archive.records]
    assert offsets == sorted(offsets)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_one_changed_byte_is_found_in_its_record(path: Path, data: st.DataObject) -> None:
    """Whatever byte of a record changes, and however, that record and no other is reported."""
    archive = open_archive(path)
    record = data.draw(st.sampled_from([record for record in archive.records if record.size]))
    position = data.draw(st.integers(record.offset, record.offset + record.size - 1))
    copy = path.with_name("changed.ckpt")
    shutil.copy(path, copy)
    flip(copy, position, data.draw(st.integers(1, 255)))
    changed = open_archive(copy)
    assert find_damage(changed, changed.records) == [record]


def outcome(path: Path, *, weights_only: bool = True, map_weights: bool = False) -> Any:
    """What reading gives: a value, or an error of ours; any other error is the test's."""
    try:
        return read_alone(open_archive(path), weights_only=weights_only, map_weights=map_weights)
    except CheckpointError as error:
        return error


@pytest.mark.parametrize("map_weights", [False, True])
def test_no_changed_byte_gives_other_content(map_weights: bool, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever byte of the file changes, the content is what was written, or else the error is ours."""
    monkeypatch.setattr(load, "_SMALL_FILE", 0)
    copy, content, chance = path.with_name("any.ckpt"), path.read_bytes(), random.Random(1)
    refused = 0
    for position in range(0, len(content), 2):
        changed = bytearray(content)
        changed[position] ^= chance.choice([0xFF, 1 << chance.randrange(8)])
        copy.write_bytes(changed)
        result = outcome(copy, map_weights=map_weights)
        assert isinstance(result, DamagedCheckpointError) or same(result, small()), f"byte {position}"
        refused += isinstance(result, DamagedCheckpointError)
    assert refused > sum(record.size for record in open_archive(path).records) / 2


def test_a_truncated_file_is_refused_at_any_length(path: Path) -> None:
    """However much of the end is missing, the file is damaged."""
    content, copy = path.read_bytes(), path.with_name("short.ckpt")
    for size in range(len(content)):
        copy.write_bytes(content[:size])
        with pytest.raises(DamagedCheckpointError, match=r"short\.ckpt"):
            open_archive(copy)


@pytest.mark.parametrize("weights_only", [True, False])
def test_an_old_file_is_read_or_refused(legacy: Path, weights_only: bool) -> None:
    """A file from before torch 1.6 has no records; cut off or changed anywhere, the error is ours."""
    archive = open_archive(legacy)
    assert (archive.records, archive.fingerprint, archive.tensor_data, archive.skeleton) == ((), None, (), ())
    assert same(outcome(legacy, weights_only=weights_only), small())
    content, copy, chance = legacy.read_bytes(), legacy.with_name("changed.ckpt"), random.Random(2)
    for size in range(len(content)):
        copy.write_bytes(content[:size])
        assert isinstance(outcome(copy, weights_only=weights_only), CheckpointError), f"cut off at {size}"
    for position in range(0, len(content), 7):
        changed = bytearray(content)
        changed[position] ^= 1 << chance.randrange(8)
        copy.write_bytes(changed)
        outcome(copy, weights_only=weights_only)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([b"", b"PK\3\4", b"\x80", b"\x80\2", b"PK\5\6"]), st.binary(max_size=80))
def test_garbage_is_refused(path: Path, beginning: bytes, rest: bytes) -> None:
    """Bytes that nobody has saved are never taken for a checkpoint, and never raise anything else."""
    garbage = path.with_name("garbage.ckpt")
    garbage.write_bytes(beginning + rest)
    assert isinstance(outcome(garbage), CheckpointError)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty; use an earlier checkpoint"),
        (b"learning_rate: 0.1\n", "is not a checkpoint: it begins with b'lear'"),
        (b"PK\3\4" + bytes(100), "is damaged: its directory, at the end, cannot be read"),
    ],
)
def test_what_is_no_checkpoint_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    """An empty file, another file and the beginning of one: each is called what it is, by the user's name."""
    file = tmp_path / "x.ckpt"
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=f"checkpoint s3://b/x {says}"):
        open_archive(file, "s3://b/x")


def test_a_directory_and_nothing_are_named(tmp_path: Path) -> None:
    """A directory is not a file, and a missing file is a FileNotFoundError, too."""
    with pytest.raises(DamagedCheckpointError, match="is a directory, not a file"):
        open_archive(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="does not exist") as caught:
        open_archive(tmp_path / "no.ckpt")
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(DamagedCheckpointError, match="cannot be read: Not a directory"):
        open_archive(saved(tmp_path / "it.ckpt", {}).path + "/x")


def test_a_record_that_is_said_to_be_a_directory(path: Path, tmp_path: Path) -> None:
    """It is damage: torch would not read it, and take whatever is in memory for its content."""
    with zipfile.ZipFile(path) as source:
        attributes = source.start_dir + 38
    shutil.copy(path, tmp_path / "d.ckpt")
    flip(tmp_path / "d.ckpt", attributes, 0x10)
    with pytest.raises(DamagedCheckpointError, match="has no proper header"):
        open_archive(tmp_path / "d.ckpt")


def test_compressed_records_are_refused(path: Path, tmp_path: Path) -> None:
    """An archive that another program has packed again is refused."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(tmp_path / "z.ckpt", "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(DamagedCheckpointError, match="has no proper header"):
        open_archive(tmp_path / "z.ckpt")


def test_switched_off_checksums_are_no_damage(tmp_path: Path) -> None:
    """Where torch was told to compute none, nothing is checked, nothing is reported, and no file equals another."""
    torch.serialization.set_crc32_options(False)
    try:
        archive = saved(tmp_path / "it.ckpt", small())
    finally:
        torch.serialization.set_crc32_options(True)
    assert not archive.has_checksums
    assert find_damage(archive, archive.records) == []
    assert archive.fingerprint is None
    assert same(outcome(tmp_path / "it.ckpt"), small())


def test_the_fingerprint_tells_content_from_content(path: Path, tmp_path: Path) -> None:
    """It is the same for a copy at another path, and another one for other weights of the same shape."""
    shutil.copy(path, tmp_path / "copy.ckpt")
    assert open_archive(path).fingerprint == open_archive(tmp_path / "copy.ckpt").fingerprint is not None
    other = small()
    other["state_dict"]["a"][7] += 1
    for content in (other, {**small(), "rest": [1, "owt", None]}):
        assert saved(tmp_path / "other.ckpt", content).fingerprint != open_archive(path).fingerprint


def test_records_that_overlap_are_refused(path: Path, tmp_path: Path) -> None:
    """Otherwise a file of some megabytes could claim terabytes of work."""
    shutil.copy(path, tmp_path / "many.ckpt")
    with pytest.raises(DamagedCheckpointError, match=r"records data/\S+ and data/\S+ overlap; use an earlier"):
        open_archive(with_overlapping_records(tmp_path / "many.ckpt", 3))


def test_a_file_that_changes_under_way_is_named(tmp_path: Path) -> None:
    """A file that is cut off, emptied or removed after it was opened raises an error of ours, and is no SIGBUS."""
    file = tmp_path / "it.ckpt"
    archive = saved(file, small())
    for size in (100, 0):
        os.truncate(file, size)
        with pytest.raises(DamagedCheckpointError, match="was cut off while it was read"):
            find_damage(archive, archive.records)
    file.unlink()
    with pytest.raises(CheckpointNotFoundError, match="was removed while it was read"):
        find_damage(archive, archive.records)
