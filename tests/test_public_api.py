"""The public API is as recorded: a line for each public name, its bases, arguments and
result.

`make api` records it.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lightning_ddp_ext

griffe: Any = pytest.importorskip("griffe", reason="is for development")

RECORDED = Path(__file__).with_name("public-api.txt")
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "api.md"
PREFIX = {
    griffe.ParameterKind.keyword_only: "*, ",
    griffe.ParameterKind.var_positional: "*",
    griffe.ParameterKind.var_keyword: "**",
}


def lines() -> list[str]:
    """Return the API of the package that is imported: each public name, and the members
    that its page shows.
    """
    package = griffe.load(
        "lightning_ddp_ext", search_paths=[Path(lightning_ddp_ext.__file__).parents[1]]
    )
    shown = dict(re.findall(r"^\| \[`(\w+)`\].*Members: (.*)", PAGE.read_text(), re.M))
    found: list[str] = []
    for name in sorted(lightning_ddp_ext.__all__):
        public = package[name]
        if public.is_module:  # a function that has the name of its module
            public = public[name]
        found += describe(name, public)
        for member in re.findall(r"\w+", shown.get(name, "")):
            found += describe(f"{name}.{member}", public.all_members[member])
    return found


def describe(name: str, found: Any) -> Iterator[str]:
    """Yield the lines of a class, a function or an attribute."""
    if found.is_attribute:
        yield f"{name}: {found.annotation}"
        return
    if found.is_class:
        yield f"class {name}({', '.join(map(str, found.bases))})"
    for parameter in found.parameters:
        if parameter.name not in ("self", "cls"):
            yield f"{name}({argument(parameter)})"
    if found.is_function:
        yield f"{name}() -> {found.returns}"


def argument(parameter: Any) -> str:
    """Return an argument as it is written; a star and a comma stand before one that is
    a keyword only.
    """
    prefix = PREFIX.get(parameter.kind, "")
    default = "" if parameter.default is None or prefix.endswith("*") else f" = {parameter.default}"
    return f"{prefix}{parameter.name}: {parameter.annotation}{default}"


def test_public_api_is_as_recorded() -> None:
    """Public names, arguments, defaults and types change only on purpose: the message
    lists changes and remedy.
    """
    recorded = RECORDED.read_text().splitlines()
    found = lines()
    gone = [f"- {line}" for line in recorded if line not in found]
    new = [f"+ {line}" for line in found if line not in recorded]
    assert not gone + new, (
        "the public API is not as tests/public-api.txt has it:\n"
        + "\n".join(gone + new)
        + "\nIf that is meant, CHANGELOG.md says what to write instead; see docs/more/releases.md,"
        " and run `make api`."
    )


if __name__ == "__main__":
    RECORDED.write_text("\n".join([*lines(), ""]))
