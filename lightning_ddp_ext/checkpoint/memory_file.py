"""A file that is in memory alone and has a path nonetheless, for libraries that open files by their paths."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO


@contextmanager
def memory_file() -> Iterator[tuple[BinaryIO, str]]:
    """An empty file, open for reading and writing, and a path by which this process can open it while the block runs.

    What maps it may outlive the block. Parts that nobody has written take no memory. Where the system has no such
    files it is a temporary one.
    """
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("lightning_ddp_ext"), "w+b", buffering=0) as file:
            yield file, f"/proc/self/fd/{file.fileno()}"
    else:  # pragma: no cover
        with tempfile.NamedTemporaryFile(buffering=0) as file:
            yield file, file.name  # type: ignore[misc]
