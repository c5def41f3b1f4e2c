"""Launchers and options that cannot work together raise an error before any rank
connects.
"""

import re
from typing import Any

import pytest

from lightning_ddp_ext import DDPExtError, DDPExtStrategy
from tests.harness.environment import (
    Environment,
    by_hand_env,
    by_mpirun,
    by_srun,
    environment_of,
)
from tests.harness.training import Net, make_trainer

BY_TORCHRUN: Environment = {
    **by_hand_env(2, port=29500),  # where no server listens
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "TORCHELASTIC_RUN_ID": "none",
}


def refusal(monkeypatch: pytest.MonkeyPatch, env: Environment, **options: Any) -> str:
    """Return the error of these options of the strategy, on rank 0 of 2."""
    # Otherwise, the fit sets the number of threads.
    for name, value in {**environment_of(0, env), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DDPExtError) as refused:
        make_trainer(DDPExtStrategy(**options)).fit(Net())
    return f"{type(refused.value).__name__}: {refused.value}"


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        (BY_TORCHRUN, "torchrun"),
        (by_srun(), "SLURM"),
        (by_mpirun(), "Open MPI"),
        (by_hand_env(2), "RANK, WORLD_SIZE and LOCAL_RANK"),
    ],
)
def test_a_rank_does_not_start_ranks(
    env: Environment, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of spawn, fork and forkserver names the launcher of this rank."""
    for method in ("spawn", "fork", "forkserver"):
        assert refusal(monkeypatch, env, start_method=method) == (
            f"ConfigurationError: start_method={method!r} starts the ranks itself, but this process"
            f" is already rank 0 of 2 according to {launcher}; use strategy='ddp_ext' here, or"
            " start the script without a launcher"
        )


@pytest.mark.parametrize("env", [by_mpirun(), by_hand_env(2)], ids=["Open MPI", "by hand"])
@pytest.mark.parametrize("options", [{}, {"init_method": "env://"}])
def test_ranks_without_an_address_are_refused(
    env: Environment, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without MASTER_PORT, each rank would choose a port of its own, and wait there alone; the
    error names both variables and the alternatives.
    """
    assert refusal(monkeypatch, env, **options) == (
        "RendezvousError: init_method 'env://' needs MASTER_ADDR and MASTER_PORT in the environment"
        " if you start each process yourself (got MASTER_ADDR=None, MASTER_PORT=None); export both"
        " with the same values on every rank, or choose init_method='tcp://HOST:PORT' or"
        " 'file:///PATH'"
    )


@pytest.mark.parametrize(
    ("host", "port"),
    [("host", "0"), ("host", "abc"), ("host", ""), ("", "29500"), ("[::1]", "29500")],
)
def test_an_address_that_no_rank_can_use_is_refused(
    host: str, port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names both variables and their values."""
    env = {**by_hand_env(2), "MASTER_ADDR": host, "MASTER_PORT": port}
    assert refusal(monkeypatch, env).startswith(
        "ConfigurationError: init_method 'env://' needs a host in MASTER_ADDR, without brackets,"
        f" and a port in 1..65535 in MASTER_PORT (got MASTER_ADDR={host!r}, MASTER_PORT={port!r})"
    )


BATCH_SCRIPT_OF_ONE_TASK = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "1",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param(
            BATCH_SCRIPT_OF_ONE_TASK,
            r"devices \* num_nodes must equal world_size \(.+, from SLURM\); .+",
            id="with one task for two devices",
        ),
        *(
            pytest.param(
                by_hand_env(ranks, port=29500),
                r"devices \* num_nodes must equal world_size \(got devices=2 .*, from RANK, .+",
                id=f"{ranks} ranks by hand for two devices",
            )
            for ranks in (1, 3)
        ),
        pytest.param(
            {**by_srun(), "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_NAME": "bash"},
            "srun started 2 tasks, but Lightning ignores SLURM in a job named 'bash', .+; use"
            " srun --job-name=.+ or unset SLURM_STEP_NUM_TASKS if each task .+",
            id="in a job that Lightning ignores",
        ),
    ],
)
def test_a_process_that_is_not_a_rank_of_two_is_refused(
    env: Environment, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks would wait for each other, or each task would train alone."""
    assert re.fullmatch(f"ConfigurationError: {expected}", refusal(monkeypatch, env))
