"""Open a store in a file, whatever an earlier run has left there, and delete the file when nobody needs it any more.

torch's ``FileStore`` (torch/csrc/distributed/c10d/FileStore.cpp) opens its file by name for each operation, even for
one in its destructor, and reads on from where it stopped. It reads for ever at half a record, such as a process leaves
that is killed while it writes, and in another file that has taken the first one's place.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

from torch.distributed import FileStore, Store

from lightning_ddp_ext.errors import StoreError
from lightning_ddp_ext.rank_logger import own_logger
from lightning_ddp_ext.rendezvous.deadline import Deadline

_logger = own_logger(__name__)

# How a file begins: the length of its first key, then that key.
_BEGINNING = struct.pack("<I", len("refcount/")) + b"refcount/"
# A process that opens the file puts something of its own here, and a complete run its name.
_ARRIVED = "arrived"
_ANSWERS_WITHIN = timedelta(seconds=10)


def open_file(path: str, deadline: Deadline) -> Store:
    """Open the file store at ``path``; what a killed run left in the file does no harm.

    Raises:
        StoreError: the file is something else than a store, or another process keeps it locked.
    """
    for _ in deadline.ticks():
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            store = _store_in(descriptor, path, deadline)
            store.set(_ARRIVED, secrets.token_hex(8))
            if _is_at(path, descriptor):
                store.set_timeout(_ANSWERS_WITHIN)
                return store  # the descriptor stays open until the process ends: the store goes by it
        except BaseException:
            os.close(descriptor)
            raise
        del store
        os.close(descriptor)  # the last rank of an earlier run has deleted the file in between
    raise StoreError(f"init_method 'file://{path}': not open after {deadline.seconds:g} s; raise init_timeout")


def settle_in(store: Store, run: str) -> None:
    """Note in a file store that ``run`` is complete: nobody else is expected to come to this file."""
    store.set(_ARRIVED, run)


def remove_file(path: str, run: str, deadline: Deadline) -> None:
    """Delete the file of ``run``, unless a process of another run has come to it since.

    Raises:
        StoreError: another process keeps it locked.
    """
    with suppress(FileNotFoundError), open(path, "r+b") as file:
        _lock(file.fileno(), path, deadline)
        if dict(_records(file.read())).get(b"/" + _ARRIVED.encode()) == run.encode():
            os.unlink(path)


def _store_in(descriptor: int, path: str, deadline: Deadline) -> Store:
    _lock(descriptor, path, deadline)
    _cut_torn_tail(descriptor, path)
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    # By this name the store finds its file also when that has been deleted, and no other that has its path by then.
    name = f"/proc/self/fd/{descriptor}"
    return FileStore(name if os.path.exists(name) else path, -1)


def _is_at(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _lock(descriptor: int, path: str, deadline: Deadline) -> None:
    for _ in deadline.ticks():
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
    raise StoreError(
        f"init_method 'file://{path}': another process has kept the file locked for {deadline.seconds:g} s; "
        "end it or choose another file"
    )


def _cut_torn_tail(descriptor: int, path: str) -> None:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        content = file.read()
    beginning = content[: len(_BEGINNING)]
    if not _BEGINNING.startswith(beginning):
        raise StoreError(
            f"init_method 'file://{path}': the file holds something else than a store (it begins with {beginning!r}); "
            "name a file that does not exist yet"
        )
    whole = sum(8 + len(key) + len(value) for key, value in _records(content))
    if whole < len(content):
        _logger.warning("%s: cut %d bytes of an unfinished record that a killed run left", path, len(content) - whole)
        os.ftruncate(descriptor, whole)


def _records(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The whole records of a file, in the order in which they were written: key and value."""
    pieces = _pieces(content)
    return zip(pieces, pieces, strict=False)


def _pieces(content: bytes) -> Iterator[bytes]:
    position = 0
    while position + 4 <= len(content):
        end = position + 4 + struct.unpack_from("<I", content, position)[0]
        if end > len(content):
            return
        yield content[position + 4 : end]
        position = end
