"""Choose the surviving rank that saves, with a lock file next to the checkpoint.

The kernel releases the lock when its holder exits, so a rank that is killed during its
save does not block the others.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from lightning_ddp_ext.checkpoint.location import locate

_POLL_SECONDS = 0.01


def save_if_furthest(
    path: str, token: str, batches: int, save: Callable[[], object], seconds: float
) -> bool:
    """Save unless another survivor has saved the same or a later state.

    The lock file records what was saved: the token of the run, and the number of batches.

    Args:
        path: the path of the checkpoint.
        token: identifies this run, the same on all its ranks.
        batches: the number of batches that this rank has finished.
        save: writes the checkpoint.
        seconds: how long to wait for a rank that is saving (``save_deadline``).

    Returns:
        Whether this rank has saved.

    Raises:
        TimeoutError: another rank did not finish its save in time.
    """
    lock = lock_of(path)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with _locked(lock, time.monotonic() + seconds) as file:
        file.seek(0)
        if _saved_batches(file.read(), token) >= batches:
            return False
        try:
            save()
        except BaseException:
            lock.unlink(missing_ok=True)  # nothing is recorded, so that another survivor saves
            raise
        with suppress(OSError):  # if nothing is recorded, another survivor saves again
            file.truncate(0)
            file.write(f"{token} {batches}".encode())
        return True


def has_saved(path: str, token: str) -> bool:
    """Whether a survivor of the run has saved, as far as this host can see."""
    with suppress(OSError):
        return _saved_batches(lock_of(path).read_bytes(), token) >= 0
    return False


def lock_of(path: str) -> Path:
    """Return the lock file of a checkpoint; for one in a store, a file on this host."""
    local = locate(path).local
    if local is None:
        name = hashlib.sha256(path.encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir(), f"lightning_ddp_ext-{name}.lock")
    return local.with_name(f".{local.name}.lock")


@contextmanager
def _locked(lock: Path, deadline: float) -> Iterator[IO[bytes]]:
    """Open and lock a file for the block.

    Raises:
        TimeoutError: another rank holds it until the deadline.
    """
    while True:
        with open(lock, "a+b", buffering=0) as file:
            if _is_locked(file, lock):
                yield file
                return
        if time.monotonic() > deadline:
            raise TimeoutError("another rank did not finish its save within save_deadline")
        time.sleep(_POLL_SECONDS)


def _is_locked(file: IO[bytes], lock: Path) -> bool:
    """Try to lock an open file; return whether this succeeded, and it is still at its path.

    A rank whose save fails removes the file while others wait for it. Its lock is then
    worth nothing, because further ranks lock a new file.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lock = Path(folder, "lock")
    ...     with open(lock, "wb") as file:
    ...         is_locked = _is_locked(file, lock)
    ...         lock.unlink()
    ...         print(is_locked, _is_locked(file, lock))
    True False
    """
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), os.stat(lock))
    return False


def _saved_batches(content: bytes, token: str) -> int:
    """Return the number of batches that a survivor of the run has saved, or -1.

    Args:
        content: the content of the lock file.
        token: identifies the run.
    """
    token_of_file, _, batches = content.partition(b" ")
    return int(batches) if token_of_file == token.encode() and batches.isdigit() else -1
