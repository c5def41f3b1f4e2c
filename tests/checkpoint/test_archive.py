"""The records of a checkpoint file are known to the byte, and whatever has happened to
one of them is noticed.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ddp_ext.checkpoint.archive import Archive
from lightning_ddp_ext.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
)
from tests.checkpoint.content import numbers, restored, same, saved

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")


def small() -> dict[str, Any]:
    return {
        "state_dict": {"a": numbers(20), "b": torch.ones(3, dtype=torch.int8)},
        "empty": torch.empty(0),
        "rest": [1, "two", None],
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a small checkpoint that tests do not change."""
    path = tmp_path_factory.mktemp("archive") / "it.ckpt"
    torch.save(small(), path)
    return path


def outcome(path: Path) -> Any:
    """Return the value that was read, or an error of ours; other errors propagate."""
    try:
        return restored(path, weights_only=True)
    except CheckpointError as error:
        return error


def test_no_changed_byte_gives_other_content(path: Path) -> None:
    """For any changed byte of the file, the content is still as written, or our error
    is raised.
    """
    copy = path.with_name("any.ckpt")
    content = path.read_bytes()
    chance = random.Random(1)
    refused = 0
    for position in range(0, len(content), 2):
        changed = bytearray(content)
        changed[position] ^= chance.choice([0xFF, 1 << chance.randrange(8)])
        copy.write_bytes(changed)
        result = outcome(copy)
        assert isinstance(result, DamagedCheckpointError) or same(result, small()), (
            f"byte {position}"
        )
        refused += isinstance(result, DamagedCheckpointError)
    assert refused > sum(record.file_size for record in Archive.open(path).records) / 2


def test_a_truncated_file_is_refused_at_any_length(path: Path) -> None:
    """The file counts as damaged, no matter how much of its end is missing."""
    copy = path.with_name("short.ckpt")
    shutil.copy(path, copy)
    for size in reversed(range(path.stat().st_size)):
        os.truncate(copy, size)
        with pytest.raises(DamagedCheckpointError, match=r"short\.ckpt"):
            Archive.open(copy)


def test_a_file_that_changes_under_way_is_named(tmp_path: Path) -> None:
    """A file that is cut off, emptied or removed after it was opened raises an error of
    ours, without SIGBUS.
    """
    file = tmp_path / "it.ckpt"
    archive = saved(file, small())
    for size in (100, 0):
        os.truncate(file, size)
        with pytest.raises(DamagedCheckpointError, match="was truncated while it was being read"):
            archive.check()
    file.unlink()
    with pytest.raises(CheckpointNotFoundError, match="was removed while being read"):
        archive.check()
