"""A file in memory has a path while it is needed, and is gone afterwards but for who has mapped it."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from lightning_ddp_ext.checkpoint.memory_file import memory_file
from tests.checkpoint.content import numbers


def test_it_can_be_opened_by_its_path() -> None:
    """What is written to it is read at the path, by libraries too, and nowhere afterwards."""
    with memory_file() as (file, path):
        torch.save(numbers(5), path)
        file.seek(0)
        assert file.read(2) == b"PK"
        assert torch.equal(torch.load(path, mmap=True), numbers(5))
    assert not Path(path).exists()


def test_a_mapping_outlives_it() -> None:
    """What is mapped stays readable when the file is gone, and holes are zeros that take no memory."""
    with memory_file() as (file, path):
        file.truncate(1 << 40)
        file.seek(1 << 30)
        file.write(b"end")
        assert Path(path).stat().st_blocks * 512 <= 1 << 16
        with open(path, "rb") as again:
            mapped = mmap.mmap(again.fileno(), (1 << 30) + 3, access=mmap.ACCESS_READ)
    assert mapped[-5:] == b"\0\0end"
    mapped.close()
