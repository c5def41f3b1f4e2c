"""Launchers and options that cannot work together raise an error before any rank
connects.
"""

import os
import re
from typing import Any

import pytest

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.errors import DDPExtError
from tests.harness.environment import by_mpirun, by_srun
from tests.harness.ranks import Environment, by_hand_env, run_ranks
from tests.harness.training import Net, make_trainer

Options = dict[str, Any]


def by_torchrun() -> Environment:
    """``torchrun --nproc-per-node``; the address has no listener."""
    return {
        **by_hand_env(2, port=29500),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "none",
    }


def refusals(rank: int, world_size: int, choices: list[Options]) -> list[str]:
    """Return the error of each choice of the strategy's options, on rank 0 of 2."""
    errors = []
    for options in choices:
        with pytest.raises(DDPExtError) as refused:
            make_trainer(DDPExtStrategy(**options)).fit(Net())
        errors.append(f"{type(refused.value).__name__}: {refused.value}")
    return errors


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        (by_torchrun(), "torchrun"),
        (by_srun(), "SLURM"),
        (by_mpirun(), "Open MPI"),
        (by_hand_env(2), "RANK, WORLD_SIZE and LOCAL_RANK"),
    ],
)
def test_a_rank_does_not_start_ranks(env: Environment, launcher: str) -> None:
    """The error of spawn, fork and forkserver names the launcher of this rank."""
    start_methods = ("spawn", "fork", "forkserver")
    expected = [
        f"ConfigurationError: start_method={method!r} starts the ranks itself, but this process is"
        f" already rank 0 of 2 according to {launcher}; use strategy='ddp_ext' here, or start the"
        " script without a launcher"
        for method in start_methods
    ]
    choices: list[Options] = [{"start_method": method} for method in start_methods]
    assert run_ranks(refusals, 1, choices, env=env) == [expected]


@pytest.mark.parametrize("env", [by_mpirun(), by_hand_env(2)], ids=["Open MPI", "by hand"])
def test_ranks_without_an_address_are_refused(env: Environment) -> None:
    """Each rank would choose another port."""
    expected = (
        "RendezvousError: init_method 'env://' needs MASTER_ADDR and MASTER_PORT in the environment"
        " if you start each process yourself (got MASTER_ADDR=None, MASTER_PORT=None); export both"
        " with the same values on every rank, or choose init_method='tcp://HOST:PORT' or"
        " 'file:///PATH'"
    )
    choices: list[Options] = [{}, {"init_method": "env://"}]
    assert run_ranks(refusals, 1, choices, env=env) == [[expected, expected]]


def refused_addresses(rank: int, world_size: int, addresses: list[Environment]) -> list[str]:
    """Return the error of each address, on rank 0 of 2, without the remedy."""
    errors = []
    for address in addresses:
        os.environ.update(address)
        (error,) = refusals(rank, world_size, [{}])
        errors.append(error.partition("; ")[0])
    return errors


def test_an_address_that_no_rank_can_use_is_refused() -> None:
    """The error names both variables and their values."""
    addresses = [("host", "0"), ("host", "abc"), ("host", ""), ("", "29500"), ("[::1]", "29500")]
    choices = [{"MASTER_ADDR": host, "MASTER_PORT": port} for host, port in addresses]
    expected = [
        "ConfigurationError: init_method 'env://' needs a host in MASTER_ADDR, without brackets,"
        f" and a port in 1..65535 in MASTER_PORT (got MASTER_ADDR={host!r}, MASTER_PORT={port!r})"
        for host, port in addresses
    ]
    assert run_ranks(refused_addresses, 1, choices, env=by_hand_env(2)) == [expected]


JOB_OF_TWO = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "1",
}
BATCH_SCRIPT = {**JOB_OF_TWO, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param(
            BATCH_SCRIPT | {"SLURM_NTASKS": "1"},
            r"devices \* num_nodes must equal world_size \(.+, from SLURM\); .+",
            id="with one task for two devices",
        ),
        pytest.param(
            {**by_srun(), "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_NAME": "bash"},
            "srun started 2 tasks, but Lightning ignores SLURM in a job named 'bash', .+; use"
            " srun --job-name=.+ or unset SLURM_STEP_NUM_TASKS if each task .+",
            id="in a job that Lightning ignores",
        ),
    ],
)
def test_a_script_that_slurm_does_not_make_a_rank_of_two_is_refused(
    env: Environment, expected: str
) -> None:
    """The ranks would wait for each other, or each task would train alone."""
    [[error]] = run_ranks(refusals, 1, [{}], env=env)
    assert re.fullmatch(f"ConfigurationError: {expected}", error)
