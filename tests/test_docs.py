"""Pages show what the repository has: its files, its charts and its recorded results."""

import importlib
import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Files of examples/ that a page shows in full.
SHOWN = {
    "slurm.sbatch": "guides/launchers.md",
    "kubernetes.yaml": "guides/launchers.md",
    "config.yaml": "guides/lightning-cli.md",
}


@pytest.mark.parametrize(("name", "page"), SHOWN.items(), ids=SHOWN)
def test_a_page_shows_a_file_as_the_repository_has_it(name: str, page: str) -> None:
    """The page repeats the file of ``examples/`` word for word."""
    assert f"\n{(ROOT / 'examples' / name).read_text()}```\n" in (DOCS / page).read_text()


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
