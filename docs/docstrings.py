"""Have docstrings shown as Markdown: roles become code, and literal blocks and doctests become fenced blocks."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":\w+:`~?(?:[\w.]+\.)?(\w+)`")
LITERAL = re.compile(r"^( *)(.*?)::\n\n((?:\1 {4}.*\n|\n)+)", re.MULTILINE)
DOCTEST = re.compile(r"^( *)>>> (?:.+\n)+", re.MULTILINE)


class AsMarkdown(Extension):
    """What the API page's handler calls for each object that it has read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Convert the object's docstring, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    """Return a docstring without markup that Markdown does not know."""
    text = ROLE.sub(r"`\1`", text.rstrip() + "\n")
    text = LITERAL.sub(_fenced_literal, text)
    return DOCTEST.sub(_fenced_doctest, text)


def _fenced_literal(match: re.Match[str]) -> str:
    indent, words, block = match.groups()
    lines = "\n".join(line[4:] for line in block.rstrip("\n").split("\n"))
    title = f"{indent}**{words}**\n\n" if words == "Example" else f"{indent}{words}:\n\n" if words else ""
    return f"{title}{indent}```python\n{lines}\n{indent}```\n\n"


def _fenced_doctest(match: re.Match[str]) -> str:
    indent = match[1]
    return f"{indent}```pycon\n{match[0]}{indent}```\n"
