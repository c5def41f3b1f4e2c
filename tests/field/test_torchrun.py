"""Two agents of torchrun as two nodes: their ranks resume at the next step, whichever
process fails.
"""

from __future__ import annotations

import math
import re
import signal
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.field import train
from tests.harness.outcomes import output_of_all
from tests.harness.ranks import RankProcesses, free_port
from tests.harness.scripts import start_script

pytestmark = pytest.mark.field
TRAIN = str(Path(train.__file__))
SLOWLY = "step=0.1"
RESCUE = "rescue_checkpoint=rescued.ckpt"


class Job:
    """A job whose agents share a directory and meet at a port; the first one started
    listens there.
    """

    def __init__(self, directory: Path, *arguments: str, nodes: str = "2") -> None:
        self._directory = directory
        self._arguments = arguments
        self._nodes = nodes
        self._port = free_port()
        self._is_host = True

    def start_agent(self) -> AbstractContextManager[RankProcesses]:
        """Start torchrun on another node, with one rank."""
        settings = {
            "is_host": self._is_host,
            "keep_alive_interval": 1,  # so that a killed agent is missed after two seconds
            "keep_alive_max_attempt": 2,
            "last_call_timeout": 1,
        }
        self._is_host = False
        words = [
            "torchrun",
            f"--nnodes={self._nodes}",
            "--nproc-per-node=1",
            "--max-restarts=3",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self._port}",
            f"--rdzv-conf={','.join(f'{name}={value}' for name, value in settings.items())}",
            "--local-addr=127.0.0.1",
        ]
        arguments = ["devices=1", f"nodes={self._nodes[-1]}", *self._arguments]
        return start_script(TRAIN, *arguments, launcher=words, cwd=self._directory)


def run(directory: Path, *arguments: str) -> str:
    """Return what two nodes write until both succeed."""
    job = Job(directory, *arguments)
    with job.start_agent() as first, job.start_agent() as second:
        return output_of_all([*first.wait(), *second.wait()])


def weights_in(output: str) -> set[str]:
    return set(re.findall(r"^weights (\w+)$", output, re.MULTILINE))


def starts_in(output: str) -> list[int]:
    """Return the steps from which rank 0 trained."""
    return [
        int(step) for step in re.findall(r"^rank 0 trains from step (\d+)$", output, re.MULTILINE)
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The weights of a run that is not stopped."""
    weights = weights_in(run(tmp_path_factory.mktemp("undisturbed")))
    assert len(weights) == 1
    return weights


@pytest.mark.parametrize("fault", ["death of 0", "death of 1", "error of 0", "error of 1"])
def test_a_failed_rank(fault: str, undisturbed: set[str], tmp_path: Path) -> None:
    """Both agents restart their ranks, which continue after the last finished step."""
    output = run(tmp_path, SLOWLY, f"act={fault}", RESCUE)
    assert starts_in(output) == [0, 4], output
    assert weights_in(output) == undisturbed


def test_a_killed_agent_returns(undisturbed: set[str], tmp_path: Path) -> None:
    """The other agent waits for another one, and no step is lost."""
    job = Job(tmp_path, "step=0.5", RESCUE)
    with job.start_agent() as first, job.start_agent() as second:
        second.wait_for_output("trains from step 0", 0)
        second.kill(0)
        first.wait_for_output("died: its process ended unexpectedly", 0)
        with job.start_agent() as third:
            output = output_of_all([*first.wait(), *third.wait()])
    saved = re.findall(r"saved step (\d+) to", output)
    assert starts_in(output) == [0, *map(int, saved)], output
    assert weights_in(output) == undisturbed


def test_sigterm_to_an_agent(undisturbed: set[str], tmp_path: Path) -> None:
    """All ranks save; with another agent, the job continues with the next step."""
    job = Job(tmp_path, "step=0.5")
    with job.start_agent() as first, job.start_agent() as second:
        second.wait_for_output("trains from step 0", 0)
        second.kill(0, signal.SIGTERM)
        (left,) = second.wait()
        with job.start_agent() as third:
            output = left.output + output_of_all([*first.wait(), *third.wait()])
    stopped = re.findall(r"all ranks stop after step (\d+); saved to", output)
    assert starts_in(output) == [0, *map(int, stopped)], output
    assert weights_in(output) == undisturbed


def test_a_range_of_nodes(tmp_path: Path) -> None:
    """Without a lost node the others continue, with it if it returns, and each sample
    is trained once.
    """
    job = Job(tmp_path, "step=0.5", RESCUE, nodes="1:2")
    with job.start_agent() as first, job.start_agent() as second:
        second.wait_for_output("trains from step 0", 0)
        second.kill(0)
        first.wait_for_output("torchrun has 1 of num_nodes=2 nodes", 0)
        with job.start_agent() as third:
            output = output_of_all([*first.wait(), *third.wait()])
    start, alone, together = starts_in(output)
    assert start == 0
    assert [alone] == list(map(int, re.findall(r"saved step (\d+) to", output))), output
    assert [together] == list(map(int, re.findall(r"all ranks stop after step (\d+);", output)))
    left = train.STEPS * 6 - alone * 6 - (together - alone) * 3
    for rank in (0, 1):
        assert f"rank {rank} of 2 trained to step {together + math.ceil(left / 6)}" in output
    assert len(weights_in(output)) == 1, output
