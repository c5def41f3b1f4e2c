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


def api_lines() -> list[str]:
    """Return the lines of all public names of the imported package, and of the members
    that their page shows.
    """
    package = griffe.load(
        "lightning_ddp_ext", search_paths=[Path(lightning_ddp_ext.__file__).parents[1]]
    )
    shown = dict(re.findall(r"^\| \[`(\w+)`\].*Members: (.*)", PAGE.read_text(), re.M))
    lines: list[str] = []
    for name in sorted(lightning_ddp_ext.__all__):
        public = package[name]
        if public.is_module:  # a function that has the name of its module
            public = public[name]
        lines += lines_of(name, public)
        for member in re.findall(r"\w+", shown.get(name, "")):
            lines += lines_of(f"{name}.{member}", public.all_members[member])
    return lines


def lines_of(name: str, public: Any) -> Iterator[str]:
    """Yield the lines of a class, a function or an attribute."""
    if public.is_attribute:
        yield f"{name}: {public.annotation}"
        return
    if public.is_class:
        yield f"class {name}({', '.join(map(str, public.bases))})"
    for parameter in public.parameters:
        if parameter.name not in ("self", "cls"):
            yield f"{name}({as_written(parameter)})"
    if public.is_function:
        yield f"{name}() -> {public.returns}"


def as_written(parameter: Any) -> str:
    """Return an argument as in a signature that has no other one."""
    prefix = PREFIX.get(parameter.kind, "")
    default = "" if parameter.default is None or prefix.endswith("*") else f" = {parameter.default}"
    return f"{prefix}{parameter.name}: {parameter.annotation}{default}"


def test_public_api_is_as_recorded() -> None:
    """Public names, arguments, defaults and types change only on purpose."""
    recorded = RECORDED.read_text().splitlines()
    current = api_lines()
    removed = [f"- {line}" for line in recorded if line not in current]
    added = [f"+ {line}" for line in current if line not in recorded]
    assert not removed + added, (
        "the public API is not as tests/public-api.txt has it:\n"
        + "\n".join(removed + added)
        + "\nIf that is meant, CHANGELOG.md says what to write instead; see docs/reference/api.md,"
        " and run `make api`."
    )


if __name__ == "__main__":
    RECORDED.write_text("\n".join([*api_lines(), ""]))
