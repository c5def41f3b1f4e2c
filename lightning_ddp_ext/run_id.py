"""What shall this start of the run be called, by all of its ranks alike?"""

from __future__ import annotations

import re
from collections.abc import Iterable

from lightning_ddp_ext.world import Environ, is_slurm, read_world

RUN_ID_VARIABLE = "DDPX_RUN_ID"


def run_id_from_launcher(environ: Environ) -> str | None:
    """A name for this start of the run, the same on all of its ranks; ``None`` where no launcher gives one.

    ``DDPX_RUN_ID`` goes before everything else. Letters, digits, ``.``, ``_`` and ``-`` stay, all else becomes ``-``.

    >>> of_a_rank = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    >>> run_id_from_launcher({**of_a_rank, "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"})
    'slurm-77-0-0'
    """
    given = environ.get(RUN_ID_VARIABLE)
    if given:
        return sanitise(given)
    for read in (_torchrun_id, _mpi_id, _slurm_id):
        run_id = read(environ)
        if run_id is not None:
            return sanitise(run_id)
    return None


def sanitise(name: str) -> str:
    """``name`` as it can stand in a file name: all but letters, digits, ``.``, ``_`` and ``-`` becomes ``-``.

    >>> sanitise("job 7/step@1")
    'job-7-step-1'
    """
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)


def _torchrun_id(environ: Environ) -> str | None:
    """Run id and port, because the default run id "none" repeats; on one node also the restart.

    Each agent counts the restarts of its own node's failures alone, so on several nodes the counts differ:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/elastic/agent/server/api.py#L938-L970
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    parts = [environ["TORCHELASTIC_RUN_ID"], environ.get("MASTER_PORT", "")]
    if environ.get("GROUP_WORLD_SIZE", "1") == "1":
        parts.append(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return _join("torchrun", parts)


def _mpi_id(environ: Environ) -> str | None:
    """The name of the job that mpirun started: PMIx (Open MPI 4 and 5), older Open MPI, Intel MPI, Cray."""
    world = read_world(environ)
    if world is None or world.source not in ("Open MPI", "PMI"):
        return None
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "I_MPI_HYDRA_UUID", "PMI_JOBID"):
        if environ.get(name):
            return _join("mpi", [environ[name]])
    return None


def _slurm_id(environ: Environ) -> str | None:
    """Job, array task, step and requeue: together they never repeat on a cluster."""
    if not is_slurm(environ) or "SLURM_JOB_ID" not in environ:
        return None
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID", "batch")
    parts = [environ["SLURM_JOB_ID"], environ.get("SLURM_ARRAY_TASK_ID", ""), step]
    return _join("slurm", [*parts, environ.get("SLURM_RESTART_COUNT", "0")])


def _join(prefix: str, parts: Iterable[str]) -> str:
    return "-".join([prefix, *filter(None, parts)])
