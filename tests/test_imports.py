"""Imports run one way: each subpackage imports only those before it, and only the
adapters import Lightning.
"""

import ast
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.sources import FILES, PACKAGE

# Modules beside the subpackages are below all of them; those that gather the public
# names are above.
ORDER = (
    "helpers",
    "rendezvous",
    "supervision",
    "data",
    "checkpoint",
    "batchnorm",
    "reductions",
    "integration",
    "public",
    "cli",
)
PUBLIC = ("__init__", "lightning", "pytorch_lightning")
LIGHTNING = {"lightning", "lightning_fabric", "pytorch_lightning"}


def imports_of(module: str) -> Iterator[str]:
    """Yield the full names of modules that a file imports anywhere, also for types and
    of other packages.
    """
    package = module.split(".")[:-1]
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield next(
                    (name for name in (full, f"{full}.__init__", base) if name in FILES),
                    f"{base}.__init__",
                )


def ours(module: str) -> set[str]:
    """Return the modules of this package that a module imports."""
    return {name for name in imports_of(module) if name in FILES}


def subpackage(module: str) -> str:
    _, name, *rest = module.split(".")
    if name in PUBLIC:
        return "public"
    return "cli" if name == "__main__" else name if rest else "helpers"


def test_subpackages_import_only_those_before_them() -> None:
    """This includes imports for types."""
    upwards = [
        (module, imported)
        for module in FILES
        for imported in ours(module)
        if ORDER.index(subpackage(imported)) > ORDER.index(subpackage(module))
    ]
    assert upwards == []


def test_no_modules_import_each_other() -> None:
    """This includes imports for types, and cycles through other modules."""
    try:
        TopologicalSorter({module: ours(module) for module in FILES}).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_only_adapters_import_lightning() -> None:
    """Other modules than those of ``integration`` and ``cli`` do not import Lightning.

    ``errors`` and ``world`` do not import torch either.
    """
    roots = {module: {name.partition(".")[0] for name in imports_of(module)} for module in FILES}
    adapters = ("integration", "cli")
    assert [m for m in FILES if roots[m] & LIGHTNING and subpackage(m) not in adapters] == []
    for module in ("errors", "world"):
        assert roots[f"{PACKAGE}.{module}"] <= {*sys.stdlib_module_names, PACKAGE}


def test_windows_is_refused_in_a_sentence() -> None:
    """The error is raised before any module is imported that Windows lacks."""
    windows = "import sys; sys.platform = 'win32'; sys.modules['fcntl'] = None"
    code = f"{windows}; import lightning_ddp_ext"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith(
        "\nImportError: lightning-ddp-ext needs Linux (got win32); on Windows, use WSL 2\n"
    )


PROCESS = """
import os, signal, sys, threading

def process():
    handlers = [signal.getsignal(each) for each in sorted(signal.valid_signals())]
    hooks = [sys.excepthook, threading.excepthook, sys.unraisablehook]
    links = [os.path.join("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")]
    files = [os.readlink(each) for each in links if os.path.islink(each)]
    sockets = [file for file in files if "socket" in file]
    return dict(os.environ), handlers, hooks, os.listdir("/proc/self/task"), sockets

import torch, torchmetrics, lightning.pytorch
before = process()
import lightning_ddp_ext
after = process()
names = ("variables", "handlers", "hooks", "threads", "sockets")
print([name for name, old, new in zip(names, before, after) if old != new])
"""
LAUNCHERS = ("DDPX_", "LOCAL_RANK", "SLURM_", "TORCHELASTIC_")


@pytest.mark.parametrize(
    "launched", [{}, {"LOCAL_RANK": "0", "DDPX_LAUNCHER_PID": str(os.getpid())}]
)
def test_an_import_changes_nothing_else_in_the_process(launched: dict[str, str]) -> None:
    """Only a rank that this package starts changes variables and starts a thread."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    found = subprocess.run(
        [sys.executable, "-c", PROCESS], env=environ | launched, capture_output=True, check=True
    )
    assert found.stdout.decode().splitlines()[-1] == str(
        ["variables", "threads"] if launched else []
    )


def test_other_programs_find_each_distribution_once() -> None:
    """The finder that waits for the import of the other Lightning finds no other
    module.
    """
    assert importlib.metadata.packages_distributions()["torch"] == ["torch"]
