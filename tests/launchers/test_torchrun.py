"""torchrun, and what came before it: an agent starts the ranks, and starts them again after a failure."""

from __future__ import annotations

import re
from pathlib import Path

from tests.harness.ranks import free_port
from tests.harness.scripts import run_script
from tests.launchers.runs import METHODS, SCRIPT, Reference, argv_of, output_of, runs_by


def test_torch_distributed_launch(tmp_path: Path, reference: Reference) -> None:
    """The older launcher starts ranks as torchrun does, if it leaves the script's arguments alone."""
    runs = runs_by([*METHODS, "directory"], tmp_path)
    words = ("--use-env", "--nproc-per-node=2", f"--master-port={free_port()}")
    launcher = ("python", "-m", "torch.distributed.launch", *words)
    output = output_of(run_script(SCRIPT, *argv_of(runs), launcher=launcher))
    for run in runs:
        run.expect_trained(reference(2), output, returns=8)


def test_torchrun(tmp_path: Path, reference: Reference) -> None:
    """The init method says where ranks meet, also anew after one was killed; before that the other one has named it."""
    env, tcp, file = runs = runs_by(METHODS, tmp_path)
    kills = ("--die", "0", "0", env.url, "--die", "1", "1", file.url)
    launcher = ("torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=2")
    output = output_of(run_script(SCRIPT, *argv_of(runs), *kills, launcher=launcher, time_limit=90.0))
    for run, launches in ((env, 3), (tcp, 2), (file, 2)):
        run.expect_trained(reference(2), output, returns=10, launches=launches)
    for victim in range(2):
        death = rf"rank {victim} \(host .+, pid \d+\) died: its process ended unexpectedly; every rank stops\."
        named = re.findall(rf"^\[rank {1 - victim}\] RankDiedError: {death}", output, re.MULTILINE)
        assert len(named) == 1, output
