"""Messages, docstrings, comments, pages, and names of functions and classes follow the rules of CONTRIBUTING.md."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("lightning_ddp_ext", "tests", "benchmarks", "examples", "docs")
OLD = r"(c[ao]m(e|es|ing)|me(e|et)ts?|met|asks?|asked|hears?|heard|says?|said|kn[eo]ws?|go|goes|went)"
WORDS = "gone|any more|alike|affair|stood|at once|whoever|(some|no|every)body|so many|has to be told|go(es)? on"
RULES = {
    rf"\branks? ([\w{{}}']+ ){{0,2}}{OLD}\b": "ranks connect, call, wait, fail and exit",
    r"\b(is|are|was|were|be) (no(?! longer| \w+er than)|(?-i:none))\b": "is not a",
    r"\bthere (is|are) (no|nothing)\b[^.;:]* that\b": "name the subject",
    r"\b(has|have) (ended|come)\b": "simple present or past: exited",
    r", too\b(?! \w)": "also, before the verb",
    r"\b(error|failure|save|timeout|end)s? of an? (?!epoch|batch|(training )?step)\w+": "a noun compound: save error",
    rf"\b({WORDS})\b|\bof (its|their) own\b(?! (batch|rank))": "another word, or none",
}
RIDDLE = r"(The|A|An|What|Which|Those|How|Whatever|Who|Whoever|Where|Why|When|If|Returns|Raises|Yields|Gives)\b"
# Phrases that are right, by file.
ALLOWED = {"tests/test_prose.py": "", "tests/checkpoint/test_save.py": "let user nobody write"}


def python_texts(nodes: list[ast.AST], source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string, name of a function or class, and block of comments."""
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name.replace("_", " ")
    block, last = "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            block = f"{block if token.start[0] == last + 1 else ''} {token.string.strip('# ')}"
            last = token.start[0]
            yield last, block


def page_texts(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each paragraph outside of code."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", lambda code: re.sub(r"[^\n]", "x", code[0]), text, flags=re.M | re.S)
    for paragraph in re.finditer(r"(.+\n)+", text):
        yield text.count("\n", 0, paragraph.start()) + 1, paragraph[0]


def riddles(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and opening of docstrings that do not begin with an imperative; properties and fixtures have nouns."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("test_"):
            opening = re.match(RIDDLE, ast.get_docstring(node) or "")
            if opening and not re.search("property|fixture", " ".join(map(ast.unparse, node.decorator_list))):
                yield node.lineno, opening[0]


def findings(path: Path) -> Iterator[str]:
    """Yield place, words and remedy of each violation in a file."""
    name, source = path.relative_to(ROOT).as_posix(), path.read_text()
    nodes = list(ast.walk(ast.parse(source))) if path.suffix == ".py" else []
    for line, text in python_texts(nodes, source) if nodes else page_texts(source):
        plain = " ".join(text.split())
        if name not in ALLOWED or ALLOWED[name] not in plain:
            for rule, remedy in RULES.items():
                yield from (f"{name}:{line}: {each[0]!r}: {remedy}" for each in re.finditer(rule, plain, re.IGNORECASE))
    yield from (f"{name}:{line}: {opening!r}: an imperative verb" for line, opening in riddles(nodes))


@pytest.mark.unit
def test_sentences_follow_the_rules() -> None:
    """A finding names file, line, the words, and the remedy."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    found = [each for path in sorted([*files, *ROOT.glob("*.md")]) for each in findings(path)]
    assert not found, "\n".join(found)
