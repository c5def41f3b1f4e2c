"""Renew the tables of README.md from the results in results/*.json, and the commits
that these were measured on.

    python benchmarks/tables.py

A table stands between ``<!-- table: launching start -->``, script and table, and ``<!--
end -->``; the commits between ``<!-- commits -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE / "README.md"
RESULTS = HERE / "results"


def shown(cell: Any) -> str:
    """Return a cell as it is printed: text and numbers as they are, a spread as median,
    lowest and highest.
    """
    if not isinstance(cell, dict):
        return str(cell)
    median, low, high = (f"{cell[name]:.{cell['digits']}f}" for name in ("median", "low", "high"))
    return f"{median} ({low} to {high})"


def markdown(columns: list[str], rows: list[list[Any]]) -> str:
    """Return a table as Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    text = "".join(f"| {' | '.join(map(shown, line))} |\n" for line in lines)
    return re.sub(r"\|  (?=\|)", "| ", text)


def renew(text: str) -> str:
    """Return a page with the tables that the results have now."""

    def table(match: re.Match[str]) -> str:
        found = json.loads((RESULTS / f"{match[1]}.json").read_text())["tables"][match[2]]
        return (
            f"<!-- table: {match[1]} {match[2]}"
            f" -->\n\n{markdown(found['columns'], found['rows'])}\n<!-- end -->"
        )

    text = re.sub(
        r"<!-- commits -->.*?<!-- end -->",
        f"<!-- commits -->\n\n{commits()}\n<!-- end -->",
        text,
        flags=re.DOTALL,
    )
    return re.sub(r"<!-- table: (\w+) (\w+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


def commits() -> str:
    """Return the scripts by the commit on which each was measured."""
    scripts: dict[str, list[str]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text())
        scripts.setdefault(f"`{found['commit']}`, {found['date']}", []).append(path.stem)
    return "".join(f"- {commit}: {', '.join(names)}\n" for commit, names in scripts.items())


if __name__ == "__main__":
    README.write_text(renew(README.read_text()))
