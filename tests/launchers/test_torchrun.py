"""torchrun, and what came before it: an agent starts the ranks, and starts them again after a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launchers.runs import METHODS, SCRIPT, Reference, Run, output_of
from tests.ranks import free_port
from tests.scripts import run_script


@pytest.mark.parametrize("method", [*METHODS, "directory"])
def test_torch_distributed_launch(method: str, tmp_path: Path, reference: Reference) -> None:
    """The older launcher starts ranks as torchrun does, if it leaves the script's arguments alone."""
    run = Run(tmp_path, method)
    words = ("--use-env", "--nproc-per-node=2", f"--master-port={free_port()}")
    launcher = ("python", "-m", "torch.distributed.launch", *words)
    run.expect_trained(reference(2), output_of(run_script(SCRIPT, *run.argv, launcher=launcher)))


@pytest.mark.parametrize("method", METHODS)
def test_torchrun(method: str, tmp_path: Path, reference: Reference) -> None:
    """The init method says where ranks meet, also those that torchrun starts in their place after one was killed."""
    run = Run(tmp_path, method)
    launcher = ("torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    done = run_script(SCRIPT, *run.argv, "--die-once", "1", launcher=launcher, time_limit=90.0)
    run.expect_trained(reference(2), output_of(done), launches=2)
