"""Pairs of launcher and init method that make no sense: the error says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.ranks import Environment, RankError, by_hand_env, launch_ranks
from tests.launchers.environments import by_mpirun, by_srun, by_torchrun
from tests.launchers.runs import Run, be_the_script

STARTED: dict[str, tuple[Environment, str]] = {
    "torchrun": (by_torchrun(), "torchrun"),
    "srun": (by_srun(), "SLURM"),
    "mpirun": (by_mpirun(), "Open MPI"),
    "hand": (by_hand_env(2), "RANK, WORLD_SIZE and LOCAL_RANK"),
    "arguments": ({}, "arguments"),
}
WITH_ARGUMENTS = ("--rank", "{rank}", "--world-size", "2")


def refusal(argv: list[str], env: Environment) -> RankError:
    """The error with which a lone rank 0 of 2 ends: nothing of it may need the other one."""
    (outcome,) = launch_ranks(be_the_script, 1, *argv, env=env)
    assert outcome.error is not None, outcome.story()
    return outcome.error


@pytest.mark.parametrize("started_by", STARTED)
@pytest.mark.parametrize("start_method", ["spawn", "fork", "forkserver"])
def test_a_rank_starts_no_ranks(start_method: str, started_by: str, tmp_path: Path) -> None:
    """Spawn, fork and forkserver are refused in a process that is a rank, by the name of what has made it one."""
    env, name = STARTED[started_by]
    choice = WITH_ARGUMENTS if started_by == "arguments" else ()
    error = refusal([str(tmp_path), "--start-method", start_method, *choice], env)
    assert error.type_name == "WorldError"
    assert error.message == (
        f"start_method={start_method!r} starts the ranks itself, but this process was started as one of them already "
        f"(rank 0 of 2, from {name}); use strategy='ddp_ext' here, or start the script without a launcher"
    )


@pytest.mark.parametrize("started_by", ["hand", "arguments", "mpirun"])
@pytest.mark.parametrize("choice", [("--init-method", "env://"), ()], ids=["env", "none"])
def test_env_needs_an_address(choice: tuple[str, ...], started_by: str, tmp_path: Path) -> None:
    """Where no launcher has said at which port the ranks meet, each of them would choose another one."""
    with_arguments = WITH_ARGUMENTS if started_by == "arguments" else ()
    error = refusal([str(tmp_path), *choice, *with_arguments], STARTED[started_by][0])
    assert error.type_name == "StoreError"
    assert error.message == (
        "init_method 'env://' needs MASTER_ADDR and MASTER_PORT in the environment of processes that are started one "
        "by one (got MASTER_ADDR=None, MASTER_PORT=None); export both, the same on every rank, or choose "
        "init_method='tcp://HOST:PORT' or 'file:///PATH'"
    )


@pytest.mark.parametrize("started_by", ["hand", "arguments"])
def test_a_directory_needs_a_run_id(started_by: str, tmp_path: Path) -> None:
    """Where no launcher has a name for the run, nobody can tell how its file in a directory is called."""
    run = Run(tmp_path, "directory")
    choice = WITH_ARGUMENTS if started_by == "arguments" else ()
    error = refusal([*run.argv, *choice], STARTED[started_by][0])
    assert error.type_name == "InitMethodError"
    assert error.message == (
        f"init_method '{run.url}' is a directory and needs a run id to name a file in it (got none); give run_id= or "
        "set DDPX_RUN_ID, the same on every rank"
    )


def test_arguments_that_contradict_the_launcher(tmp_path: Path) -> None:
    """Torchrun says who is who; ``rank=`` beside it is a mistake, and the error names both."""
    error = refusal([str(tmp_path), "--rank", "1", "--world-size", "2"], by_torchrun())
    assert error.type_name == "WorldError"
    assert error.message == (
        "rank=1 and world_size=2 contradict torchrun, by which this process is rank 0 of 2; leave the arguments out, "
        "or start the processes by hand"
    )
