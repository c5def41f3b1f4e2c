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
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import BinaryIO
from zipfile import ZipFile, ZipInfo

from lightning_ddp_ext.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
)

_ZIP_SIGNATURE = b"PK\x03\x04"
_PICKLE_SIGNATURE = b"\x80"  # of protocol 2 and later
_DIRECTORY_ATTRIBUTE = 0x10  # as in MS-DOS
_PICKLE = "data.pkl"
_READ_BYTES = 256 << 10
_MAX_LISTED = 10  # damaged records that a message names
_REMEDY = "use an earlier checkpoint"
# The text of the RuntimeErrors that torch raises for system errors.
_SYSTEM_ERROR = re.compile(r"^unable to (open|stat|mmap|resize) |annot allocate memory")
# zipfile's errors for damaged files; RuntimeError: a record claims to be encrypted, or
# to need a newer version.
_DAMAGE = (zipfile.BadZipFile, EOFError, struct.error, ValueError, OverflowError, RuntimeError)


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
        self.records: tuple[ZipInfo, ...] = ()
        if _is_archive(file, name):
            self._zip = _read_directory(file, name)
            self.records = _records(self._zip, name)

    @classmethod
    @contextmanager
    def open(cls, path: Path | str, name: str = "") -> Iterator[Archive]:
        """Open a checkpoint file while the block runs.

        Args:
            path: its path on this machine.
            name: the user's name for it, if it differs.

        Raises:
            CheckpointNotFoundError: the file does not exist.
            DamagedCheckpointError: it is a directory, or damaged as for the class.
            CheckpointError: the system does not allow this process to read it.
        """
        name = name or str(path)
        with ExitStack() as stack:
            with reading(name):
                archive = cls(stack.enter_context(open(path, "rb")), name)
            yield archive

    @property
    def path(self) -> str:
        """A path of the open file, valid in this process."""
        return path_of(self._file.fileno())

    @property
    def status(self) -> os.stat_result:
        """The current status of the file."""
        return os.fstat(self._file.fileno())

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
            DamagedCheckpointError: records were altered or truncated; the error names
                them.
            CheckpointError: the system reports an error.
        """
        tensors = self.tensors if tensors is None else tensors
        others = [record for record in self.records if not _is_tensor(record)]
        to_check = filter(_has_crc, (*others, *tensors))
        with reading(self.name):
            damaged = tuple(_name(each) for each in to_check if not _is_intact(self._zip, each))
        if damaged:
            raise _mismatch(self.name, damaged)

    def read_pickle(self) -> bytes:
        """Return the pickled structure of an archive with checksums.

        Raises:
            DamagedCheckpointError: its bytes were altered.
        """
        [pickled] = [record for record in self.records if _name(record) == _PICKLE]
        try:
            return self._zip.read(pickled)
        except _DAMAGE:
            raise _mismatch(self.name, (_PICKLE,)) from None


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


def path_of(descriptor: int) -> str:
    """Return a path of an open file, valid in this process."""
    return f"/proc/self/fd/{descriptor}"


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Convert errors in a block that reads a file to checkpoint errors.

    Only a directory counts as damaged.

    Args:
        name: the user's name for the file.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFoundError(
            f"checkpoint {name} does not exist (working directory {os.getcwd()}); pass the path of"
            " a file"
        ) from None
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


def _records(archive: ZipFile, name: str) -> tuple[ZipInfo, ...]:
    """Return the records in the order of their positions.

    Raise if the pickled structure is not among them.
    """
    records = sorted(archive.infolist(), key=lambda record: record.header_offset)
    if _PICKLE not in map(_name, records):
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


def _read_directory(file: BinaryIO, name: str) -> ZipFile:
    """Read an archive's directory, and raise if it or one of its records is invalid."""
    size = file.seek(0, os.SEEK_END)
    try:
        archive = _zip_file(file)
        for record in archive.infolist():
            _raise_if_invalid(record, size)
    except _DAMAGE as error:
        raise DamagedCheckpointError(
            f"checkpoint {name} is damaged: the zip directory at its end cannot be read ({error});"
            f" the file has {size} bytes and was probably truncated; {_REMEDY}"
        ) from None
    return archive


def _raise_if_invalid(record: ZipInfo, file_size: int) -> None:
    is_compressed = record.compress_type != zipfile.ZIP_STORED
    # For a directory, torch would use uninitialised memory.
    is_directory = bool(record.external_attr & _DIRECTORY_ATTRIBUTE)
    if is_compressed or is_directory:
        raise ValueError(f"record {record.filename} has an invalid header")
    ends_at = record.header_offset + record.file_size
    if record.header_offset < 0 or ends_at > file_size:
        raise ValueError("some records lie outside the file")


def _zip_file(file: BinaryIO) -> ZipFile:
    """Read an archive's directory, and raise ``BadZipFile`` only if it is damaged.

    zipfile also raises it after some disk errors, and lets an ``OSError`` pass if a
    damaged offset lies outside the file.
    """
    try:
        return ZipFile(file)
    except (zipfile.BadZipFile, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        is_outside_file = isinstance(cause, OSError) and cause.errno == errno.EINVAL
        if isinstance(cause, OSError) and not is_outside_file:
            raise cause from None
        raise zipfile.BadZipFile(str(error)) from None


def _is_intact(archive: ZipFile, record: ZipInfo) -> bool:
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
