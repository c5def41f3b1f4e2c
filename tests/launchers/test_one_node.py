"""Each launcher on one node, and each way for its ranks to meet: they learn what they learn with stock."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.harness.ranks import by_hand_env, free_port
from tests.harness.scripts import run_script
from tests.launchers.environments import by_mpirun, by_srun
from tests.launchers.runs import METHODS, SCRIPT, Reference, Runs, output_of, run_by_hand


def test_by_hand_with_three_variables(tmp_path: Path, reference: Reference) -> None:
    """RANK, WORLD_SIZE and LOCAL_RANK make a rank of any process."""
    runs = Runs(tmp_path, "none", *METHODS)
    env = {**by_hand_env(2, free_port()), "DDPX_RUN_ID": "run 42"}
    runs.expect_trained(reference(2), run_by_hand(runs.argv, env))


@pytest.mark.lowest
def test_by_hand_with_arguments(tmp_path: Path, reference: Reference) -> None:
    """``rank=`` and ``world_size=`` make a rank of any process, and ``run_id=`` names its run, without a variable."""
    runs = Runs(tmp_path, "none", *METHODS)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = ("--rank", "{rank}", "--world-size", "2", "--run-id", "run 42")
    runs.expect_trained(reference(2), run_by_hand([*runs.argv, *arguments], env))


def test_srun(tmp_path: Path, reference: Reference) -> None:
    """A task of srun is a rank, and needs nothing else: address and run are named after the job."""
    runs = Runs(tmp_path, "none", *METHODS)
    runs.expect_trained(reference(2), run_by_hand(runs.argv, by_srun()))


def test_mpirun(tmp_path: Path, reference: Reference) -> None:
    """A process of Open MPI's mpirun is a rank, also where mpi4py is not installed; rank 0 may have an IPv6 address."""
    runs = Runs(tmp_path, "tcp", "file", "directory", tcp=f"tcp://[::1]:{free_port('::1')}")
    runs.expect_trained(reference(2), run_by_hand(runs.argv, by_mpirun()))


@pytest.mark.parametrize(("start_method", "methods"), [("spawn", ("none",)), ("fork", METHODS)])
def test_spawn_and_fork(start_method: str, methods: tuple[str, ...], tmp_path: Path, reference: Reference) -> None:
    """Ranks can be started from any process, also from one that runs no script, and the init method is theirs."""
    runs = Runs(tmp_path, *methods)
    output = run_by_hand([*runs.argv, "--start-method", start_method], {}, world_size=1, time_limit=90.0)
    runs.expect_trained(reference(2), output, returns=len(methods))


def test_forkserver(tmp_path: Path, reference: Reference) -> None:
    """What the ranks have learned comes home, and a second call starts ranks with it."""
    runs = Runs(tmp_path, "file")  # each rank of each call imports torch and Lightning anew
    output = output_of(run_script(SCRIPT, *runs.argv, "--start-method", "forkserver", "--calls", "fit", "test"))
    runs.expect_trained(reference(2), output, returns=1, launches=[2])
    assert output.count(json.dumps({"results": [reference(2)[1]]})[1:-1]) == 1


def test_torch_distributed_launch(tmp_path: Path, reference: Reference) -> None:
    """The older launcher starts ranks as torchrun does, if it leaves the script's arguments alone."""
    runs = Runs(tmp_path, *METHODS)
    words = ("--use-env", "--nproc-per-node=2", f"--master-port={free_port()}")
    launcher = ("python", "-m", "torch.distributed.launch", *words)
    runs.expect_trained(reference(2), output_of(run_script(SCRIPT, *runs.argv, launcher=launcher)))


def test_torchrun(tmp_path: Path, reference: Reference) -> None:
    """The init method says where ranks meet, also anew after one was killed; before that the other one has named it."""
    runs = Runs(tmp_path, "env", "tcp", "file")
    kills = ("--die", "0", "0", "0", "--die", "1", "1", "2")  # rank 0 in the first run; then rank 1 in the last one
    launcher = ("torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=2")
    output = output_of(run_script(SCRIPT, *runs.argv, *kills, launcher=launcher, time_limit=90.0))
    runs.expect_trained(reference(2), output, returns=10, launches=[3, 2, 2])
    for victim in range(2):
        death = rf"rank {victim} \(host .+, pid \d+\) died: its process ended unexpectedly; every rank stops\."
        named = re.findall(rf"^\[rank {1 - victim}\] RankDiedError: {death}", output, re.MULTILINE)
        assert len(named) == 1, output
