"""Mapped memory becomes the process's own at the same addresses: nobody who uses it notices, and no file is left."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from lightning_ddp_ext.checkpoint import mapping
from lightning_ddp_ext.checkpoint.mapping import make_own
from tests.checkpoint.content import mapped

SIZE = 5 * mmap.PAGESIZE + 100


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "it.ckpt"
    path.write_bytes(bytes(index % 251 for index in range(SIZE)))
    return path


def test_needed_parts_stay_as_they_were(path: Path) -> None:
    """Parts that are needed keep address and content, as it was changed in memory, and all of it can be written to."""
    content = path.read_bytes()
    tensor = torch.from_file(str(path), shared=False, size=SIZE, dtype=torch.uint8)
    array, address = tensor.numpy(), tensor.data_ptr()
    array[7] = 255
    make_own(address, SIZE, [(address + 5, 3), (address + 4000, 9000), (address + SIZE - 1, 1)])
    assert not mapped(path)
    path.write_bytes(b"")  # a mapped page would be gone
    assert tensor.data_ptr() == address
    assert bytes(array[5:8]) == content[5:7] + b"\xff"
    assert bytes(array[4000:13_000]) == content[4000:13_000]
    assert array[-1] == content[-1]
    assert array[9:4000].sum() == 0
    tensor.fill_(1)
    assert array.sum() == SIZE


def test_where_the_system_cannot_the_file_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the system's call nothing happens, and the content is still there."""
    monkeypatch.setattr(mapping, "_libc", None)
    tensor = torch.from_file(str(path), shared=False, size=SIZE, dtype=torch.uint8)
    make_own(tensor.data_ptr(), SIZE, [])
    assert mapped(path)
    assert bytes(tensor.numpy()) == path.read_bytes()


def test_too_little_memory_is_an_error(path: Path) -> None:
    """Where the system refuses, its error is raised and nothing is changed."""
    tensor = torch.from_file(str(path), shared=False, size=SIZE, dtype=torch.uint8)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        make_own(tensor.data_ptr(), 1 << 60, [])
    assert bytes(tensor.numpy()) == path.read_bytes()
