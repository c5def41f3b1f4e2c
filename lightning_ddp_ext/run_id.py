"""Name this start of the run, identically on all of its ranks."""

from __future__ import annotations

import re

from lightning_ddp_ext.world import HYDRA, OPEN_MPI, Environ, is_slurm, launcher_of

RUN_ID_VARIABLE = "DDPX_RUN_ID"


def run_id_from_launcher(environ: Environ) -> str | None:
    """Return ``DDPX_RUN_ID``, or the launcher's name for this start of the run; ``None`` without both.

    >>> of_a_rank = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    >>> run_id_from_launcher({**of_a_rank, "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"})
    'slurm-77-0-0'
    """
    given = environ.get(RUN_ID_VARIABLE)
    parts = [given] if given else _torchrun_parts(environ) or _mpi_parts(environ) or _slurm_parts(environ)
    return sanitise("-".join(filter(None, parts))) or None


def sanitise(name: str) -> str:
    """Return a file name: all but letters, digits, ``.``, ``_`` and ``-`` becomes ``-``.

    >>> sanitise("job 7/step@1")
    'job-7-step-1'
    """
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)


def _torchrun_parts(environ: Environ) -> list[str]:
    """Return run id and port, because the default run id "none" repeats; on one node also the restart count.

    Each agent only counts restarts after failures on its node, so on several nodes the counts differ:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/elastic/agent/server/api.py#L938-L970
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return []
    is_one_node = environ.get("GROUP_WORLD_SIZE", "1") == "1"
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_node else ""
    return ["torchrun", environ["TORCHELASTIC_RUN_ID"], environ.get("MASTER_PORT", ""), restart]


def _mpi_parts(environ: Environ) -> list[str]:
    """Return the name of the job that mpirun started: PMIx (Open MPI 4 and 5), older Open MPI, Intel MPI."""
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "I_MPI_HYDRA_UUID")
    jobs = [environ[name] for name in names if environ.get(name)]
    return ["mpi", jobs[0]] if jobs and launcher_of(environ) in (OPEN_MPI, HYDRA) else []


def _slurm_parts(environ: Environ) -> list[str]:
    """Return job, array task, step and requeue, which together never repeat on a cluster."""
    if not is_slurm(environ) or "SLURM_JOB_ID" not in environ:
        return []
    task, restart = environ.get("SLURM_ARRAY_TASK_ID", ""), environ.get("SLURM_RESTART_COUNT", "0")
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID", "batch")
    return ["slurm", environ["SLURM_JOB_ID"], task, step, restart]
