"""Rules of the tests themselves: each can be read alone, and says what it shows."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
TREES = {
    path.relative_to(TESTS).as_posix(): ast.parse(path.read_text())
    for path in TESTS.rglob("test_*.py")
}


def test_no_test_imports_from_another_module_of_tests() -> None:
    """Only the GPU tests do, because they repeat other tests on a GPU."""
    imports = [
        f"{file} imports from {node.module}"
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and ".test_" in str(node.module)
    ]
    assert [each for each in imports if not each.startswith("gpu/")] == []


def test_every_test_says_what_it_shows() -> None:
    """Its docstring begins with a sentence."""
    docstrings = {
        f"{file}::{node.name}": ast.get_docstring(node) or ""
        for file, tree in TREES.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    openings = {test: docstring.partition("\n\n")[0] for test, docstring in docstrings.items()}
    assert [test for test, opening in openings.items() if not opening.endswith(".")] == []
