"""Damage checkpoint files as a faulty disk does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.serialization import set_crc32_options


def flip(path: Path, record: str) -> Path:
    """Change one bit in the middle of a record."""
    reader = torch._C.PyTorchFileReader(str(path))
    begin, size = reader.get_record_offset(record), len(reader.get_record(record))
    with path.open("r+b") as file:
        file.seek(begin + size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return path


class WouldRun:
    """Makes a directory when it is unpickled."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.directory),)


@contextmanager
def without_checksums() -> Iterator[None]:
    """Have ``torch.save`` record no checksums, as a user may choose."""
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(True)
