"""Read a checkpoint file on one rank: check its records, and load it onto devices.

``torch.save`` writes an uncompressed zip archive with a CRC-32 checksum for each
record: ``data.pkl`` is the pickled structure, and ``data/N`` is the memory of one or
more tensors. ``torch.load`` does not check these checksums.

There are two kinds of errors: the file is damaged, or it could not be read.
"""

from __future__ import annotations

import copy
import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from mmap import MAP_SHARED
from typing import Any, BinaryIO
from zipfile import ZipFile, ZipInfo

import torch
from torch.serialization import set_default_mmap_options

from lightning_ddp_ext.errors import CheckpointError, DamagedCheckpointError
from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.ranks import reason_of

MapLocation = str | torch.device | Mapping[str, str] | Callable[..., Any] | None

_ZIP_SIGNATURE = b"PK\x03\x04"
_PICKLE_SIGNATURE = b"\x80"  # of protocol 2 and later
_DIRECTORY_ATTRIBUTE = 0x10  # as in MS-DOS
_REMEDY = "use an earlier checkpoint (with ckpt_path='last', delete this file)"
_READ_BYTES = 256 << 10
# Files up to this size are read instead of mapped, which is faster.
_SMALL_FILE_BYTES = 16 << 20
# zipfile's errors for damaged files; RuntimeError: a record claims to be encrypted, or
# to need a newer version.
_DAMAGE = (zipfile.BadZipFile, EOFError, struct.error, ValueError, OverflowError, RuntimeError)


@dataclass(frozen=True)
class LoadOptions:
    """Options for reading a checkpoint, the same on every rank.

    Attributes:
        map_location: as for ``torch.load``, except that ``None`` leaves tensors on the
            CPU, and ``"rank"`` puts them onto the rank's own device.
        weights_only: as for ``torch.load``.
        verify: whether checksums are checked.
    """

    map_location: MapLocation = None
    weights_only: bool | None = None
    verify: bool = True


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Convert errors in a block that reads a file to checkpoint errors.

    Args:
        name: the user's name for the file.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # of the system, a store, torch, or a class in the file
        raise CheckpointError(f"checkpoint {name} could not be read: {reason_of(error)}") from error


class Archive:
    """An open checkpoint file.

    It stays the same file even if its name is removed or given to another file.

    Args:
        file: the file, open for reading while the archive is used.
        name: the user's name for it.

    Attributes:
        name: the argument ``name``.
        records: its records, in their order; empty if the file was written before torch
            1.6, without checksums.

    Raises:
        DamagedCheckpointError: the file is empty, truncated, or not a checkpoint.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.name = name
        self._file = file
        self._zip = _open_zip(file, name)
        self.records = [] if self._zip is None else self._zip.infolist()

    @property
    def path(self) -> str:
        """A path of the open file, valid in this process."""
        return path_of(self._file.fileno())

    @property
    def status(self) -> os.stat_result:
        """The current status of the file."""
        return os.fstat(self._file.fileno())

    @property
    def has_checksums(self) -> bool:
        """Whether every record has a checksum."""
        return bool(self.records) and all(map(_has_crc, self.records))

    def check(self, index: int = 0, count: int = 1) -> None:
        """Check one of ``count`` shares of the records that have a checksum.

        The file is read instead of mapped, because truncating a mapped file would kill
        the process with SIGBUS.

        Args:
            index: the number of the share. The tensors are divided among the shares, and
                all other records are in each of them.
            count: the number of shares.

        Raises:
            DamagedCheckpointError: records were altered or truncated; the error names
                them.
        """
        tensors = [record for record in self.records if _is_tensor(record)]
        others = [record for record in self.records if not _is_tensor(record)]
        by_size = sorted(tensors, key=lambda record: record.file_size, reverse=True)
        to_check = [*others, *by_size[index::count]]
        damaged = tuple(_name(each) for each in to_check if not self._is_intact(each))
        if damaged:
            verb = "does" if len(damaged) == 1 else "do"
            raise DamagedCheckpointError(
                f"checkpoint {self.name} is damaged: {listed(damaged)} {verb} not match the"
                f" recorded CRC-32 checksum; {_REMEDY}, copy it again, or read it anyway with"
                " verify=False",
                damaged=damaged,
            )

    def _is_intact(self, record: ZipInfo) -> bool:
        """Whether a record matches its checksum, which zipfile compares at its end."""
        if not _has_crc(record):
            return True
        assert self._zip is not None, "the record is in it"
        try:
            with self._zip.open(record) as content:
                while content.read(_READ_BYTES):
                    pass
        except _DAMAGE:
            return False
        return True


def _open_zip(file: BinaryIO, name: str) -> ZipFile | None:
    """Open a checkpoint as a zip archive; return ``None`` for one from before torch 1.6.

    Raises:
        DamagedCheckpointError: the file is empty, truncated, or not a checkpoint.
    """
    beginning = file.read(len(_ZIP_SIGNATURE))
    if beginning.startswith(_PICKLE_SIGNATURE):
        return None
    size = file.seek(0, os.SEEK_END)
    if beginning != _ZIP_SIGNATURE:
        raise DamagedCheckpointError(
            f"{name} is not a checkpoint: its {size} bytes begin with {beginning!r}, unlike"
            f" those of files written by torch.save; {_REMEDY}"
        )
    try:
        opened = ZipFile(file)
        if not all(map(_is_valid, opened.infolist())):
            raise zipfile.BadZipFile("a record has an invalid header")
    except _DAMAGE as error:
        raise DamagedCheckpointError(
            f"checkpoint {name} is damaged: the zip directory at its end cannot be read"
            f" ({error}); the file has {size} bytes and was probably truncated; {_REMEDY}"
        ) from None
    return opened


def path_of(descriptor: int) -> str:
    """Return a path of an open file, valid in this process."""
    return f"/proc/self/fd/{descriptor}"


def _name(record: ZipInfo) -> str:
    """Return a record's name without the top folder: ``data.pkl``, ``data/0``."""
    return record.filename.partition("/")[2]


def _is_tensor(record: ZipInfo) -> bool:
    return _name(record).startswith("data/")


def _is_valid(record: ZipInfo) -> bool:
    """Whether torch reads the record; for a directory, it uses uninitialised memory."""
    is_directory = bool(record.external_attr & _DIRECTORY_ATTRIBUTE)
    return record.compress_type == zipfile.ZIP_STORED and not is_directory


def _has_crc(record: ZipInfo) -> bool:
    """Whether a checksum was recorded.

    It is zero after ``torch.serialization.set_crc32_options(False)``.
    """
    return record.CRC != 0 or record.file_size == 0


def load(
    archive: Archive,
    options: LoadOptions,
    device: torch.device,
    *,
    map_weights: bool = False,
    is_own_copy: bool = False,
) -> Any:
    """Return the content of a checkpoint file, which must stay open meanwhile.

    Args:
        archive: the file; its records are not checked.
        options: how to read it.
        device: this rank's own device.
        map_weights: whether the ``state_dict`` may be mapped from the file, for callers
            that copy the weights into a model and drop them. Everything else is copied
            into this process's own memory.
        is_own_copy: whether the file is in this process's memory, so that all tensors
            may use it.

    Raises:
        Exception: torch's own error.
    """
    map_location: Any = "cpu" if options.map_location is None else options.map_location
    if isinstance(map_location, str) and map_location == "rank":
        map_location = device
    read = partial(
        torch.load, archive.path, map_location=map_location, weights_only=options.weights_only
    )
    can_map = bool(archive.records)  # torch cannot map a file from before torch 1.6
    if is_own_copy:
        with set_default_mmap_options(MAP_SHARED):  # a change needs no further memory
            return read(mmap=can_map)
    may_map = can_map and map_weights and options.map_location is None
    if may_map and archive.status.st_size > _SMALL_FILE_BYTES:
        content = _copy_except_weights(read(mmap=True))
        if content is not None:
            return content
    return read(mmap=False)


def _copy_except_weights(content: Any) -> dict[str, Any] | None:
    """Return a checkpoint whose ``state_dict`` stays mapped from the file.

    It is ``None`` if the ``state_dict`` is missing, or an object cannot be copied.
    """
    try:
        copied = copy.deepcopy({**content, "state_dict": None})
        return {**copied, "state_dict": content["state_dict"]}
    except Exception:  # of any class in the file
        return None
