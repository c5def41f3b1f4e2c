"""Keep records of each rank in a file that outlives the rank's process.

The page cache keeps what a killed process has written. The ranks of a host open each
other's files, then remove the names. So no other run finds a file, and the kernel frees
it when the last of these ranks exits.
"""

from __future__ import annotations

import errno
import os
import struct
import tempfile
from contextlib import ExitStack
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from lightning_ddp_ext.ranks import Ranks

_SLOTS_PER_KIND = 4  # ranks are at most one optimiser step apart
_SLOT_BYTES = 1 << 36  # from one slot to the next: the file has holes
_HEADER = struct.Struct("=QqQ")  # number of the record, batches, length of the content
_TRAILER = struct.Struct("=Q")  # the number again
_MEMORY = "/dev/shm"  # on a disk each page that has been written back costs a page fault


class Kind(IntEnum):
    """The kinds of records: random states at moments after a batch, then other data.

    The moments are in chronological order. A new record overwrites the oldest one of
    its kind.
    """

    # in a batch's backward pass, after which random numbers are rarely drawn, and
    # before validation
    BATCH = 0
    VALIDATING = 1  # after a validation step
    VALIDATED = 2
    EPOCH = 3  # before iterators over training data start
    WINDOW = 4  # before the first batch of an optimiser step is fetched
    BUFFERS = 5
    LOADERS = 6  # the random states from which iterators over training data have drawn

    @classmethod
    def up_to(cls, latest: Kind) -> list[Kind]:
        """Return the moments until ``latest``, which is one of them."""
        return [each for each in cls if each <= latest]


class _Record(NamedTuple):
    """A record as it is in the file."""

    number: int  # increases with each record of the rank; 0 in an empty slot
    batches: int
    content: bytes
    trailer: bytes

    @property
    def is_complete(self) -> bool:
        """Whether the record was written to its end; a kill interrupts a write."""
        return self.number > 0 and self.trailer == _TRAILER.pack(self.number)


class RankRecords:
    """The records of one rank, in an open file that it writes and others read.

    Each record carries the count of batches that the rank had started in all epochs; a
    record on loaders carries the epoch.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._number = 0
        self._written = [0] * len(Kind)  # number of records, by kind

    def write(self, kind: Kind, batches: int, content: bytes) -> None:
        """Write a record over the oldest of its kind.

        Raises:
            OSError: no space is left for it.
        """
        self._number += 1
        slot = self._written[kind] % _SLOTS_PER_KIND
        self._written[kind] += 1
        header = _HEADER.pack(self._number, batches, len(content))
        record = header + content + _TRAILER.pack(self._number)
        if os.pwrite(self._descriptor, record, _offset(kind, slot)) < len(record):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def find(self, batches: int, *kinds: int) -> bytes | None:
        """Return the newest complete record of these kinds and batch count, if any."""
        slots = [(kind, slot) for kind in kinds for slot in range(_SLOTS_PER_KIND)]
        records = [self._read(kind, slot) for kind, slot in slots]
        fitting = [record for record in records if record.is_complete and record.batches == batches]
        return max(fitting).content if fitting else None

    def _read(self, kind: int, slot: int) -> _Record:
        begin = _offset(kind, slot)
        header = os.pread(self._descriptor, _HEADER.size, begin).ljust(_HEADER.size, b"\0")
        number, batches, length = _HEADER.unpack(header)
        rest = os.pread(self._descriptor, length + _TRAILER.size, begin + _HEADER.size)
        return _Record(number, batches, rest[:length], rest[length:])

    def close(self) -> None:
        """Close the file; the kernel frees it after its last reader has closed it."""
        os.close(self._descriptor)


def _offset(kind: int, slot: int) -> int:
    return (kind * _SLOTS_PER_KIND + slot) * _SLOT_BYTES


def open_records(ranks: Ranks) -> dict[int, RankRecords]:
    """Create this rank's records, and open those of the other ranks on its host.

    Collective. Return the records by rank.

    Raises:
        OSError: a rank cannot create its file; raised on all ranks.
    """
    with ExitStack() as names, ExitStack() as descriptors:
        path, own = ranks.on_every_rank(
            partial(_create, names, descriptors), "creating a file for its records"
        )
        records = {ranks.rank: RankRecords(own)}
        for rank, path_of_rank in enumerate(ranks.gather(path)):
            descriptor = None if rank == ranks.rank else _open(path_of_rank)
            if descriptor is not None:
                descriptors.callback(os.close, descriptor)
                records[rank] = RankRecords(descriptor)
        ranks.gather(None)  # wait until all ranks have opened the files
        descriptors.pop_all()  # the caller closes the records
    return records


def _create(names: ExitStack, descriptors: ExitStack) -> tuple[str, int]:
    """Create a file with a random name, and return its path and descriptor.

    The stacks remove the name and close the descriptor.
    """
    directory = _MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()
    descriptor, path = tempfile.mkstemp(prefix="lightning_ddp_ext-records-", dir=directory)
    names.callback(os.unlink, path)
    descriptors.callback(os.close, descriptor)
    return path, descriptor


def _open(path: str) -> int | None:
    """Open another rank's file; return ``None`` if it is on another host or container."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
