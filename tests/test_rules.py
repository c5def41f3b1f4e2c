"""Rules of the tests themselves: each can be read alone, and says what it shows."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
TREES = {
    path.relative_to(TESTS).as_posix(): ast.parse(path.read_text()) for path in TESTS.rglob("*.py")
}
MODULES = {name: tree for name, tree in TREES.items() if "test_" in name}


def test_no_test_imports_from_another_module_of_tests() -> None:
    """What several modules need is in a helper file; the GPU tests repeat others on a card."""
    imports = [(name, node) for name, tree in MODULES.items() for node in ast.walk(tree)]
    froms = [(name, node.module) for name, node in imports if isinstance(node, ast.ImportFrom)]
    found = [(name, module) for name, module in froms if ".test_" in str(module)]
    assert [each for each in found if not each[0].startswith("gpu/")] == []


def test_every_test_says_what_it_shows() -> None:
    """A docstring begins with a sentence."""
    functions = [(name, node) for name, tree in MODULES.items() for node in tree.body]
    tests = [(name, node) for name, node in functions if isinstance(node, ast.FunctionDef)]
    docs = {
        f"{name}::{node.name}": ast.get_docstring(node)
        for name, node in tests
        if node.name.startswith("test_")
    }
    assert [
        name for name, doc in docs.items() if not (doc or "").partition("\n\n")[0].endswith(".")
    ] == []
