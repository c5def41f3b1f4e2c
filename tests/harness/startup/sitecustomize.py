"""Python runs this at the start of each script of a test run: see ``tests.harness.scripts``.

Coverage, where it is measured, starts when the script imports the package, and not before: tracing how torch and
Lightning are imported takes a third as long as importing them. Until the package is imported, and for all that is there
by then, Python's collector of garbage rests: it finds none, in a third of the time that a script needs to import torch
and Lightning and to end.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


class PackageFinder:
    """Finds the package, once, as the other finders do, and notices the beginning and end of its import."""

    has_looked = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "lightning_ddp_ext" or self.has_looked:
            return None
        self.has_looked = True
        start_coverage()
        spec = importlib.util.find_spec(name)
        return spec and collecting_after(spec)


def start_coverage() -> None:
    config = os.environ.get("TEST_COVERAGE_CONFIG")
    if config:
        import coverage

        os.environ["COVERAGE_PROCESS_CONFIG"] = config
        coverage.process_startup()
        del os.environ["COVERAGE_PROCESS_CONFIG"]  # what this process starts will begin as late as this one


def collecting_after(spec: ModuleSpec) -> ModuleSpec:
    """The same module, after whose import garbage is collected, among what comes later."""
    assert spec.loader is not None
    load = spec.loader.exec_module

    def load_and_collect(module: ModuleType) -> None:
        try:
            load(module)
        finally:
            gc.freeze()
            gc.enable()

    spec.loader.exec_module = load_and_collect  # type: ignore[method-assign]
    return spec


gc.disable()
sys.meta_path.insert(0, PackageFinder())  # type: ignore[arg-type]
