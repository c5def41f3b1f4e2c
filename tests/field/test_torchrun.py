"""Two agents of torchrun as two nodes: their ranks resume at the next step, whichever
process fails.
"""

import itertools
import math
import signal
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.field import train
from tests.field.train import Start, starts_in, stops_in, weights_in
from tests.harness.ranks import Environment, RankProcesses, free_port, output_of_all
from tests.harness.scripts import start_script

# The number of the only process that ``Job.start_agent`` starts: the agent, which then starts
# a rank. It is not the number of a rank.
AGENT = 0
# By default, the agent of rank 0 does not tell its store's address to new agents:
# https://github.com/pytorch/pytorch/issues/147064
MAY_RETURN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Job:
    """A job of two nodes, or of ``min_nodes`` while one is missing; its agents share a
    directory and connect to a port.
    """

    def __init__(
        self, directory: Path, *arguments: str, min_nodes: int = 2, env: Environment | None = None
    ) -> None:
        self._directory = directory
        self._arguments = arguments
        self._min_nodes = min_nodes
        self._env = env
        self._port = free_port()

    def start_agent(self, *, is_host: bool = False) -> AbstractContextManager[RankProcesses]:
        """Start torchrun on another node, with one rank; the host listens at the port."""
        settings = {
            "is_host": is_host,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 10,  # seconds until a killed agent is missed
            "last_call_timeout": 5,
        }
        words = [
            "torchrun",
            f"--nnodes={self._min_nodes}:2",
            "--nproc-per-node=1",
            "--max-restarts=3",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self._port}",
            f"--rdzv-conf={','.join(f'{name}={value}' for name, value in settings.items())}",
            "--local-addr=127.0.0.1",
        ]
        return start_script(
            train.__file__,
            "devices=1",
            "nodes=2",
            *self._arguments,
            launcher=words,
            cwd=self._directory,
            env=self._env,
        )


def run(directory: Path, *arguments: str) -> str:
    """Return the output of two nodes; fail unless both succeed."""
    job = Job(directory, *arguments)
    with job.start_agent(is_host=True) as first, job.start_agent() as second:
        return output_of_all([*first.wait(), *second.wait()])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The weights of a run that is not stopped."""
    weights = weights_in(run(tmp_path_factory.mktemp("undisturbed")))
    assert len(weights) == 1
    return weights


def expect_resumed(output: str, undisturbed: set[str]) -> None:
    """Fail unless the job stopped once, and continued after the step at which it
    stopped.
    """
    stops = stops_in(output)
    assert len(stops) == 1, output
    assert starts_in(output) == [Start(step, ranks=2) for step in (0, *stops)], output
    assert weights_in(output) == undisturbed, output


@pytest.mark.parametrize("fault", ["death=0", "death=1", "error=0", "error=1"])
def test_ranks_are_restarted_after_one_fails(
    fault: str, undisturbed: set[str], tmp_path: Path
) -> None:
    """Both agents restart their ranks, which continue after the last finished step."""
    expect_resumed(run(tmp_path, "step=0.1", fault), undisturbed)


each_loss = pytest.mark.parametrize(
    "loss", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"]
)


@each_loss
def test_an_agent_replaces_a_lost_one(
    loss: signal.Signals, undisturbed: set[str], tmp_path: Path
) -> None:
    """All ranks save, the other agent waits for the new one, and no step is lost."""
    job = Job(tmp_path, "step=0.5", env=MAY_RETURN)
    with job.start_agent(is_host=True) as first, job.start_agent() as second:
        second.wait_for_output(train.ONE_STEP_DONE, AGENT)
        second.kill(AGENT, loss)
        second.wait()
        with job.start_agent() as third:
            expect_resumed(output_of_all([*first.wait(), *third.wait()]), undisturbed)


def last_step_after(starts: list[Start]) -> int:
    """Return the step at which two ranks finish if each batch is trained once.

    For example, two ranks train from step 0 on, one alone from step 10 on, and two from step
    30 on: of 400 batches, 2 * 10 + 1 * 20 have been trained. The other 360 take 180 steps, so
    that the last one is step 210.
    """
    batches = 2 * train.STEPS  # of the epoch
    trained = sum(
        (following.step - start.step) * start.ranks
        for start, following in itertools.pairwise(starts)
    )
    return starts[-1].step + math.ceil((batches - trained) / 2)


@each_loss
def test_a_job_of_one_or_two_nodes_trains_each_sample_once(
    loss: signal.Signals, tmp_path: Path
) -> None:
    """One node continues without the lost one, and both continue when it returns."""
    job = Job(tmp_path, "step=0.5", min_nodes=1, env=MAY_RETURN)
    with job.start_agent(is_host=True) as first, job.start_agent() as second:
        second.wait_for_output("rank 1 of 2 trains from step", AGENT)
        second.kill(AGENT, loss)
        first.wait_for_output("rank 0 of 1 trains from step", AGENT)
        with job.start_agent() as third:
            output = output_of_all([*first.wait(), *third.wait()])
            (lost,) = second.wait()
            output += lost.output
    starts = starts_in(output)
    assert [start.step for start in starts] == [0, *stops_in(output)], output
    assert [start.ranks for start in starts[-2:]] == [1, 2], output
    last = last_step_after(starts)
    assert f"rank 0 of 2 trained to step {last}" in output, output
    assert f"rank 1 of 2 trained to step {last}" in output
    assert len(weights_in(output)) == 1, output
