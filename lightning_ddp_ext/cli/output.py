"""Print text that may come from untrusted files: lines, columns, sizes and errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO


def print_line(text: str, file: TextIO | None = None) -> None:
    r"""Print a line, escaping unprintable characters, which may control a terminal.

    >>> print_line("weight\x1b[2J")
    weight\x1b[2J
    """
    shown = (
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
    print("".join(shown), file=file, flush=True)


def fail(error: object, status: int = 1) -> int:
    """Print an error to stderr, and return the exit status."""
    for line in str(error).splitlines():
        print_line(line, sys.stderr)
    return status


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print_line(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def size_text(size: int) -> str:
    """Format a number of bytes.

    >>> size_text(999), size_text(1536), size_text(5 << 30)
    ('999 B', '1.5 KiB', '5.0 GiB')
    """
    power = min((max(size, 1).bit_length() - 1) // 10, 4)
    return f"{size / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
