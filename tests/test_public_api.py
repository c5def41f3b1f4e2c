"""The public API is as recorded: a line for each public name, its bases, arguments and
result.

`make api` records it.
"""

import difflib
import re
from pathlib import Path
from typing import Any

import pytest

import lightning_ddp_ext

griffe: Any = pytest.importorskip("griffe", reason="is for development")

RECORDED = Path(__file__).with_name("public-api.txt")
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "api.md"


def api_lines() -> list[str]:
    """Return the lines of all public names of the imported package, and of the members
    that their page shows.
    """
    package = griffe.load(
        "lightning_ddp_ext", search_paths=[Path(lightning_ddp_ext.__file__).parents[1]]
    )
    shown = dict(re.findall(r"^\| \[`(\w+)`\].*Members: (.*)", PAGE.read_text(), re.M))
    text = ""
    for name in sorted(lightning_ddp_ext.__all__):
        public = package[name]
        if public.is_module:  # a function that has the name of its module
            public = public[name]
        text += as_written(name, public)
        for member in re.findall(r"\w+", shown.get(name, "")):
            text += as_written(f"{name}.{member}", public.all_members[member])
    return text.splitlines()


def as_written(name: str, public: Any) -> str:
    """Return a class, a function or an attribute as in code, with a line an argument."""
    if public.is_attribute:
        return f"{name}: {public.annotation}\n"
    if public.is_class:
        bases = ", ".join(map(str, public.bases))
        return f"class {name}({bases})\n" + as_written(name, public.all_members["__init__"])
    signature = f"{public.signature(return_type=False, name=name)} -> {public.returns}\n"
    return re.sub(r"(?<=[,(]) ?(?=\**\w+: )", "\n    ", signature)


def test_public_api_is_as_recorded() -> None:
    """Public names, arguments, defaults and types change only on purpose."""
    changes = [*difflib.unified_diff(RECORDED.read_text().splitlines(), api_lines(), lineterm="")]
    assert not changes, (
        "the public API is not as tests/public-api.txt has it:\n"
        + "\n".join(changes)
        + "\nIf that is meant, CHANGELOG.md says what to write instead; see docs/reference/api.md,"
        " and run `make api`."
    )


if __name__ == "__main__":
    RECORDED.write_text("\n".join([*api_lines(), ""]))
