"""Disks that are small, read-only or somebody else's, for tests of what a user's disk may do; they need root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def why_no_disks() -> str | None:
    """Why this machine cannot mount any, or None."""
    return None if os.geteuid() == 0 else "mounting a file system needs root"


@contextmanager
def small_disk(directory: Path, mebibytes: int) -> Iterator[Path]:
    """A file system of its own at ``directory``, with so much space."""
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=777", "tmpfs", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


def make_read_only(directory: Path) -> None:
    """From now on nobody can write to the small disk."""
    subprocess.run(["mount", "-o", "remount,ro", directory], check=True)
