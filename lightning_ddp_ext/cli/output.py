"""How is what was found shown: as tables for people, or as one JSON document for programs?"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.table import Table

from lightning_ddp_ext.checkpoint.location import locate, on_local_disk
from lightning_ddp_ext.checkpoint.zip_crc import Archive, open_archive
from lightning_ddp_ext.errors import CheckpointError

# Columns where there is no terminal: whoever reads a pipe or a file wants whole lines.
_ENDLESS = 1 << 15
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Report:
    """What a command has found out."""

    facts: dict[str, Any]
    """All of it, for programs: the JSON document."""
    error: str | None = None
    """One sentence, if something is not as it should be."""
    parts: Sequence[Table | str] = field(default=())
    """All of it but the error, for people."""
    is_undecided: bool = False
    """Whether nothing could be said about what was asked."""


def report_on_file(path: str, look: Callable[[Archive], Report], facts: dict[str, Any]) -> Report:
    """What ``look`` reports on the checkpoint at a path or URL; the error beside ``facts`` if it cannot be opened."""
    try:
        with on_local_disk(locate(path)) as local:
            return look(open_archive(local, path))
    except CheckpointError as error:
        return Report(facts, str(error))
    except OSError as error:
        return Report(facts, f"checkpoint {path} cannot be read: {error.strerror or error}")


def finish(*reports: Report, as_json: bool) -> None:
    """Show the reports; end the command with status 1 if one has an error, and with 3 if one is undecided."""
    documents = [{**report.facts, "error": report.error} for report in reports]
    if as_json:
        typer.echo(json.dumps(documents[0] if len(documents) == 1 else {"files": documents}))
    for report in () if as_json else reports:
        _show(report)
    if any(report.error is not None for report in reports):
        raise typer.Exit(1)
    if any(report.is_undecided for report in reports):
        raise typer.Exit(3)


def _show(report: Report) -> None:
    console = _console(sys.stdout)
    for part in report.parts:
        console.print(printable(part) if isinstance(part, str) else part)
    if report.error is not None:
        lines = report.error.splitlines()
        _console(sys.stderr).print("\n".join(printable(line) for line in lines), soft_wrap=True)


def _console(file: TextIO) -> Console:
    width = None if file.isatty() else _ENDLESS
    return Console(file=file, width=width, markup=False, emoji=False, highlight=False)


def table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    """A table with these columns; those that hold numbers are set flush right."""
    result = Table(header_style="bold")
    for column in columns:
        result.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return result


def add_row(to: Table, *cells: str) -> None:
    """Add a row of text from a file that nobody vouches for."""
    to.add_row(*(printable(cell) for cell in cells))


def header(facts: dict[str, Any]) -> Table:
    """Names and values, one a line; what has no value is left out."""
    result = Table.grid(padding=(0, 2))
    result.add_column(no_wrap=True)
    result.add_column(overflow="fold")
    for name, value in facts.items():
        if value is not None:
            add_row(result, name, str(value))
    return result


def printable(text: str) -> str:
    r"""The text with what could steer a terminal, or cannot be printed at all, as escapes.

    >>> printable("weight\x1b[2J")
    'weight\\x1b[2J'
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def size_text(size: int) -> str:
    """A number of bytes as people write it.

    >>> size_text(999), size_text(1536), size_text(5 << 30)
    ('999 B', '1.5 KiB', '5.0 GiB')
    """
    power = min((max(size, 1).bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{size / 1024**power:.{1 if power else 0}f} {_UNITS[power]}"


def count_text(number: int, what: str) -> str:
    """A number with its noun.

    >>> count_text(1, "tensor"), count_text(2, "tensor")
    ('1 tensor', '2 tensors')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"
