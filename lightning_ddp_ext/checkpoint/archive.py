"""What a checkpoint file is made of, and whether each part of it still is what was written.

torch's format is a zip archive, not compressed, with a CRC-32 for each record: the pickled skeleton ``data.pkl`` and
one record ``data/N`` for the memory of one or several tensors. ``torch.load`` does not look at the checksums.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import BinaryIO

from lightning_ddp_ext.errors import CheckpointNotFoundError, DamagedCheckpointError

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_SIGNATURE = b"PK\x03\x04"
_DIRECTORY = 0x10
# Pieces of this size are checked by several threads at once, so that one large tensor does not keep a single core busy.
_PIECE = 16 << 20


@dataclass(frozen=True)
class Record:
    """One part of the archive."""

    name: str
    """Without the archive's own folder: ``data.pkl``, ``data/0``."""
    offset: int
    """Of its content, in bytes from the beginning of the file."""
    size: int
    """Bytes."""
    crc: int

    @property
    def has_crc(self) -> bool:
        """Whether a checksum was recorded; ``torch.serialization.set_crc32_options(False)`` leaves zeros."""
        return self.crc != 0 or self.size == 0

    @property
    def is_tensor_data(self) -> bool:
        """Whether it is the memory of tensors."""
        return self.name.startswith("data/")


@dataclass(frozen=True)
class Archive:
    """The records of a checkpoint file, in the order in which they are in it.

    ``records`` is ``None`` for a file that torch wrote before version 1.6: it has no records and no checksums.
    """

    path: str
    """Where it can be opened on this machine."""
    name: str
    """What the user calls it."""
    size: int
    """Bytes."""
    records: tuple[Record, ...] | None

    @cached_property
    def tensor_data(self) -> tuple[Record, ...]:
        """The records that are the memory of tensors."""
        return tuple(record for record in self.records or () if record.is_tensor_data)

    @cached_property
    def skeleton(self) -> tuple[Record, ...]:
        """All other records."""
        return tuple(record for record in self.records or () if not record.is_tensor_data)

    @property
    def fingerprint(self) -> str | None:
        """Equal for files of equal content, whatever host they are on; ``None`` where that cannot be told."""
        if self.records is None or not all(record.has_crc for record in self.records):
            return None
        text = repr((self.size, [(record.name, record.offset, record.size, record.crc) for record in self.records]))
        return hashlib.sha256(text.encode()).hexdigest()


def open_archive(path: Path | str, name: str = "") -> Archive:
    """Read the directory of a checkpoint file.

    Args:
        path: where it can be opened on this machine.
        name: what the user calls it, where that is something else.

    Raises:
        CheckpointNotFoundError: there is no such file.
        DamagedCheckpointError: it is empty, truncated, a directory, or something else altogether.
    """
    name = name or str(path)
    try:
        with open(path, "rb") as file:
            return _parse(file, str(path), name)
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"checkpoint {name} does not exist (working directory {os.getcwd()}); give the path of a file"
        ) from None
    except IsADirectoryError:
        raise DamagedCheckpointError(
            f"checkpoint {name} is a directory, not a file that torch.save has written; give the path of a file in it, "
            "or use the strategy that has written it (sharded checkpoints are directories)"
        ) from None
    except OSError as error:
        raise DamagedCheckpointError(f"checkpoint {name} cannot be read: {error.strerror or error}") from error


def _parse(file: BinaryIO, path: str, name: str) -> Archive:
    size = os.fstat(file.fileno()).st_size
    beginning = file.read(4)
    if not beginning:
        raise DamagedCheckpointError(f"checkpoint {name} is empty; {_ANOTHER}")
    if beginning != _SIGNATURE:
        if beginning[:1] == b"\x80":  # a pickle, as torch wrote them before 1.6
            return Archive(path, name, size, None)
        raise DamagedCheckpointError(
            f"checkpoint {name} is not a checkpoint: it begins with {beginning!r}, not as a file of torch.save does"
        )
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        records = tuple(_record(file, entry) for entry in sorted(entries, key=lambda entry: entry.header_offset))
    except (zipfile.BadZipFile, struct.error, ValueError, OverflowError, NotImplementedError) as error:
        raise DamagedCheckpointError(
            f"checkpoint {name} is damaged: its directory, at the end, cannot be read ({error}); it has {size} bytes "
            f"and was probably cut off; {_ANOTHER}"
        ) from None
    if any(record.offset + record.size > size for record in records):
        raise DamagedCheckpointError(f"checkpoint {name} is damaged: records lie beyond its {size} bytes; {_ANOTHER}")
    return Archive(path, name, size, records)


_ANOTHER = "use an earlier checkpoint"


def _record(file: BinaryIO, entry: zipfile.ZipInfo) -> Record:
    file.seek(entry.header_offset)
    header = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    is_directory = entry.external_attr & _DIRECTORY  # torch would read nothing of it, and use what is in memory
    if header[0] != _SIGNATURE or entry.compress_type != zipfile.ZIP_STORED or is_directory:
        raise ValueError(f"record {entry.filename} has no proper header")
    offset = entry.header_offset + _LOCAL_HEADER.size + header[-2] + header[-1]
    return Record(entry.filename.partition("/")[2], offset, entry.file_size, entry.CRC)


def find_damage(
    archive: Archive,
    records: Iterable[Record],
    *,
    threads: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> list[Record]:
    """The records whose content does not have the checksum that was recorded for it.

    Args:
        archive: the file they are in; it is mapped, so that no memory of this process's own is taken.
        records: those to check.
        threads: how many cores to use.
        on_progress: called with the number of bytes checked so far.

    Raises:
        CheckpointNotFoundError: the file has been removed meanwhile.
        DamagedCheckpointError: it has become shorter.
    """
    pieces = [piece for record in records if record.has_crc and record.size for piece in _pieces_of(record)]
    if not pieces:
        return []
    sums: dict[Record, int] = {}
    done = 0
    with _mapped(archive) as content, ThreadPoolExecutor(max(1, threads)) as pool:

        def crc_of(piece: tuple[Record, int, int]) -> int:
            with memoryview(content) as view, view[piece[1] : piece[2]] as part:
                return zlib.crc32(part)

        for (record, start, end), crc in zip(pieces, _map(pool, crc_of, pieces, threads), strict=True):
            sums[record] = combined_crc(sums[record], crc, end - start) if record in sums else crc
            done += end - start
            if on_progress is not None:
                on_progress(done)
    return [record for record, crc in sums.items() if crc != record.crc]


def _map(
    pool: ThreadPoolExecutor,
    function: Callable[[tuple[Record, int, int]], int],
    pieces: Sequence[tuple[Record, int, int]],
    threads: int,
) -> Iterable[int]:
    return map(function, pieces) if threads <= 1 else pool.map(function, pieces)


def _pieces_of(record: Record) -> Iterable[tuple[Record, int, int]]:
    end = record.offset + record.size
    return ((record, start, min(start + _PIECE, end)) for start in range(record.offset, end, _PIECE))


def _mapped(archive: Archive) -> mmap.mmap:
    try:
        with open(archive.path, "rb") as file:
            if os.fstat(file.fileno()).st_size < archive.size:
                raise DamagedCheckpointError(f"checkpoint {archive.name} was cut off while it was read; {_ANOTHER}")
            return mmap.mmap(file.fileno(), archive.size, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"checkpoint {archive.name} was removed while it was read; {_ANOTHER}") from None


def combined_crc(first: int, second: int, length: int) -> int:
    """The CRC-32 of two pieces joined, from theirs and the second one's ``length`` in bytes.

    Appending a zero bit is a linear map over GF(2); squaring its matrix doubles the number of bits. After Mark Adler's
    ``crc32_combine`` in zlib.

    >>> import zlib
    >>> combined_crc(zlib.crc32(b"check"), zlib.crc32(b"point"), 5) == zlib.crc32(b"checkpoint")
    True
    """
    return _times(_appending(length), first) ^ second


@lru_cache(maxsize=64)
def _appending(length: int) -> tuple[int, ...]:
    """What appending ``length`` zero bytes does to a checksum, as the columns of a matrix."""
    power: tuple[int, ...] = (0xEDB88320, *(1 << bit for bit in range(31)))  # one zero bit
    for _ in range(3):
        power = _product(power, power)
    result = tuple(1 << bit for bit in range(32))
    while length:
        if length & 1:
            result = _product(power, result)
        power = _product(power, power)
        length >>= 1
    return result


def _times(matrix: tuple[int, ...], vector: int) -> int:
    result = 0
    for column in matrix:
        if vector & 1:
            result ^= column
        vector >>= 1
    return result


def _product(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_times(left, column) for column in right)


def skeleton_bytes(archive: Archive) -> list[tuple[int, bytes]]:
    """What the file holds beside the memory of tensors: pieces of it with their offsets."""
    pieces, position = [], 0
    with open(archive.path, "rb") as file:
        for record in (*archive.tensor_data, Record("", archive.size, 0, 0)):
            file.seek(position)
            pieces.append((position, file.read(record.offset - position)))
            position = record.offset + record.size
    return pieces
