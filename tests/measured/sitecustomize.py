"""Python runs this at the start of each script of a test run that measures coverage: see ``tests.scripts``.

Coverage starts when the script imports the package, and not before: tracing how torch and Lightning are imported takes
a third as long as importing them.
"""

from __future__ import annotations

import os
import sys


class CoverageStarter:
    """Finds no module, but notices which one is looked for."""

    def __init__(self, config: str) -> None:
        self.config = config

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "lightning_ddp_ext" and self.config:
            config, self.config = self.config, ""
            start_coverage(config)


def start_coverage(config: str) -> None:
    import coverage

    os.environ["COVERAGE_PROCESS_CONFIG"] = config
    coverage.process_startup()
    del os.environ["COVERAGE_PROCESS_CONFIG"]  # what this process starts will begin as late as this one


if "TEST_COVERAGE_CONFIG" in os.environ:
    sys.meta_path.insert(0, CoverageStarter(os.environ["TEST_COVERAGE_CONFIG"]))  # type: ignore[arg-type]
