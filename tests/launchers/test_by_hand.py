"""Processes that somebody else has started, one per rank: by hand, by srun, by mpirun."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.harness.ranks import Environment, by_hand_env, free_port
from tests.launchers.environments import by_mpirun, by_srun
from tests.launchers.runs import METHODS, Learned, Reference, Run, argv_of, run_by_hand, runs_by


def address() -> dict[str, str]:
    """What a user exports beside the rank for ``env``."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def expect_all_trained(
    methods: Iterable[str], directory: Path, learned: Learned, env: Environment, *arguments: str
) -> None:
    """Fail unless two processes that have this in their environment train by one method after another."""
    runs = runs_by(methods, directory)
    output = run_by_hand([*argv_of(runs), *arguments], env)
    for run in runs:
        run.expect_trained(learned, output, returns=2 * len(runs))


def test_by_hand_with_three_variables(tmp_path: Path, reference: Reference) -> None:
    """RANK, WORLD_SIZE and LOCAL_RANK make a rank of any process."""
    env: Environment = {**by_hand_env(2), **address(), "DDPX_RUN_ID": "run 42"}
    expect_all_trained([*METHODS, "directory"], tmp_path, reference(2), env)


@pytest.mark.lowest
def test_by_hand_with_arguments(tmp_path: Path, reference: Reference) -> None:
    """``rank=`` and ``world_size=`` make a rank of any process, without a variable."""
    expect_all_trained(METHODS, tmp_path, reference(2), address(), "--rank", "{rank}", "--world-size", "2")


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


def test_srun(tmp_path: Path, reference: Reference) -> None:
    """A task of srun is a rank, and needs nothing else: address and run are named after the job."""
    expect_all_trained([*METHODS, "directory"], tmp_path, reference(2), by_srun())


def test_mpirun(tmp_path: Path, reference: Reference) -> None:
    """A process of Open MPI's mpirun is a rank, also where mpi4py is not installed."""
    expect_all_trained(["tcp", "file", "directory"], tmp_path, reference(2), by_mpirun())


@pytest.mark.parametrize("launcher", ["hand", "arguments", "srun"])
def test_env_is_what_nobody_needs_to_choose(launcher: str, tmp_path: Path, reference: Reference) -> None:
    """Without an init method the ranks meet where the launcher's variables say."""
    run = Run(tmp_path, "env")
    env: dict[str, Environment] = {
        "hand": {**by_hand_env(2), **address()},
        "arguments": address(),
        "srun": by_srun(),
    }
    choice = ("--rank", "{rank}", "--world-size", "2") if launcher == "arguments" else ()
    run.expect_trained(reference(2), run_by_hand([str(run.records), *choice], env[launcher]))
