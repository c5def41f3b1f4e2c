"""The variables that launchers leave in the environment of each rank, as they leave them."""

from __future__ import annotations

import random
import socket

from tests.harness.ranks import Environment


def by_srun(ntasks: int = 2) -> Environment:
    """``srun --ntasks-per-node``, on one node."""
    size = str(ntasks)
    return {
        "SLURM_JOB_ID": _slurm_job_id(),
        "SLURM_JOB_NAME": "train",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": size,
        "SLURM_NTASKS_PER_NODE": size,
        "SLURM_NNODES": "1",
        "SLURM_PROCID": str,
        "SLURM_LOCALID": str,
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
    }


def by_mpirun(np: int = 2) -> Environment:
    """Open MPI's ``mpirun -np``, on one node."""
    size = str(np)
    return {
        "OMPI_COMM_WORLD_RANK": str,
        "OMPI_COMM_WORLD_SIZE": size,
        "OMPI_COMM_WORLD_LOCAL_RANK": str,
        "OMPI_COMM_WORLD_LOCAL_SIZE": size,
        "PMIX_NAMESPACE": "prterun-host-4242@1",
    }


def by_torchrun(nproc_per_node: int = 2) -> Environment:
    """``torchrun --nproc-per-node``, on one node; nobody listens at the address."""
    size = str(nproc_per_node)
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": str,
        "WORLD_SIZE": size,
        "LOCAL_RANK": str,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def _slurm_job_id() -> str:
    """A job whose number stands, by Lightning's rule, for a port that is free: 15000 and its last four digits."""
    while True:
        digits = random.randint(0, 9999)
        if _is_free(15000 + digits):
            return f"77{digits:04}"


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True
