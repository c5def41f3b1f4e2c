"""Imports run one way: adapters import rooms, and rooms never import Lightning."""

import importlib.metadata
import pkgutil
import subprocess
import sys

import pytest

import lightning_ddp_ext

PACKAGE = "lightning_ddp_ext"
ADAPTERS = tuple(f"{PACKAGE}.{name}" for name in ("integration", "lightning", "pytorch_lightning", "cli", "__main__"))
LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")
MODULES = [module.name for module in pkgutil.walk_packages(lightning_ddp_ext.__path__, f"{PACKAGE}.")]
ROOMS = [name for name in MODULES if not f"{name}.".startswith(tuple(f"{each}." for each in ADAPTERS))]

# Without the package's own __init__.py, which gathers the public names.
IMPORT = f"""
import importlib, sys, types
path, without, modules = sys.argv[1:]
sys.modules["{PACKAGE}"] = types.ModuleType("{PACKAGE}")
sys.modules["{PACKAGE}"].__path__ = [path]
sys.modules.update(dict.fromkeys(without.split()))
for name in modules.split():
    importlib.import_module(name)
"""


@pytest.mark.parametrize(
    ("modules", "without"),
    [(ROOMS, (*LIGHTNING, *ADAPTERS)), ([f"{PACKAGE}.errors", f"{PACKAGE}.world"], ("torch", "torchmetrics"))],
    ids=["rooms", "errors and world"],
)
def test_modules_need_nothing_above_them(modules: list[str], without: tuple[str, ...]) -> None:
    """Rooms work without Lightning and the adapters; a launcher has errors and rank facts before torch is loaded."""
    words = [*lightning_ddp_ext.__path__, " ".join(without), " ".join(modules)]
    ended = subprocess.run([sys.executable, "-c", IMPORT, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


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
