"""Actions run once at the exit of a process."""

import subprocess
import sys

import pytest

# Each prints "ran" in one process.
AN_ORDINARY_PROCESS = """
from lightning_ddp_ext.rendezvous.process_context import at_exit

at_exit(lambda: print("ran", flush=True))
"""
A_CHILD_OF_MULTIPROCESSING = """
from multiprocessing import get_context
from lightning_ddp_ext.rendezvous.process_context import at_exit

def register():
    at_exit(lambda: print("ran", flush=True))

get_context("fork").Process(target=register).start()
"""
A_PARENT_OF_FORKED_CHILDREN = """
import os
from multiprocessing import get_context
from lightning_ddp_ext.rendezvous.process_context import at_exit

at_exit(lambda: print("ran", flush=True))
get_context("fork").Process(target=int).start()
child = os.fork()
if child == 0:
    raise SystemExit
os.waitpid(child, 0)
"""


@pytest.mark.unit
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(AN_ORDINARY_PROCESS, id="process"),
        pytest.param(A_CHILD_OF_MULTIPROCESSING, id="child"),
        pytest.param(A_PARENT_OF_FORKED_CHILDREN, id="parent"),
    ],
)
def test_an_exit_action_runs_once(code: str) -> None:
    """It runs in the process that registered it, even a child of multiprocessing, and
    not in processes that this one forks later.
    """
    script = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    assert script.stdout == "ran\n"
