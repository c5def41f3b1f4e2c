"""Processes that somebody else has started, one per rank: by hand, by srun, by mpirun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launchers.environments import by_mpirun, by_srun
from tests.launchers.runs import METHODS, Reference, Run, run_by_hand
from tests.ranks import Environment, by_hand_env, free_port


def address(method: str) -> dict[str, str]:
    """What a user exports beside the rank: for ``env`` the address, for a directory the run's name."""
    if method == "env":
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return {"DDPX_RUN_ID": "run 42"} if method == "directory" else {}


@pytest.mark.parametrize("method", [*METHODS, "directory"])
def test_by_hand_with_three_variables(method: str, tmp_path: Path, reference: Reference) -> None:
    """RANK, WORLD_SIZE and LOCAL_RANK make a rank of any process."""
    run = Run(tmp_path, method)
    output = run_by_hand(run.argv, {**by_hand_env(2), **address(method)})
    run.expect_trained(reference(2), output)


@pytest.mark.parametrize(
    "method", [pytest.param("env", marks=pytest.mark.lowest), pytest.param("tcp", marks=pytest.mark.lowest), "file"]
)
def test_by_hand_with_arguments(method: str, tmp_path: Path, reference: Reference) -> None:
    """``rank=`` and ``world_size=`` make a rank of any process, without a variable."""
    run = Run(tmp_path, method)
    output = run_by_hand([*run.argv, "--rank", "{rank}", "--world-size", "2"], address(method))
    run.expect_trained(reference(2), output)


def test_by_hand_with_arguments_in_a_directory(tmp_path: Path, reference: Reference) -> None:
    """``run_id=`` names the file in a directory."""
    run = Run(tmp_path, "directory")
    output = run_by_hand([*run.argv, "--rank", "{rank}", "--world-size", "2", "--run-id", "run 42"], {})
    run.expect_trained(reference(2), output)


def test_by_hand_over_ipv6(ipv6: None, tmp_path: Path, reference: Reference) -> None:
    """An address of IPv6 stands in brackets."""
    run = Run(tmp_path, "ipv6")
    run.expect_trained(reference(2), run_by_hand(run.argv, by_hand_env(2)))


def test_by_hand_at_another_loopback_address(tmp_path: Path, reference: Reference) -> None:
    """Each address of 127.0.0.0/8 is a place to meet."""
    run = Run(tmp_path, "tcp", url=f"tcp://127.0.1.1:{free_port('127.0.1.1')}")
    run.expect_trained(reference(2), run_by_hand(run.argv, by_hand_env(2)))


@pytest.mark.parametrize("method", [*METHODS, "directory"])
def test_srun(method: str, tmp_path: Path, reference: Reference) -> None:
    """A task of srun is a rank, and needs nothing else: address and run are named after the job."""
    run = Run(tmp_path, method)
    run.expect_trained(reference(2), run_by_hand(run.argv, by_srun()))


@pytest.mark.parametrize("method", ["tcp", "file", "directory"])
def test_mpirun(method: str, tmp_path: Path, reference: Reference) -> None:
    """A process of Open MPI's mpirun is a rank, also where mpi4py is not installed."""
    run = Run(tmp_path, method)
    run.expect_trained(reference(2), run_by_hand(run.argv, by_mpirun()))


@pytest.mark.parametrize("launcher", ["hand", "arguments", "srun"])
def test_env_is_what_nobody_needs_to_choose(launcher: str, tmp_path: Path, reference: Reference) -> None:
    """Without an init method the ranks meet where the launcher's variables say."""
    run = Run(tmp_path, "env")
    env: dict[str, Environment] = {
        "hand": {**by_hand_env(2), **address("env")},
        "arguments": address("env"),
        "srun": by_srun(),
    }
    choice = ("--rank", "{rank}", "--world-size", "2") if launcher == "arguments" else ()
    run.expect_trained(reference(2), run_by_hand([str(run.records), *choice], env[launcher]))
