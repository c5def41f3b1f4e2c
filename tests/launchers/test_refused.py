"""Pairs of launcher and init method that cannot work raise an error with the reason
before any rank connects.
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
    """Return the errors with which a lone rank 0 of 2 ends."""
    found = []
    for options in choices:
        with pytest.raises(DDPExtError) as refused:
            make_trainer(DDPExtStrategy(**options)).fit(Net())
        found.append(f"{type(refused.value).__name__}: {refused.value}")
    return found


@pytest.mark.parametrize(
    ("env", "name", "has_address"),
    [
        (by_torchrun(), "torchrun", True),
        (by_srun(), "SLURM", True),
        (by_mpirun(), "Open MPI", False),
        (by_hand_env(2), "RANK, WORLD_SIZE and LOCAL_RANK", False),
    ],
)
def test_lone_ranks_are_refused(env: Environment, name: str, has_address: bool) -> None:
    """Spawn, fork and forkserver are refused in a process that is a rank, by the name
    of what has made it one.

    Without an address from a launcher, each rank would choose its own.
    """
    address = (
        "RendezvousError: init_method 'env://' needs MASTER_ADDR and MASTER_PORT in the environment"
        " if you start each process yourself (got MASTER_ADDR=None, MASTER_PORT=None); export both"
        " with the same values on every rank, or choose init_method='tcp://HOST:PORT' or"
        " 'file:///PATH'"
    )
    start_methods = ("spawn", "fork", "forkserver")
    choices: list[Options] = [{"start_method": method} for method in start_methods]
    expected = [
        f"ConfigurationError: start_method={method!r} starts the ranks itself, but this process is"
        f" already rank 0 of 2 according to {name}; use strategy='ddp_ext' here, or start the"
        " script without a launcher"
        for method in start_methods
    ]
    if not has_address:
        choices += [{}, {"init_method": "env://"}]
        expected += [address, address]
    assert run_ranks(refusals, 1, choices, env=env) == [expected]


def refused_addresses(rank: int, world_size: int, addresses: list[Environment]) -> list[str]:
    """Return the first lines of the errors with which a lone rank 0 of 2 ends."""
    found = []
    for address in addresses:
        os.environ.update(address)
        found += [error.partition("; ")[0] for error in refusals(rank, world_size, [{}])]
    return found


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
        (
            BATCH_SCRIPT,
            (
                r"this script runs without srun, so SLURM has not started the 2 tasks of the job"
                r" \(.+\); write srun .+"
            ),
        ),
        (
            BATCH_SCRIPT | {"SLURM_NTASKS": "1"},
            r"devices \* num_nodes must equal world_size \(.+, from SLURM\); .+",
        ),
        (
            {**by_srun(), "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_NAME": "bash"},
            (
                "srun started 2 tasks, but Lightning ignores SLURM in a job named 'bash', .+; use"
                " srun --job-name=.+"
            ),
        ),
    ],
)
def test_tasks_of_slurm_that_do_not_become_ranks(env: Environment, expected: str) -> None:
    """They would wait for each other, or each would train alone."""
    [[error]] = run_ranks(refusals, 1, [{}], env=env)
    assert re.fullmatch(f"ConfigurationError: {expected}", error)
