"""The pages build as a site without broken links or foreign content, and can also be read
on a code host.
"""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / name for name in ("README.md", "examples/README.md", "benchmarks/README.md")),
]


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
    assert 'id="lightning_ddp_ext.RankZeroCheckpointIO.load_checkpoint"' in api


LOADING_ATTRIBUTES = ("src", "srcset", "href", "data", "poster", "style")
FOREIGN = re.compile(r"(?:https?:)?//\S+")
FOREIGN_IN_CSS = re.compile(rf"(?:url\(|@import)\s*[\"']?{FOREIGN.pattern}")


class LoadedByPage(HTMLParser):
    """Collects the foreign addresses from which a page loads something. Links of the text
    load nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.is_in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.is_in_style = tag == "style"
        if tag != "a":
            values = [value or "" for name, value in attrs if name in LOADING_ATTRIBUTES]
            self.addresses += [address for value in values for address in FOREIGN.findall(value)]

    def handle_data(self, data: str) -> None:
        if self.is_in_style:
            self.addresses += FOREIGN_IN_CSS.findall(data)


def loaded_by(path: Path) -> list[str]:
    """Return the foreign addresses from which a page or a style sheet loads something."""
    if path.suffix == ".css":
        return FOREIGN_IN_CSS.findall(path.read_text())
    page = LoadedByPage()
    page.feed(path.read_text())
    return page.addresses


@pytest.mark.parametrize("suffix", [".html", ".css"])
def test_the_site_loads_nothing_from_the_network(suffix: str, site: Path) -> None:
    """Scripts, styles, fonts and pictures belong to the site."""
    loaded = {path: loaded_by(path) for path in site.rglob(f"*{suffix}")}
    assert loaded
    assert {path: addresses for path, addresses in loaded.items() if addresses} == {}


FOREIGN_CONTENT = {
    "page.html": """
        <link rel=stylesheet href=//cdn.example/a.css>
        <script async src='https://cdn.example/a.js'></script>
        <img srcset="a.png, https://cdn.example/a.png 2x">
        <style>@import "https://cdn.example/b.css";</style>
        <a href="https://example.org">A link</a>
    """,
    "style.css": "a { background: url( '//cdn.example/a.png') }",
}


@pytest.mark.parametrize(("name", "expected"), [("page.html", 4), ("style.css", 1)])
def test_foreign_content_is_found_however_it_is_written(
    name: str, expected: int, tmp_path: Path
) -> None:
    """The site's check sees each form, with and without quotes or a scheme."""
    (tmp_path / name).write_text(FOREIGN_CONTENT[name])
    assert len(loaded_by(tmp_path / name)) == expected


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
