"""Actions run once at the exit of a process."""

import subprocess
import sys

import pytest


@pytest.mark.unit
@pytest.mark.parametrize("start", ["register()", "Process(target=register).start()"])
def test_an_exit_action_runs_once(start: str) -> None:
    """It runs in an ordinary process and in a child of multiprocessing."""
    lines = (
        "from multiprocessing import get_context",
        "from lightning_ddp_ext.at_exit import at_exit",
        "Process = get_context('fork').Process",
        "register = lambda: at_exit(lambda: print('ran', flush=True))",
        start,
    )
    script = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE, text=True, check=True
    )
    assert script.stdout == "ran\n"
