"""Settings of Sphinx: `make docs` builds the pages of the repository, as they are, into site/."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

import lightning_ddp_ext

ROOT = Path(__file__).parents[1]

project = "lightning-ddp-ext"
version = release = lightning_ddp_ext.__version__
copyright = "the lightning-ddp-ext authors"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]

root_doc = "README"
include_patterns = ["*.md", "docs/**", "examples/**", "benchmarks/**", "tests/README.md"]
nitpicky = True
# Names of other packages have no pages here, nor have type variables.
nitpick_ignore_regex = [("py:.*", r"(?!lightning_ddp_ext\.).*|.*\.(T|ModuleT|RankLogger)")]

myst_heading_anchors = 4  # with the addresses that code hosts give to headings
autodoc_default_options = {"member-order": "bysource"}
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"{project} {version.partition('+')[0]}"
pygments_style = "friendly"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"


def setup(app: Sphinx) -> None:
    """Add to two pages what only the site has."""
    app.connect("source-read", add_to_page)


def add_to_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Give the first page the list of all pages, and the API page the docstrings."""
    if page == root_doc:
        source[0] += sidebar((ROOT / "docs/README.md").read_text())
    if page == "docs/reference/api":
        source[0] = named(source[0]) + docstrings(source[0])
    else:
        source[0] = linked(source[0], page)
    if page == "examples/README":
        source[0] = listings(source[0])


def sidebar(text: str) -> str:
    """Return the pages that `docs/README.md` links, with its headings as captions."""
    found = "\n```{toctree}\n:hidden:\n\nGuides and reference <docs/README>\n```\n"
    for section in text.split("\n## ")[1:]:
        pages = dict.fromkeys(re.findall(r"\]\(([^)#:]+\.md)[)#]", section))
        names = "\n".join((Path("docs") / name).as_posix() for name in pages)
        found += (
            f"\n```{{toctree}}\n:hidden:\n:caption: {section.splitlines()[0]}\n\n{names}\n```\n"
        )
    return found.replace("docs/../", "")


def named(text: str) -> str:
    """Return the API page with names that lead to their docstrings instead of to files."""
    return re.sub(
        r"\[`(\w+)`\]\(\S+?/lightning_ddp_ext/\S+?\.py\)",
        r"{py:obj}`\1 <lightning_ddp_ext.\1>`",
        text,
    )


def linked(text: str, page: str) -> str:
    """Return a guide in which the first mention of each public name leads to its docstring."""
    if not page.startswith("docs/guides/"):
        return text
    for name in lightning_ddp_ext.__all__:
        mentions = re.finditer(
            rf"```.*?```|\[[^\]]*\]|^#.*?$|(`{name}`)", text, re.DOTALL | re.MULTILINE
        )
        first = next((mention for mention in mentions if mention[1]), None)
        if first and not name.endswith("Error"):
            role = f"{{py:obj}}`{name} <lightning_ddp_ext.{name}>`"
            text = text[: first.start()] + role + text[first.end() :]
    return text


def listings(text: str) -> str:
    """Return the page of examples with the files that it links, in full below its table."""
    found = ""
    for name in re.findall(r"^\| \[`\S+`\]\((\S+\.(?:py|sh|sbatch|yaml))\)", text, re.MULTILINE):
        language = {"py": "python", "yaml": "yaml"}.get(name.rpartition(".")[2], "bash")
        found += f"\n## {name}\n\n```{{literalinclude}} {name}\n:language: {language}\n```\n"
    return (
        re.sub(
            r"\]\((\S+\.(?:py|sh|sbatch|yaml))\)", lambda link: f"](#{anchor_of(link[1])})", text
        )
        + found
    )


def anchor_of(name: str) -> str:
    """Return the address that Markdown gives to a heading that is a file's name."""
    return re.sub(r"[^\w-]", "", name)


def docstrings(text: str) -> str:
    """Return the directives that show the docstrings of the names in the API page's tables."""
    found = "\n## Docstrings\n\n```{eval-rst}\n"
    for name, about in re.findall(r"^\| \[`(\w+)`\]\S+ \| (.*)", text, re.MULTILINE):
        kind = "class" if isinstance(getattr(lightning_ddp_ext, name), type) else "function"
        found += f".. auto{kind}:: lightning_ddp_ext.{name}\n"
        members = re.findall(r"`(\w+)`", about.partition("Members: ")[2])
        if members or name == "NCCLOptions":  # the fields of the latter have docstrings
            found += f"   :members: {', '.join(members)}\n"
        found += "\n"
    return found + "```\n"
