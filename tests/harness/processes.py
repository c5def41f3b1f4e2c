"""Forward names to their new places, until all tests import these."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path
from types import FunctionType
from typing import Any

from tests.harness.environment import MARK as MARK
from tests.harness.environment import marked as marked
from tests.harness.environment import name_of as name_of
from tests.harness.environment import wait_until as wait_until
from tests.harness.environment import wait_until_exited as wait_until_exited

LIBRARIES = ("lightning", "lightning_fabric", "pytorch_lightning", "torch", "torchmetrics")
KINDS = (FunctionType, type, property, classmethod, staticmethod)


def definitions() -> dict[str, Any]:
    """Return functions and classes of all imported modules, and the methods and
    properties of these classes.
    """
    warnings.simplefilter("ignore", FutureWarning)  # of torch's module attributes
    found: dict[str, Any] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in LIBRARIES:
            found |= defined_in(module, module_name)
            for name, cls in list(vars(module).items()):
                if isinstance(cls, type) and cls.__module__ == module_name:
                    found |= defined_in(cls, f"{module_name}.{name}")
    return found


def defined_in(owner: Any, name: str) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for key, value in list(vars(owner).items())
        if isinstance(value, KINDS)
    }


def changed(before: dict[str, Any]) -> list[str]:
    """Return the names of definitions that have changed."""
    now = definitions()
    return sorted(name for name, value in before.items() if now.get(name) is not value)


def of_process() -> dict[str, Any]:
    """Return the environment, signal handlers (including those in C), the limit of open
    files, and our threads.
    """
    found: dict[str, Any] = dict(os.environ)
    found |= {each.name: signal.getsignal(each) for each in signal.Signals}
    found |= dict(
        re.findall(
            r"^(Sig(?:Blk|Ign|Cgt)):\t(.*)$", Path("/proc/self/status").read_text(), re.MULTILINE
        )
    )
    found["files"] = resource.getrlimit(resource.RLIMIT_NOFILE)
    return found | {
        thread.name: "" for thread in threading.enumerate() if thread.name.startswith("ddpx")
    }


def changed_in_process(before: dict[str, Any]) -> dict[str, Any]:
    """List the definitions that have changed, before and now."""
    now = of_process()
    return {name: (before.get(name), now.get(name)) for name, _ in before.items() ^ now.items()}
