"""The pages build as a site, can be read on a code host, and match the repository."""

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FILES = [
    *DOCS.rglob("*.md"),
    *(ROOT / name for name in ("README.md", "examples/README.md", "benchmarks/README.md")),
]
# By path from docs/, such as "guides/hangs.md" or "../README.md".
TEXTS = {os.path.relpath(path, DOCS): path.read_text() for path in FILES}
# Files of examples/ that a page shows in full.
SHOWN = {
    "slurm.sbatch": "guides/launchers.md",
    "kubernetes.yaml": "guides/launchers.md",
    "config.yaml": "guides/lightning-cli.md",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; a broken link or reference is an error."""
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, *("-m", "sphinx", "-c", "docs", "-W", "-q")]
    places = ["-d", str(directory / "trees"), ".", str(directory / "html")]
    built = subprocess.run([*command, *places], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return directory / "html"


def test_the_site_has_every_page(site: Path) -> None:
    """Every file has a page, and that of the API has the members of classes."""
    pages = [(site / path.relative_to(ROOT)).with_suffix(".html") for path in FILES]
    assert [page for page in pages if not page.is_file()] == []
    api = (site / "docs/reference/api.html").read_text()
    assert 'id="lightning_ddp_ext.RankZeroCheckpointIO.wait"' in api


# Patterns of what the files of a kind load from another host.
LOADED = {
    "html": re.compile(
        r'<(?:script|img|iframe)[^>]+src="?(?:https?:)?//[^>]+'
        r'|<link[^>]+rel="?(?:style|preconnect)[^>]+//[^>]+'
    ),
    "css": re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//\S+"),
}


@pytest.mark.parametrize("suffix", LOADED)
def test_the_site_loads_nothing_from_the_network(suffix: str, site: Path) -> None:
    """Scripts, styles, fonts and pictures belong to the site."""
    texts = {path: path.read_text() for path in site.rglob(f"*.{suffix}")}
    loaded = {path: LOADED[suffix].findall(text) for path, text in texts.items()}
    assert loaded
    assert {path: found for path, found in loaded.items() if found} == {}


LINKED = re.compile(r"\]\((?!https?:)([^)#]+)")
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
# Markup that a code host would show as text.
MARKUP = re.compile(r"^--8<--.*|^:::.*|^!!! .*|\{ ?[#:.].*|^```\{.*", re.MULTILINE)


@pytest.mark.parametrize("name", TEXTS)
def test_a_page_can_be_read_on_a_code_host(name: str) -> None:
    """Links lead to files, and no markup needs the site; its build checks headings."""
    folder = (DOCS / name).parent
    links = LINKED.findall(TEXTS[name])
    assert [link for link in links if not (folder / link).is_file()] == []
    assert MARKUP.findall(CODE.sub("", TEXTS[name])) == []


@pytest.mark.parametrize(("name", "page"), SHOWN.items(), ids=SHOWN)
def test_a_page_shows_a_file_as_the_repository_has_it(name: str, page: str) -> None:
    """The page repeats the file of ``examples/`` word for word."""
    assert f"\n{(ROOT / 'examples' / name).read_text()}```\n" in TEXTS[page]


def test_pictures_are_as_their_scripts_draw_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The charts show the tables of benchmarks/README.md: `python docs/charts.py`
    renews them.
    """
    monkeypatch.syspath_prepend(DOCS)
    charts = importlib.import_module("charts")
    ring = importlib.import_module("ring")
    drawn = {name: charts.draw(name) for name in charts.CHARTS} | {"ring": ring.draw(4)}
    assert {path.stem: path.read_text() for path in (DOCS / "images").iterdir()} == drawn
    labels = drawn["ring"].count(">rank ")
    assert labels == 2 * 4, "a row for each rank, above and below"


def test_the_page_of_benchmarks_shows_the_recorded_results() -> None:
    """Every recorded table is on the page, as `python benchmarks/tables.py` writes it."""
    page = TEXTS["../benchmarks/README.md"]
    renew = runpy.run_path(str(ROOT / "benchmarks/tables.py"))["renew"]
    assert renew(page) == page
    marks = [
        f"<!-- table: {path.stem} {table} -->"
        for path in (ROOT / "benchmarks/results").glob("*.json")
        for table in json.loads(path.read_text())["tables"]
    ]
    assert [mark for mark in marks if mark not in page] == []
