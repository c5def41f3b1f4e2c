"""Print text that may come from untrusted files."""

from __future__ import annotations

import sys
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


def print_error(error: object) -> None:
    """Print an error to stderr."""
    for line in str(error).splitlines():
        print_line(line, sys.stderr)
