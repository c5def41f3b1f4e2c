"""The pages build as a site without broken links or foreign content, and can also be read
on a code host.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / name for name in ("README.md", "examples/README.md", "benchmarks/README.md")),
]
# In style sheets, and in all tags but links of the text, which load nothing.
FOREIGN = re.compile(
    r"(?:<(?!a\b)[^>]*\b(?:src|srcset|href|data|poster)=|url\(|@import)\W*(?:https?:)?//"
)


def test_the_site_has_every_page_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    """A broken link or reference is an error; scripts, styles, fonts and pictures belong to
    the site, and the page of the API has the members of classes.
    """
    command = [sys.executable, *("-m", "sphinx", "-c", "docs", "-W", "-q")]
    places = ["-d", str(tmp_path / "trees"), ".", str(tmp_path / "html")]
    built = subprocess.run([*command, *places], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    site = tmp_path / "html"
    pages = [(site / path.relative_to(ROOT)).with_suffix(".html") for path in FILES]
    assert [page for page in pages if not page.is_file()] == []
    api = (site / "docs/reference/api.html").read_text()
    assert 'id="lightning_ddp_ext.RankZeroCheckpointIO.load_checkpoint"' in api
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    loaded = {path: FOREIGN.findall(path.read_text()) for path in files}
    assert {path: addresses for path, addresses in loaded.items() if addresses} == {}


LINKED = re.compile(r"\]\((?!https?:)([^)#]+)")
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
# Markup that a code host would show as text.
MARKUP = re.compile(r"^--8<--.*|^:::.*|^!!! .*|\{ ?[#:.].*|^```\{.*", re.MULTILINE)


@pytest.mark.parametrize("page", FILES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_can_be_read_on_a_code_host(page: Path) -> None:
    """Links lead to files, and no markup needs the site; its build checks headings."""
    text = page.read_text()
    assert [link for link in LINKED.findall(text) if not (page.parent / link).is_file()] == []
    assert MARKUP.findall(CODE.sub("", text)) == []
