"""Measure the memory of a process."""

from __future__ import annotations

import threading
from pathlib import Path

MIB = 1 << 20


def status(*fields: str) -> int:
    """Return the sum of fields of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(fields)) * 1024


class Peak:
    """The most that this process has had for itself while the block ran, over what it
    had before; sampled.
    """

    def __enter__(self) -> Peak:
        self.before = self.highest = status("RssAnon:", "RssShmem:")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.highest = max(self.highest, status("RssAnon:", "RssShmem:"))

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def mebibytes(self) -> float:
        return (self.highest - self.before) / MIB


def reset_peak() -> int:
    """Forget the most that has been resident, and return what is."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Return the peak resident size since the last reset, in bytes."""
    return status("VmHWM:")
