"""Open a checkpoint file, and check its records against their checksums.

``torch.save`` writes an uncompressed zip archive with a CRC-32 checksum for each
record: ``data.pkl`` is the pickled structure, and ``data/N`` is the memory of one or
more tensors. ``torch.load`` does not check these checksums.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO
from zipfile import ZipInfo

from lightning_ddp_ext.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
)

_ZIP_SIGNATURE = b"PK\x03\x04"
_PICKLE_SIGNATURE = b"\x80"  # of protocol 2 and later
_DIRECTORY_ATTRIBUTE = 0x10  # as in MS-DOS
_READ_BYTES = 256 << 10
_MAX_LISTED = 10  # damaged records that a message names
_REMEDY = "use an earlier checkpoint"
# The text of the RuntimeErrors that torch raises for system errors.
_SYSTEM_ERROR = re.compile(r"^unable to (open|stat|mmap) |annot allocate memory")
# zipfile's errors for damaged files; RuntimeError: a record claims to be encrypted, or
# to need a newer version.
_DAMAGE = (zipfile.BadZipFile, EOFError, struct.error, ValueError, OverflowError, RuntimeError)


@dataclass(frozen=True)
class Archive:
    """A checkpoint file.

    Attributes:
        path: its path on this machine.
        name: the user's name for it.
        status: its status when it was opened; that of another file at the path differs.
        records: its records, in their order; empty if the file was written before torch
            1.6, without checksums.
    """

    path: str
    name: str
    status: os.stat_result
    records: tuple[ZipInfo, ...] = ()

    @classmethod
    def open(cls, path: Path | str, name: str = "") -> Archive:
        """Read the directory of a checkpoint archive.

        Args:
            path: its path on this machine.
            name: the user's name for it, if it differs.

        Raises:
            CheckpointNotFoundError: the file does not exist.
            DamagedCheckpointError: it is empty, truncated, a directory, or not a
                checkpoint, or its records overlap.
            CheckpointError: the system does not allow this process to read it.
        """
        name = name or str(path)
        with reading(name, is_first=True), open(path, "rb") as file:
            return cls(str(path), name, os.fstat(file.fileno()), _records(file, name))

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.status.st_size

    @cached_property
    def tensors(self) -> tuple[ZipInfo, ...]:
        """The records that contain the memory of tensors."""
        return tuple(filter(_is_tensor, self.records))

    @property
    def has_checksums(self) -> bool:
        """Whether every record has a checksum."""
        return bool(self.records) and all(map(_has_crc, self.records))

    def check(self, tensors: Iterable[ZipInfo] | None = None) -> None:
        """Check the records that have a checksum.

        The file is read instead of mapped, because truncating a mapped file would kill
        the process with SIGBUS.

        Args:
            tensors: the tensors to check besides all other records; ``None`` means all.

        Raises:
            DamagedCheckpointError: records were altered (the error names them), or the
                file was truncated.
            CheckpointNotFoundError: the file was removed after it was opened.
            CheckpointError: another file has replaced it since, or the system does not
                allow this process to read it.
        """
        if not self.records:
            return
        tensors = self.tensors if tensors is None else tensors
        others = [record for record in self.records if not _is_tensor(record)]
        with reading(self.name), open(self.path, "rb") as file:
            try:
                archive = _zip_file(file)
            except _DAMAGE:
                self._raise_if_replaced(file)
                message = f"checkpoint {self.name} was truncated while it was being read; {_REMEDY}"
                raise DamagedCheckpointError(message) from None
            to_check = filter(_has_crc, (*others, *tensors))
            damaged = tuple(_name(record) for record in to_check if not _is_intact(archive, record))
            if damaged:
                self._raise_if_replaced(file)
                raise _mismatch(self.name, damaged)

    def _raise_if_replaced(self, file: BinaryIO) -> None:
        """Raise if the file is another one than was opened first.

        Some network file systems give the same file another number, so the number alone
        means nothing.
        """
        first = self.status
        now = os.fstat(file.fileno())
        has_other_number = (now.st_dev, now.st_ino) != (first.st_dev, first.st_ino)
        has_changed = (now.st_size, now.st_mtime_ns) != (first.st_size, first.st_mtime_ns)
        if has_other_number and has_changed:
            raise CheckpointError(
                f"checkpoint {self.name} was replaced while being read; read it again"
            )


def _mismatch(name: str, damaged: tuple[str, ...]) -> DamagedCheckpointError:
    """Return the error for records that differ from their checksums."""
    left_out = len(damaged) - _MAX_LISTED
    listed = ", ".join(damaged[:_MAX_LISTED]) + (f" and {left_out} more" if left_out > 0 else "")
    verb = "does" if len(damaged) == 1 else "do"
    return DamagedCheckpointError(
        f"checkpoint {name} is damaged: {listed} {verb} not match the recorded CRC-32 checksum;"
        " use an earlier checkpoint, copy the file again, or read it anyway with verify=False",
        damaged=damaged,
    )


@contextmanager
def reading(name: str, *, is_first: bool = False) -> Iterator[None]:
    """Convert errors in a block that reads a file to checkpoint errors.

    Only a directory counts as damaged.

    Args:
        name: the user's name for the file.
        is_first: whether the block is the first to open the file; after that, a missing
            file was removed.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        message = (
            f"checkpoint {name} does not exist (working directory {os.getcwd()}); pass the path of"
            " a file"
            if is_first
            else f"checkpoint {name} was removed while being read; {_REMEDY}"
        )
        raise CheckpointNotFoundError(message) from None
    except IsADirectoryError:
        raise DamagedCheckpointError(
            f"checkpoint {name} is a directory, not a file written by torch.save; pass the path of"
            " a file in it, or use the strategy that wrote it (sharded checkpoints are"
            " directories)"
        ) from None
    except Exception as error:
        raise unreadable(name, error) from error


def unreadable(name: str, error: Exception) -> CheckpointError:
    """Return the error for a file that could not be read, but may be intact.

    For example, memory is short, the system refuses, or a class raises.
    """
    first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
    reason = getattr(error, "strerror", None) or first_line
    if is_system_error(error):
        remedy = "check its file system, its permissions and the free memory"
    else:
        remedy = "make sure that the classes of its objects can be imported and unpickled"
    return CheckpointError(
        f"checkpoint {name} could not be read, but may be intact: {reason}; {remedy}"
    )


def is_system_error(error: Exception) -> bool:
    """Whether this is a system error, which torch may raise as a ``RuntimeError``."""
    return isinstance(error, (OSError, MemoryError)) or bool(_SYSTEM_ERROR.search(str(error)))


def _records(file: BinaryIO, name: str) -> tuple[ZipInfo, ...]:
    """Return the records in the order of their positions, or raise if any is invalid.

    A file from before torch 1.6 has none.
    """
    if not _is_archive(file, name):
        return ()
    records = _read_directory(file, name)
    for record, following in pairwise(records):
        if record.header_offset + record.file_size >= following.header_offset:
            # Each byte could be in many records, and checking them could take for ever.
            raise DamagedCheckpointError(
                f"checkpoint {name} is damaged: records {_name(record)} and"
                f" {_name(following)} overlap; {_REMEDY}"
            )
    if "data.pkl" not in map(_name, records):
        raise DamagedCheckpointError(
            f"{name} is not a checkpoint: it is a zip archive without data.pkl, unlike those"
            " written by torch.save"
        )
    return tuple(records)


def _is_archive(file: BinaryIO, name: str) -> bool:
    """Whether the file is an archive, rather than a pickle from before torch 1.6.

    Raise if it is neither.
    """
    beginning = file.read(len(_ZIP_SIGNATURE))
    if not beginning:
        raise DamagedCheckpointError(f"checkpoint {name} is empty; {_REMEDY}")
    is_archive = beginning == _ZIP_SIGNATURE
    if not is_archive and not beginning.startswith(_PICKLE_SIGNATURE):
        raise DamagedCheckpointError(
            f"{name} is not a checkpoint: it begins with {beginning!r}, unlike files written by"
            " torch.save"
        )
    return is_archive


def _read_directory(file: BinaryIO, name: str) -> list[ZipInfo]:
    """Return the records in the order of their positions; raise if one is invalid."""
    size = file.seek(0, os.SEEK_END)
    try:
        with _zip_file(file) as archive:
            records = sorted(archive.infolist(), key=lambda record: record.header_offset)
        for record in records:
            _raise_if_invalid(record, size)
    except _DAMAGE as error:
        raise DamagedCheckpointError(
            f"checkpoint {name} is damaged: the zip directory at its end cannot be read ({error});"
            f" the file has {size} bytes and was probably truncated; {_REMEDY}"
        ) from None
    return records


def _raise_if_invalid(record: ZipInfo, file_size: int) -> None:
    is_compressed = record.compress_type != zipfile.ZIP_STORED
    # For a directory, torch would use uninitialised memory.
    is_directory = bool(record.external_attr & _DIRECTORY_ATTRIBUTE)
    if is_compressed or is_directory:
        raise ValueError(f"record {record.filename} has an invalid header")
    ends_at = record.header_offset + record.file_size
    if record.header_offset < 0 or ends_at > file_size:
        raise ValueError("some records lie outside the file")


def _zip_file(file: BinaryIO) -> zipfile.ZipFile:
    """Read an archive's directory, and raise ``BadZipFile`` only if it is damaged.

    zipfile also raises it after some disk errors, and lets an ``OSError`` pass if a
    damaged offset lies outside the file.
    """
    try:
        return zipfile.ZipFile(file)
    except (zipfile.BadZipFile, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        is_outside_file = isinstance(cause, OSError) and cause.errno == errno.EINVAL
        if isinstance(cause, OSError) and not is_outside_file:
            raise cause from None
        raise zipfile.BadZipFile(str(error)) from None


def _is_intact(archive: zipfile.ZipFile, record: ZipInfo) -> bool:
    """Whether a record's content matches its checksum.

    zipfile compares them at the end of reading.
    """
    try:
        with archive.open(record) as content:
            while content.read(_READ_BYTES):
                pass
    except _DAMAGE:
        return False
    return True


def _name(record: ZipInfo) -> str:
    """Return a record's name without the top folder: ``data.pkl``, ``data/0``."""
    return record.filename.partition("/")[2]


def _is_tensor(record: ZipInfo) -> bool:
    return _name(record).startswith("data/")


def _has_crc(record: ZipInfo) -> bool:
    """Whether a checksum was recorded.

    It is zero after ``torch.serialization.set_crc32_options(False)``.
    """
    return record.CRC != 0 or record.file_size == 0
