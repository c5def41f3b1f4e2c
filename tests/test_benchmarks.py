"""The benchmarks run, and their page shows what was recorded."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from tests.harness.scripts import run_on_ranks

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RESULTS = {
    path.stem: json.loads(path.read_text())
    for path in sorted((BENCHMARKS / "results").glob("*.json"))
}
PARTS = {"launching": ["ends"]}  # the others start interpreters, one after another


@pytest.mark.nightly
@pytest.mark.parametrize("name", RESULTS)
def test_a_script_runs_and_writes_its_tables(name: str, tmp_path: Path) -> None:
    """`--quick --json` gives the tables that are published, with machine and versions."""
    script = BENCHMARKS / f"{name}.py"
    written = tmp_path / "result.json"
    argv = [*PARTS.get(name, []), "--quick", "--json", str(written)]
    run_on_ranks(script, *argv, cwd=tmp_path, world_size=1)
    result = json.loads(written.read_text())
    assert result["quick"]
    assert result["machine"]["cores"]
    assert result["versions"]["torch"]
    published = PARTS.get(name) or RESULTS[name]["tables"]
    assert set(published) <= set(result["tables"])
    assert all(table["rows"] for table in result["tables"].values())


def test_the_page_shows_the_recorded_results() -> None:
    """`python benchmarks/tables.py` would change nothing, and every table that is
    recorded is on the page.
    """
    page = (BENCHMARKS / "README.md").read_text()
    assert runpy.run_path(str(BENCHMARKS / "tables.py"))["renew"](page) == page
    recorded = {
        f"<!-- table: {name} {table} -->"
        for name, result in RESULTS.items()
        for table in result["tables"]
    }
    assert {mark for mark in recorded if mark not in page} == set()
