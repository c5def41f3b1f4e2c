"""Draw tables of `benchmarks/README.md` as bars: all rows of a table, the worst ones included.

python docs/charts.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks" / "README.md"
COLOURS = ("#adb5bd", "#3f51b5", "#f08c00")
LABELS, BARS, BAR, GAP = 330, 400, 14, 10

# The picture's name, how the table's first column begins, and the columns that are drawn.
CHARTS = {
    "start": ("seconds from launch", ["4 ranks"]),
    "step": ("values logged in each step", ["stock ddp, ms a step", "ddp_ext"]),
    "save": ("seconds of a save", ["stock, no fsync", "ours, fsync"]),
    "resume": ("seconds that resuming adds", ["stock", "mapped", "sent by rank 0"]),
    "batchnorm": ("milliseconds | plain", ["plain and two all-reduces", "ours"]),
}


def draw(name: str) -> str:
    """Return a chart as SVG.

    Raises:
        LookupError: the table or one of its columns is missing.
    """
    beginning, columns = CHARTS[name]
    header, *rows = table(beginning)
    for column in columns:
        if column not in header:
            raise LookupError(
                f"{BENCHMARKS} has no column {column!r} in the table {beginning!r}; correct"
                f" {__file__}"
            )
    numbers = {row[0]: [number(row[header.index(column)]) for column in columns] for row in rows}
    return picture({label: values for label, values in numbers.items() if any(values)}, columns)


def table(beginning: str) -> list[list[str]]:
    """Return the cells of a table, header first, without Markdown's marks."""
    text = BENCHMARKS.read_text().replace("`", "")
    found = re.search(rf"^\| {re.escape(beginning)}.*\n(?:\|.*\n)+", text, re.MULTILINE)
    if found is None:
        raise LookupError(
            f"{BENCHMARKS} has no table that begins with {beginning!r}; correct {__file__}"
        )
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()
    ]
    return [lines[0], *lines[2:]]


def number(cell: str) -> float:
    """Return the median that a cell begins with, or 0."""
    found = re.match(r"[\d.]+", cell)
    return float(found[0]) if found else 0.0


def picture(rows: dict[str, list[float]], columns: list[str]) -> str:
    """Return bars for each row, one of each column."""
    longest = max(max(values) for values in rows.values())
    height = 36 + len(rows) * (len(columns) * BAR + GAP)
    size = f"0 0 {LABELS + BARS + 60} {height}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="sans-serif">',
        f'<rect width="100%" height="{height}" fill="white"/>',
        *legend(columns if len(columns) > 1 else ["stock", "ours"]),
    ]
    top = 36
    for label, values in rows.items():
        parts.append(words(LABELS - 8, top + 11, label, anchor="end"))
        colours = COLOURS if len(columns) > 1 or "stock" in label else COLOURS[1:]
        for colour, value in zip(colours, values, strict=False):
            width = BARS * value / longest
            parts.append(
                f'<rect x="{LABELS}" y="{top}" width="{width:.1f}" height="{BAR - 2}"'
                f' fill="{colour}"/>'
            )
            parts.append(words(LABELS + width + 4, top + 10, f"{value:g}"))
            top += BAR
        top += GAP
    return "\n".join([*parts, "</svg>", ""])


def legend(columns: list[str]) -> Iterator[str]:
    """Name the colours in one line."""
    for place, (colour, column) in enumerate(zip(COLOURS, columns, strict=False)):
        x = LABELS + place * 150
        yield f'<rect x="{x}" y="8" width="12" height="12" fill="{colour}"/>'
        yield words(x + 16, 18, column)


def words(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    """Return a line of text that begins, or ends, at a point."""
    return (
        f'<text x="{x:.1f}" y="{y}" font-size="12" text-anchor="{anchor}"'
        f' fill="#222">{escape(text)}</text>'
    )


if __name__ == "__main__":
    for chart in CHARTS:
        (Path(__file__).parent / "images" / f"{chart}.svg").write_text(draw(chart))
