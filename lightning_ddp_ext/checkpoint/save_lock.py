"""Choose the surviving rank that saves, with a lock file next to the checkpoint.

The kernel releases the lock when its holder exits, so a rank that is killed during its
save does not block the others.
"""

from __future__ import annotations

import fcntl
import hashlib
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
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
    lock_of(path).parent.mkdir(parents=True, exist_ok=True)
    with open(lock_of(path), "a+b", buffering=0) as file:
        _lock(file, time.monotonic() + seconds)
        file.seek(0)
        if _saved_batches(file.read(), token) >= batches:
            return False
        try:
            save()
        except BaseException:
            # Record nothing, so that another survivor saves. Keep the file: ranks may be
            # waiting for its lock, and others would lock a new file at the same time.
            file.truncate(0)
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


def _lock(file: IO[bytes], deadline: float) -> None:
    """Lock a file; raise a ``TimeoutError`` if another rank holds it until the deadline."""
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            raise TimeoutError("another rank did not finish its save within save_deadline")
        time.sleep(_POLL_SECONDS)


def _saved_batches(content: bytes, token: str) -> int:
    """Return the number of batches that a survivor of the run has saved, or -1.

    Args:
        content: the content of the lock file.
        token: identifies the run.
    """
    token_of_file, _, batches = content.partition(b" ")
    return int(batches) if token_of_file == token.encode() and batches.isdigit() else -1
