"""Damage to checkpoint files, as disks and networks do it."""

from __future__ import annotations

import copy
import mmap
import os
import zipfile
from pathlib import Path

from lightning_ddp_ext.checkpoint.zip_crc import open_archive


def flip(path: Path, record: str) -> Path:
    """Change one bit in the middle of a record."""
    found = next(each for each in open_archive(path).records or () if each.name == record)
    with path.open("r+b") as file:
        file.seek(found.offset + found.size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return path


def with_shadow_records(path: Path) -> Path:
    """Put a record of equal size, which nothing refers to, a whole number of pages before each record of a tensor.

    ``torch.load`` reads the same from the file as before.
    """
    with zipfile.ZipFile(path) as archive:
        folder = archive.namelist()[0].partition("/")[0]
        content = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    data = [name for name in content if name.startswith("data/")]
    with zipfile.ZipFile(path, "w") as archive:

        def write(name: str, record: bytes) -> None:
            archive.writestr(zipfile.ZipInfo(f"{folder}/{name}"), record)

        def length(name: str, size: int) -> int:
            return 30 + len(folder) + 1 + len(name) + size

        write("data.pkl", content["data.pkl"])
        block = sum(length(name, len(content[name])) for name in data)
        for name in data:
            write(_shadow(name), bytes(len(content[name])))
        write("filler", bytes(-(block + length("filler", 0)) % mmap.PAGESIZE))
        for name in data:
            write(name, content[name])
        for name in content:
            if name not in data and name != "data.pkl":
                write(name, content[name])
    return path


def _shadow(name: str) -> str:
    """Another name of the same length."""
    return "data/" + "abcdefghij"[int(name[5])] + name[6:]


def with_overlapping_records(path: Path, claims: int) -> Path:
    """Have the file's directory list each record of a tensor so many more times, under other names."""
    with zipfile.ZipFile(path, "a") as archive:
        for entry in [each for each in archive.infolist() if "/data/" in each.filename]:
            for number in range(claims):
                again = copy.copy(entry)
                again.filename = f"{entry.filename}-{number}"
                archive.filelist.append(again)
        archive._didModify = True
    return path
