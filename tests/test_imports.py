"""Imports run one way: adapters import rooms, and rooms never import Lightning."""

import ast
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_ddp_ext

ROOT = Path(lightning_ddp_ext.__file__).parents[1]
PACKAGE = "lightning_ddp_ext"
ADAPTERS = tuple(f"{PACKAGE}.{name}" for name in ("integration", "lightning", "pytorch_lightning", "cli", "__main__"))
LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")
NO_TORCH = (f"{PACKAGE}.errors", f"{PACKAGE}.world")


def module_name(path: Path) -> str:
    """`lightning_ddp_ext/rendezvous/__init__.py` → `lightning_ddp_ext.rendezvous`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return name.startswith(tuple(f"{package}." for package in packages)) or name in packages


def imported(source: str, package: str) -> Iterator[str]:
    """The absolute names of what `source`, a module in `package`, imports: at its top, in functions, by a string."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module, names, level):
                above = ".".join(package.split(".")[: len(package.split(".")) - level + 1]) if level else ""
                base = ".".join(part for part in (above, module) if part)
                yield from (f"{base}.{alias.name}" for alias in names)
            case ast.Call(ast.Name(function) | ast.Attribute(_, function), [ast.Constant(str(name)), *_]):
                if function in ("import_module", "__import__", "find_spec"):
                    yield name


SOURCES = {module_name(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
PACKAGES = {name: name if path.stem == "__init__" else name.rpartition(".")[0] for name, path in SOURCES.items()}
DIRECT = {name: sorted(imported(path.read_text(encoding="utf-8"), PACKAGES[name])) for name, path in SOURCES.items()}
ROOMS = [name for name in SOURCES if name != PACKAGE and not within(name, ADAPTERS)]


def reached(name: str) -> dict[str, str]:
    """All that a module imports, by itself or through other modules of the package, and which module imports it.

    The package's own `__init__.py` is left out: it gathers the public names, and every module of the package runs it.
    """
    by: dict[str, str] = {}
    queue = [name]
    for module in queue:
        for target in DIRECT[module]:
            parts = target.split(".")
            prefixes = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
            queue += [ours for ours in prefixes if ours in SOURCES and ours not in (*queue, PACKAGE)]
            by.setdefault(target, module)
    return by


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_neither_lightning_nor_the_adapters(room: str) -> None:
    """A room can be used and tested without a Trainer."""
    assert {name: by for name, by in reached(room).items() if within(name, (*LIGHTNING, *ADAPTERS))} == {}


@pytest.mark.parametrize("module", NO_TORCH)
def test_errors_and_world_import_no_torch(module: str) -> None:
    """Errors and rank facts are plain Python, so that a launcher has them before torch is loaded."""
    assert {name: by for name, by in reached(module).items() if within(name, ("torch", "torchmetrics"))} == {}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch.distributed as dist", "torch.distributed"),
        ("from lightning.pytorch import Trainer", "lightning.pytorch.Trainer"),
        ("def late():\n    from ..integration import strategy", f"{PACKAGE}.integration.strategy"),
        ("from . import store", f"{PACKAGE}.rendezvous.store"),
        ("import importlib\nimportlib.import_module('pytorch_lightning')", "pytorch_lightning"),
    ],
)
def test_every_form_of_import_is_seen(source: str, name: str) -> None:
    """The two checks above would notice an import in any of its forms."""
    assert name in imported(source, f"{PACKAGE}.rendezvous")


def test_windows_is_refused_in_a_sentence() -> None:
    """Before anything is imported that is not there."""
    code = "import sys; sys.platform = 'win32'; import lightning_ddp_ext"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "ImportError: lightning-ddp-ext runs on Linux and macOS, and not on Windows; use it in WSL 2"
    )


def test_other_programs_find_each_distribution_once() -> None:
    """What waits for the other Lightning's import among the finders finds nothing else."""
    assert importlib.metadata.packages_distributions()["torch"] == ["torch"]
