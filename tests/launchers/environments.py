"""Reproduce the variables that each launcher sets for two ranks on one node."""

from __future__ import annotations

import contextlib
import random
import socket

from tests.harness.ranks import Environment


def by_srun() -> Environment:
    """``srun --ntasks-per-node``."""
    return {
        "SLURM_JOB_ID": _slurm_job_id(),
        "SLURM_JOB_NAME": "train",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_PROCID": str,
        "SLURM_LOCALID": str,
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
    }


def by_mpirun() -> Environment:
    """Open MPI's ``mpirun -np``."""
    return {
        "OMPI_COMM_WORLD_RANK": str,
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str,
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-host-4242@1",
    }


def _slurm_job_id() -> str:
    """Return a job number that gives a free port by Lightning's rule: 15000 plus its last four digits."""
    while True:
        digits = random.randint(0, 9999)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", 15000 + digits))
            return f"77{digits:04}"
