"""The records of a checkpoint file, and whether each still has the checksum that was written with it.

A file of ``torch.save`` is a zip archive without compression, with a CRC-32 for each record: ``data.pkl`` is the
pickled structure, and ``data/N`` the memory of one or several tensors. ``torch.load`` does not check these sums.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from lightning_ddp_ext.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_SIGNATURE = b"PK\x03\x04"
_DIRECTORY = 0x10
_READ_SIZE = 256 << 10
_ANOTHER = "use an earlier checkpoint"
# How a RuntimeError of torch begins, or ends, that stands for one of the system.
_SYSTEMS = re.compile(r"^unable to (open|stat|mmap) |annot allocate memory")


@dataclass(frozen=True)
class Record:
    """One part of the archive.

    Attributes:
        name: without the archive's own folder: ``data.pkl``, ``data/0``.
        offset: where its content begins, in bytes from the beginning of the file.
        size: bytes of its content.
        crc: the checksum that was recorded for it.
    """

    name: str
    offset: int
    size: int
    crc: int

    @property
    def has_crc(self) -> bool:
        """Whether a checksum was recorded; ``torch.serialization.set_crc32_options(False)`` leaves zeros."""
        return self.crc != 0 or self.size == 0


@dataclass(frozen=True)
class Archive:
    """A checkpoint file.

    Attributes:
        path: where it can be opened on this machine.
        name: what the user calls it.
        size: bytes.
        records: in the order of the file; none, and no checksums, where torch wrote the file before version 1.6.
    """

    path: str
    name: str
    size: int
    records: tuple[Record, ...] = ()

    @cached_property
    def tensor_data(self) -> tuple[Record, ...]:
        """The records that are the memory of tensors."""
        return tuple(record for record in self.records if record.name.startswith("data/"))

    @cached_property
    def metadata(self) -> tuple[Record, ...]:
        """All other records."""
        return tuple(record for record in self.records if not record.name.startswith("data/"))

    @property
    def has_checksums(self) -> bool:
        """Whether every record has one."""
        return bool(self.records) and all(record.has_crc for record in self.records)

    @property
    def fingerprint(self) -> str | None:
        """Equal for files of equal content, whatever host they are on; ``None`` where that cannot be told."""
        if not self.has_checksums:
            return None
        return hashlib.sha256(repr((self.size, self.records)).encode()).hexdigest()


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Raise what prevents this process from reading the file ``name`` as an error that does not blame its bytes."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise unreadable(name, error) from error


def unreadable(name: str, error: Exception) -> CheckpointError:
    """Return the error for a file that may be whole: memory is short, the system refuses, or a class of it raises."""
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}".partition("\n")[0]
    if isinstance(error, MemoryError) or "annot allocate memory" in str(error):
        remedy = "free some memory"
    elif isinstance(error, PermissionError):
        remedy = f"let the user with id {os.geteuid()} read it"
    elif is_of_system(error):
        remedy = "look at its file system"
    else:
        remedy = "make the classes of its objects importable, and correct the one that raises"
    return CheckpointError(f"checkpoint {name} could not be read, but need not be damaged: {reason}; {remedy}")


def is_of_system(error: Exception) -> bool:
    """Whether the system refuses something; from torch that is a ``RuntimeError`` with the system's words."""
    return isinstance(error, (OSError, MemoryError)) or bool(_SYSTEMS.search(str(error)))


def open_archive(path: Path | str, name: str = "") -> Archive:
    """Read the directory of a checkpoint file.

    Args:
        path: where it can be opened on this machine.
        name: what the user calls it, where that is something else.

    Raises:
        CheckpointNotFoundError: there is no such file.
        DamagedCheckpointError: it is empty, truncated, a directory, or not a checkpoint; or its records overlap.
        CheckpointError: the system does not let this process read it.
    """
    name = name or str(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if _has_records(file, name):
                return Archive(str(path), name, size, _records(file, name, size))
            return Archive(str(path), name, size)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFoundError(
            f"checkpoint {name} does not exist (working directory {os.getcwd()}); give the path of a file"
        ) from None
    except IsADirectoryError:
        raise DamagedCheckpointError(
            f"checkpoint {name} is a directory, not a file that torch.save has written; give the path of a file in it, "
            "or use the strategy that has written it (sharded checkpoints are directories)"
        ) from None
    except (OSError, MemoryError) as error:
        raise unreadable(name, error) from error


def _has_records(file: BinaryIO, name: str) -> bool:
    """Whether it is an archive, or else a pickle, as torch wrote them before 1.6."""
    beginning = file.read(4)
    if not beginning:
        raise DamagedCheckpointError(f"checkpoint {name} is empty; {_ANOTHER}")
    if beginning != _SIGNATURE and beginning[:1] != b"\x80":
        raise DamagedCheckpointError(
            f"checkpoint {name} is not a checkpoint: it begins with {beginning!r}, not as a file of torch.save does"
        )
    return beginning == _SIGNATURE


def _records(file: BinaryIO, name: str, size: int) -> tuple[Record, ...]:
    records: list[Record] = []
    end = 0
    try:
        with zipfile.ZipFile(file) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        for entry in entries:
            record = _record(file, entry)
            if entry.header_offset < end:  # a small file can claim terabytes of work that way
                raise DamagedCheckpointError(
                    f"checkpoint {name} is damaged: records {records[-1].name} and {record.name} overlap; {_ANOTHER}"
                )
            records.append(record)
            end = record.offset + record.size
        if end > size:
            raise ValueError("records lie beyond its end")
    except (zipfile.BadZipFile, struct.error, ValueError, OverflowError, NotImplementedError, OSError) as error:
        cause = error.__context__ if isinstance(error, zipfile.BadZipFile) else error  # zipfile hides those of a disk
        if isinstance(cause, OSError) and cause.errno != errno.EINVAL:  # a place that is not in the file
            raise cause from None
        raise DamagedCheckpointError(
            f"checkpoint {name} is damaged: its directory, at the end, cannot be read ({error}); it has {size} bytes "
            f"and was probably cut off; {_ANOTHER}"
        ) from None
    if all(record.name != "data.pkl" for record in records):
        raise DamagedCheckpointError(
            f"checkpoint {name} is not a checkpoint: it is a zip archive without data.pkl, not one of torch.save"
        )
    return tuple(records)


def _record(file: BinaryIO, entry: zipfile.ZipInfo) -> Record:
    file.seek(entry.header_offset)
    header = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    is_directory = entry.external_attr & _DIRECTORY  # torch would read nothing of it, and use what is in memory
    if header[0] != _SIGNATURE or entry.compress_type != zipfile.ZIP_STORED or is_directory:
        raise ValueError(f"record {entry.filename} has no proper header")
    offset = entry.header_offset + _LOCAL_HEADER.size + header[-2] + header[-1]
    return Record(entry.filename.partition("/")[2], offset, entry.file_size, entry.CRC)


def find_damage(archive: Archive, records: Iterable[Record]) -> list[Record]:
    """The records whose content does not have the checksum that was recorded for it.

    The file is read, not mapped: a mapped file that is cut off meanwhile would kill the process with SIGBUS.

    Args:
        archive: the file that the records are in.
        records: those to check; one without a checksum is passed over.

    Raises:
        CheckpointNotFoundError: the file has been removed meanwhile.
        DamagedCheckpointError: it has become shorter.
        CheckpointError: the system does not let this process read it.
    """
    try:
        with open(archive.path, "rb") as file:
            return [record for record in records if record.has_crc and _crc_of(archive, file, record) != record.crc]
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"checkpoint {archive.name} was removed while it was read; {_ANOTHER}") from None
    except (OSError, MemoryError) as error:
        raise unreadable(archive.name, error) from error


def _crc_of(archive: Archive, file: BinaryIO, record: Record) -> int:
    crc, position, end = 0, record.offset, record.offset + record.size
    while position < end:
        piece = os.pread(file.fileno(), min(_READ_SIZE, end - position), position)
        if not piece:
            raise DamagedCheckpointError(f"checkpoint {archive.name} was cut off while it was read; {_ANOTHER}")
        crc = zlib.crc32(piece, crc)
        position += len(piece)
    return crc
