"""Keep notes of each rank in a file of its host for surviving ranks, and choose the survivor that saves.

The file is mapped, and the page cache keeps the data of a killed process. The ranks of a host open each other's files
and remove the names. So no other run finds a file, and the kernel frees it when the last of these ranks exits.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TextIO

_SLOTS = 4  # of each kind; ranks are at most one optimiser step apart
_SLOT = 1 << 36  # bytes from one slot to the next: the file has holes
_HEADER = struct.Struct("=QqQ")  # number of the note, batches, length
_TRAILER = struct.Struct("=Q")  # the number again
_POLL = 0.01
_MEMORY = "/dev/shm"  # on a disk each page that has been written back costs a page fault


class Kind(IntEnum):
    """The content of a note: random states at a moment, in the order of moments after one batch, or other data.

    The oldest note of a kind is overwritten.
    """

    BACKWARD = 0  # of that batch: usually nothing is drawn after it
    VALIDATION = 1  # before its iterators are made
    VALIDATED = 2  # after that, and after each of its steps
    EPOCH = 3  # before iterators over training data are made
    WINDOW = 4  # before the first batch of an optimiser step is fetched
    BUFFERS = 5
    LOADERS = 6  # the random states from which iterators over training data have drawn


@dataclass(frozen=True)
class Note:
    """A note that was read.

    Attributes:
        number: the ordinal among all notes of the rank.
        kind: the kind of content.
        batches: the number of batches that the rank had started, in all epochs.
        content: the noted data.
    """

    number: int
    kind: Kind
    batches: int
    content: bytes


class RankNotes:
    """The notes of one rank, in a file that it writes and others read.

    Args:
        descriptor: the open file; it is closed by :meth:`close`.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = [memoryview(b"")] * (_SLOTS * len(Kind))  # of each slot
        self._number = 0
        self._written = [0] * len(Kind)

    def write(self, kind: Kind, batches: int, *parts: Any) -> None:
        """Write a note over the oldest of its kind; a note that a kill interrupted does not count.

        Args:
            kind: the kind of content.
            batches: the number of batches that the rank has started, in all epochs.
            parts: the content, in pieces of bytes.

        Raises:
            OSError: no space is left for it.
        """
        self._number += 1
        slot = kind * _SLOTS + self._written[kind] % _SLOTS
        self._written[kind] += 1
        end = _HEADER.size + sum(map(len, parts))
        memory = self._memory[slot]
        if len(memory) < end + _TRAILER.size:
            memory = self._memory[slot] = self._map(slot, end + _TRAILER.size)
        _HEADER.pack_into(memory, 0, self._number, batches, end - _HEADER.size)
        begin = _HEADER.size
        for part in parts:
            memory[begin : (begin := begin + len(part))] = part
        _TRAILER.pack_into(memory, end, self._number)

    def _map(self, slot: int, size: int) -> memoryview:
        """Map a slot, after allocating it: a write to a page without space would kill the process."""
        os.posix_fallocate(self._descriptor, slot * _SLOT, size)
        return memoryview(mmap.mmap(self._descriptor, size, offset=slot * _SLOT))

    def read(self, *kinds: Kind) -> list[Note]:
        """Return the whole notes of some kinds, the newest first."""
        found = [note for kind in kinds for slot in range(_SLOTS) if (note := self._read_slot(kind, slot)) is not None]
        return sorted(found, key=lambda note: note.number, reverse=True)

    def _read_slot(self, kind: Kind, slot: int) -> Note | None:
        begin = (kind * _SLOTS + slot) * _SLOT
        header = os.pread(self._descriptor, _HEADER.size, begin)
        if len(header) < _HEADER.size:
            return None
        number, batches, length = _HEADER.unpack(header)
        rest = os.pread(self._descriptor, length + _TRAILER.size, begin + _HEADER.size)
        is_whole = number > 0 and rest[length:] == _TRAILER.pack(number)
        return Note(number, kind, batches, rest[:length]) if is_whole else None

    def close(self) -> None:
        """Close the file, which is freed after its last reader."""
        self._memory.clear()
        os.close(self._descriptor)


def open_notes(gather: Callable[[Any], list[Any]], rank: int) -> dict[int, RankNotes]:
    """Make this rank's notes and open those of the other ranks on its host; return them by rank. Collective.

    Args:
        gather: returns the values of all ranks, by rank.
        rank: this rank.

    Raises:
        OSError: a rank cannot create its file; on all ranks.
    """
    path, error, own = "", "", -1
    try:
        directory = _MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()
        path = os.path.join(directory, f"lightning_ddp_ext-notes-{secrets.token_hex(16)}")
        own = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as reason:
        error = f"rank {rank}: {reason}"
    paths, errors = zip(*gather((path, error)), strict=True)
    found = {other: own if other == rank else _open(path) for other, path in enumerate(paths)}
    gather(None)  # all ranks have opened their files
    if own >= 0:
        os.unlink(path)
    notes = {other: RankNotes(descriptor) for other, descriptor in found.items() if descriptor >= 0}
    if any(errors):
        for each in notes.values():
            each.close()
        raise OSError("; ".join(filter(None, errors)))
    return notes


def _open(path: str) -> int:
    """Open the notes of another rank; -1 if they are on another host, or in another container."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return -1


# Choice of the rank that saves.


def save_if_furthest(path: str, run: str, batches: int, save: Callable[[], object], seconds: float) -> bool:
    """Save, unless another survivor has saved the same or a later state; return whether this rank did.

    A lock decides which one is first. The kernel releases it when its holder exits, so a rank that is killed during its
    save does not block the others.

    Args:
        path: path of the checkpoint; the lock file is beside it.
        run: the name of this start of the run.
        batches: the number of batches that this rank has finished.
        save: called while the lock is held.
        seconds: the time to wait for the lock.
    """
    with open(lock_of(path), "a+") as file:
        _lock(file, time.monotonic() + seconds)
        file.seek(0)
        saved_by, saved = json.loads(file.read() or '["", 0]')
        if saved_by == run and saved >= batches:
            return False
        save()
        file.truncate(0)
        json.dump([run, batches], file)
        return True


def lock_of(path: str) -> str:
    """Return the lock file of a checkpoint."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.lock")


def _lock(file: TextIO, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError("another rank has been saving it until save_deadline") from None
        time.sleep(_POLL)
