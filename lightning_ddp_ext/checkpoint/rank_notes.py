"""What each rank notes of itself in a file of its host, for the ranks that survive it; and which of them saves.

The file is mapped, and the page cache keeps what a killed process has written. The file has no name: ranks of a host
open each other's files and remove the names, so that it ends with the last of them, and no other run can find it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import secrets
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

_SLOT = 1 << 30  # bytes from one slot to the next: the file has holes
_HEADER = struct.Struct("=QqqQ")  # number of the note, batches, moment, length
_TRAILER = struct.Struct("=Q")  # the number again
_POLL = 0.01


class Moment(IntEnum):
    """When a note is made, in the order in which the moments follow one batch."""

    BACKWARD = 0  # of that batch: nothing is drawn after it, as a rule
    VALIDATION = 1  # before its iterators are made
    VALIDATED = 2  # after that, and after each of its steps
    EPOCH = 3  # before iterators over training data are made
    WINDOW = 4  # before the first batch of an optimiser step is fetched


@dataclass(frozen=True)
class Shelf:
    """Slots of a kind, of which the oldest is overwritten.

    Args:
        first: number of the first slot.
        slots: how many there are.
    """

    first: int
    slots: int


# Ranks are at most one optimiser step apart, in which each makes at most four notes of random states, besides those of
# the steps of a validation.
RANDOM, VALIDATING, BUFFERS, LOADERS = Shelf(0, 8), Shelf(8, 2), Shelf(10, 4), Shelf(14, 2)


@dataclass(frozen=True)
class Note:
    """One note, as it was read.

    Attributes:
        number: counts all notes of the rank.
        batches: that it had begun by then, in all epochs.
        moment: when that was.
        content: what it has noted.
    """

    number: int
    batches: int
    moment: int
    content: bytes


class RankNotes:
    """The notes of one rank, in a file that it writes and others read.

    Args:
        descriptor: the open file; it is closed by :meth:`close`.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory: dict[int, memoryview] = {}  # by slot
        self._number = 0
        self._written = dict.fromkeys((RANDOM, VALIDATING, BUFFERS, LOADERS), 0)

    def write(self, shelf: Shelf, batches: int, moment: int, content: bytes) -> None:
        """Write a note over the oldest of its shelf; one that is cut short by a kill does not count.

        Raises:
            OSError: there is no space left for it.
        """
        self._number += 1
        slot = shelf.first + self._written[shelf] % shelf.slots
        self._written[shelf] += 1
        end = _HEADER.size + len(content)
        memory = self._memory.get(slot)
        if memory is None or len(memory) < end + _TRAILER.size:
            memory = self._memory[slot] = self._map(slot, end + _TRAILER.size)
        memory[: _HEADER.size] = _HEADER.pack(self._number, batches, moment, len(content))
        memory[_HEADER.size : end] = content
        memory[end : end + _TRAILER.size] = _TRAILER.pack(self._number)

    def _map(self, slot: int, size: int) -> memoryview:
        """Map a slot; to write to a page for which there is no space would end the process."""
        if size > _SLOT:
            raise OSError(errno.EFBIG, f"{size >> 20} MiB are too many for a note")
        os.posix_fallocate(self._descriptor, slot * _SLOT, size)
        return memoryview(mmap.mmap(self._descriptor, size, offset=slot * _SLOT))

    def read(self, *shelves: Shelf) -> list[Note]:
        """Return the whole notes of shelves, the newest first."""
        slots = [slot for shelf in shelves for slot in range(shelf.first, shelf.first + shelf.slots)]
        found = [note for slot in slots if (note := self._read_slot(slot)) is not None]
        return sorted(found, key=lambda note: note.number, reverse=True)

    def _read_slot(self, slot: int) -> Note | None:
        header = os.pread(self._descriptor, _HEADER.size, slot * _SLOT)
        if len(header) < _HEADER.size:
            return None
        number, batches, moment, length = _HEADER.unpack(header)
        rest = os.pread(self._descriptor, length + _TRAILER.size, slot * _SLOT + _HEADER.size)
        is_whole = number > 0 and rest[length:] == _TRAILER.pack(number)
        return Note(number, batches, moment, rest[:length]) if is_whole else None

    def close(self) -> None:
        """Close the file, which ends with its last reader."""
        self._memory.clear()
        os.close(self._descriptor)


def open_notes(gather: Callable[[Any], list[Any]], rank: int) -> dict[int, RankNotes]:
    """Make this rank's notes and open those of the other ranks on its host; return them by rank. Collective.

    Args:
        gather: returns the values of all ranks, by rank.
        rank: this rank.

    Raises:
        OSError: a rank cannot make its file; on all ranks.
    """
    mark, error = secrets.token_bytes(16), ""
    descriptor, path = -1, ""
    try:
        descriptor, path = tempfile.mkstemp(prefix="ddpx-notes-")
        os.pwrite(descriptor, mark, BUFFERS.first * _SLOT)
    except OSError as reason:
        error = str(reason)
    told = gather((path, mark, error))
    others = {other: _open(path, mark) for other, (path, mark, _) in enumerate(told) if other != rank}
    gather(None)  # all have opened what they can
    if path:
        os.unlink(path)
    descriptors = {other: found for other, found in {**others, rank: descriptor}.items() if found >= 0}
    errors = [f"rank {other}: {error}" for other, (_, _, error) in enumerate(told) if error]
    if errors:
        for each in descriptors.values():
            os.close(each)
        raise OSError("; ".join(errors))
    return {other: RankNotes(found) for other, found in sorted(descriptors.items())}


def _open(path: str, mark: bytes) -> int:
    """Open the notes of another rank; -1 where they are on another host, or in another container."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        if os.pread(descriptor, len(mark), BUFFERS.first * _SLOT) == mark:
            return descriptor
        os.close(descriptor)
    return -1


# Who saves.


def save_if_furthest(path: str, run: str, batches: int, save: Callable[[bool], object], seconds: float) -> bool:
    """Save, unless another survivor has saved the same or a later state; return whether this rank did.

    A lock decides which one is first. It ends with its holder, so that a rank that is killed while it saves keeps none
    of the others from it.

    Args:
        path: of the checkpoint; the lock is beside it.
        run: names this start of the run.
        batches: how far this rank is.
        save: called while the lock is held, with whether this rank is to save the checkpoint.
        seconds: to wait for the lock.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock_of(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _lock(descriptor, time.monotonic() + seconds)
        is_furthest = batches > _saved(descriptor, run)
        save(is_furthest)
        if is_furthest:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"run": run, "batches": batches}).encode(), 0)
        return is_furthest
    finally:
        os.close(descriptor)


def lock_of(path: str) -> str:
    """Return the lock file of a checkpoint."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.lock")


def _lock(descriptor: int, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError("another rank has been saving it until save_deadline") from None
        time.sleep(_POLL)


def _saved(descriptor: int, run: str) -> int:
    """Return how far the state was that a survivor of this run has saved; -1 if none has."""
    with suppress(ValueError):
        found = json.loads(os.pread(descriptor, 4096, 0))
        if found["run"] == run:
            return int(found["batches"])
    return -1
