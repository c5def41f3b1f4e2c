"""Pages show what the repository has: its files, its charts and its recorded results."""

import importlib
import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_the_page_of_the_four_tools_shows_their_example() -> None:
    """The page repeats the file of ``examples/`` word for word."""
    example = (ROOT / "examples/four_tools.py").read_text()
    assert f"\n{example}```\n" in (DOCS / "start/four-tools.md").read_text()


def test_pictures_are_as_their_scripts_draw_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The charts show the tables of benchmarks/README.md: `python docs/charts.py`
    renews them.
    """
    monkeypatch.syspath_prepend(DOCS)
    charts = importlib.import_module("charts")
    ring = importlib.import_module("ring")
    slow_ranks = importlib.import_module("slow_ranks").draw()
    drawn = {name: charts.draw(name) for name in charts.CHARTS}
    drawn |= {"ring": ring.draw(4), "slow-ranks": slow_ranks}
    assert {path.stem: path.read_text() for path in (DOCS / "images").iterdir()} == drawn


def test_the_page_of_benchmarks_shows_the_recorded_results() -> None:
    """Every recorded table is on the page, as `python benchmarks/tables.py` writes it."""
    page = (ROOT / "benchmarks/README.md").read_text()
    renew = runpy.run_path(str(ROOT / "benchmarks/tables.py"))["renew"]
    assert renew(page) == page
    marks = [
        f"<!-- table: {path.stem} {table} -->"
        for path in (ROOT / "benchmarks/results").glob("*.json")
        for table in json.loads(path.read_text())["tables"]
    ]
    assert [mark for mark in marks if mark not in page] == []


def test_the_architecture_page_names_modules_that_exist() -> None:
    """Each name in the second column of its table is the end of a module's path."""
    rows = re.findall(r"^\| .+? \| (.+) \|$", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w/]+)`", row)}
    files = [str(path.with_suffix("")) for path in (ROOT / "lightning_ddp_ext").rglob("*.py")]
    folders = [f"{path}/" for path in (ROOT / "lightning_ddp_ext").rglob("*") if path.is_dir()]
    assert len(named) > 50
    assert [
        name
        for name in sorted(named)
        if not any(path.endswith(f"/{name}") for path in [*files, *folders])
    ] == []
