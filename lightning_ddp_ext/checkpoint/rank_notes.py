"""Keep each rank's notes in a file for survivors, and choose the survivor that saves.

The file is mapped, and the page cache keeps what a killed process wrote. The ranks of a
host open each other's files, then remove the names. So no other run finds a file, and
the kernel frees it when the last of these ranks exits.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import IO, Any

_SLOTS = 4  # slots for notes of each kind; ranks are at most one optimiser step apart
_SLOT = 1 << 36  # bytes from one slot to the next: the file has holes
_HEADER = struct.Struct("=QqQ")  # number of the note, batches, length
_TRAILER = struct.Struct("=Q")  # the number again
_POLL = 0.01
_MEMORY = "/dev/shm"  # on a disk each page that has been written back costs a page fault


class Kind(IntEnum):
    """The kinds of notes: random states at moments after a batch, then other data.

    The moments are in chronological order. A new note overwrites the oldest one of its
    kind.
    """

    # in a batch's backward pass, after which random numbers are rarely drawn, and
    # before validation
    BATCH = 0
    VALIDATING = 1  # after a validation step
    VALIDATED = 2
    EPOCH = 3  # before iterators over training data are created
    WINDOW = 4  # before the first batch of an optimiser step is fetched
    BUFFERS = 5
    LOADERS = 6  # the random states from which iterators over training data have drawn

    @classmethod
    def up_to(cls, latest: Kind) -> list[Kind]:
        """Return the moments until ``latest``, which is one of them."""
        return [each for each in cls if each <= latest]


class RankNotes:
    """The notes of one rank, in an open file that it writes and others read.

    Each note carries the count of batches that the rank had started in all epochs; a
    note on loaders carries the epoch.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mapped: list[Any] = [b""] * (_SLOTS * len(Kind))  # the mapped memory of each slot
        self._number = 0
        self._written = [0] * len(Kind)

    def write(self, kind: Kind, batches: int, *parts: Any) -> None:
        """Write a note made of ``parts`` over the oldest of its kind.

        Readers ignore a note that was interrupted by a kill.

        Raises:
            OSError: no space is left for it.
        """
        self._number += 1
        slot = kind * _SLOTS + self._written[kind] % _SLOTS
        self._written[kind] += 1
        content = b"".join((_HEADER.pack(self._number, batches, sum(map(len, parts))), *parts))
        end = len(content)
        if len(self._mapped[slot]) < end + _TRAILER.size:
            size = end + _TRAILER.size
            begin = slot * _SLOT
            # A write to a page without space would kill the process.
            os.posix_fallocate(self._descriptor, begin, size)
            self._mapped[slot] = mmap.mmap(self._descriptor, size, offset=begin)
        self._mapped[slot][:end] = content
        self._mapped[slot][end : end + _TRAILER.size] = _TRAILER.pack(self._number)

    def find(self, batches: int, *kinds: int) -> bytes | None:
        """Return the newest complete note of these kinds and batch count, if any."""
        notes = [self._read(kind * _SLOTS + slot) for kind in kinds for slot in range(_SLOTS)]
        found = [
            (number, content) for number, noted, content in notes if number and noted == batches
        ]
        return max(found)[1] if found else None

    def _read(self, slot: int) -> tuple[int, int, bytes]:
        """Return a note's number, its batches and its content.

        The number is 0 for a missing or torn note.
        """
        header = os.pread(self._descriptor, _HEADER.size, slot * _SLOT).ljust(_HEADER.size, b"\0")
        number, batches, length = _HEADER.unpack(header)
        rest = os.pread(self._descriptor, length + _TRAILER.size, slot * _SLOT + _HEADER.size)
        return (number if rest[length:] == _TRAILER.pack(number) else 0), batches, rest[:length]

    def close(self) -> None:
        """Close the file; the kernel frees it after its last reader has closed it."""
        os.close(self._descriptor)


def open_notes(gather: Callable[[Any], list[Any]], rank: int) -> dict[int, RankNotes]:
    """Create this rank's notes, and open those of the other ranks on its host.

    Collective. Return the notes by rank. ``gather`` returns the values of all ranks, by
    rank.

    Raises:
        OSError: a rank cannot create its file; raised on all ranks.
    """
    path = ""
    own = -1
    error = ""
    try:
        directory = _MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()
        path = os.path.join(directory, f"lightning_ddp_ext-notes-{secrets.token_hex(16)}")
        own = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as reason:
        error = f"rank {rank}: {reason}"
    try:
        paths, errors = zip(*gather((path, error)), strict=True)
        files = {other: own if other == rank else _open(each) for other, each in enumerate(paths)}
        gather(None)  # wait until all ranks have opened the files
    finally:
        if not error:
            os.unlink(path)
    notes = {other: RankNotes(file) for other, file in files.items() if file >= 0}
    if any(errors):
        for each in notes.values():
            each.close()
        raise OSError("; ".join(filter(None, errors)))
    return notes


def _open(path: str) -> int:
    """Open another rank's notes; return -1 if it is on another host or container."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return -1


def save_if_furthest(
    path: str, run: str, batches: int, save: Callable[[], object], seconds: float
) -> bool:
    """Save unless another survivor has saved the same or a later state.

    Return whether this rank has saved.

    A lock decides which one is first. The kernel releases it when its holder exits, so
    a rank that is killed during its save does not block the others. The lock file, next
    to the checkpoint at ``path``, records the token of this ``run`` and the number of
    ``batches`` that the saving rank has finished. After ``seconds``, TimeoutError is
    raised.
    """
    with open(lock_of(path), "a+b", buffering=0) as file:
        _lock(file, time.monotonic() + seconds)
        file.seek(0)
        saved_by, _, saved = file.read().partition(b" ")
        if saved_by == run.encode() and saved.isdigit() and int(saved) >= batches:
            return False
        save()
        with suppress(OSError):  # if nothing is recorded, another survivor saves again
            file.truncate(0)
            file.write(f"{run} {batches}".encode())
        return True


def lock_of(path: str) -> str:
    """Return the lock file of a checkpoint."""
    return str(Path(path).with_name(f".{Path(path).name}.lock"))


def _lock(file: IO[bytes], deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    "another rank did not finish its save within save_deadline"
                ) from None
        time.sleep(_POLL)
