"""What the package imports, and what its import does to a process."""

import ast
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import lightning_ddp_ext
from lightning_ddp_ext.supervision.stacks import WAITS_IF_INNERMOST

ROOT = Path(lightning_ddp_ext.__file__).parent
PACKAGE = ROOT.name
# By the module's full name; that of a package ends with "__init__".
FILES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path
    for path in ROOT.rglob("*.py")
}
# From below: a module imports only from its own level and those before it.
ORDER = (
    "helpers",  # modules beside the subpackages
    "rendezvous",
    "supervision",
    "data",
    "checkpoint",
    "batchnorm",
    "integration",
    "public",  # what gathers the public names
    "main",
)
# By the name after the package's; a subpackage is a level of its own.
LEVELS = {
    "__init__": "public",
    "lightning": "public",
    "pytorch_lightning": "public",
    "__main__": "main",
}


def imports_of(module: str) -> Iterator[str]:
    """Yield the full names of modules that a file imports anywhere, also for types and
    of other packages.
    """
    package = module.rpartition(".")[0]
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            # Each is either a module, or a name in the module ``base``.
            members = [f"{base}.{alias.name}" for alias in node.names]
            yield from (member if module_named(member) in FILES else base for member in members)


def module_named(name: str) -> str:
    """Return the full name of a module, as in ``FILES``, if it is one of this package."""
    return name if name in FILES else f"{name}.__init__"


IMPORTED = {module: {*map(module_named, imports_of(module))} & FILES.keys() for module in FILES}


def level_of(module: str) -> str:
    """Return the element of ``ORDER`` to which a module belongs."""
    _, name, *rest = module.split(".")
    return LEVELS.get(name, name if rest else "helpers")


def test_subpackages_import_only_those_before_them() -> None:
    """Imports for types count as well."""
    upwards = [
        (module, imported)
        for module, all_imported in IMPORTED.items()
        for imported in all_imported
        if ORDER.index(level_of(imported)) > ORDER.index(level_of(module))
    ]
    assert upwards == []


def test_no_modules_import_each_other() -> None:
    """Imports for types count as well, as do cycles through other modules."""
    try:
        TopologicalSorter(IMPORTED).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_modules_in_which_ranks_wait_exist() -> None:
    """They are listed by name, and those of ``integration`` once for each Lightning."""
    assert FILES.keys() >= {
        name.rstrip(".").replace("pytorch_lightning", "integration")
        for name in WAITS_IF_INNERMOST
        if name.startswith(PACKAGE)
    }


@pytest.mark.parametrize("name", ["errors", "world"])
def test_modules_of_plain_values_import_no_library(name: str) -> None:
    """They import the standard library and this package, but not torch."""
    libraries = {imported.partition(".")[0] for imported in imports_of(f"{PACKAGE}.{name}")}
    assert libraries <= {*sys.stdlib_module_names, PACKAGE}


def test_windows_is_refused_in_a_sentence() -> None:
    """The import fails before it reaches a module that Windows lacks."""
    code = (
        "import importlib.metadata, sys; sys.platform = 'win32'; sys.modules['fcntl'] = None;"
        " import lightning_ddp_ext"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith(
        "\nImportError: lightning-ddp-ext needs Linux (got win32); on Windows, use WSL 2\n"
    )


# Prints which parts of a process an import of the package changes. It is a program of its own,
# because the process of the tests has imported the package.
IMPORTING = """
import ctypes, gc, os, signal, sys, threading

def process():
    death_signal = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death_signal))  # PR_GET_PDEATHSIG
    handlers = [signal.getsignal(each) for each in sorted(signal.valid_signals())]
    hooks = [sys.excepthook, threading.excepthook, sys.unraisablehook]
    links = [os.path.join("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")]
    files = [os.readlink(each) for each in links if os.path.islink(each)]
    sockets = [file for file in files if "socket" in file]
    return {
        "variables": dict(os.environ),
        "handlers": handlers,
        "hooks": hooks,
        "threads": os.listdir("/proc/self/task"),
        "sockets": sockets,
        "frozen objects": gc.get_freeze_count(),
        "death signal": death_signal.value,
    }

import torch, torchmetrics, lightning.pytorch
before = process()
import lightning_ddp_ext
after = process()
print([part for part in before if before[part] != after[part]])
"""
LAUNCHERS = ("DDPX_", "LOCAL_RANK", "SLURM_", "TORCHELASTIC_")


@pytest.mark.parametrize(
    ("variables", "changed"),
    [
        pytest.param({}, [], id="script"),
        pytest.param(
            {"LOCAL_RANK": "0", "DDPX_LAUNCHER_PID": str(os.getpid())},
            ["death signal"],
            id="rank that this package starts",
        ),
    ],
)
def test_an_import_changes_a_process_only_if_it_is_a_rank_of_ours(
    variables: dict[str, str], changed: list[str]
) -> None:
    """Such a rank gets SIGTERM when its launcher exits."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    imported = subprocess.run(
        [sys.executable, "-c", IMPORTING],
        env=environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert imported.stdout.splitlines()[-1] == str(changed)


def test_other_programs_find_each_distribution_once() -> None:
    """The package's finder in ``sys.meta_path`` does not repeat what other finders list."""
    assert importlib.metadata.packages_distributions()["torch"] == ["torch"]
