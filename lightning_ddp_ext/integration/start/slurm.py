"""Identify this process's SLURM job, find out why SLURM stops it, and requeue it."""

from __future__ import annotations

import os
import re
import subprocess

_SECONDS_TO_ANSWER = 10.0


def job_id() -> str:
    """Return the job's id, such as ``12``, or ``12_3`` for task 3 of an array.

    It is empty outside of SLURM, and the same after a requeue.
    """
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    if task:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
    return os.environ.get("SLURM_JOB_ID", "")


def is_requeued() -> bool:
    """Whether SLURM has started this job before."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def is_preempted() -> bool:
    """Whether SLURM stops this job in favour of another one.

    SLURM's controller reports this.
    """
    shown = _scontrol("show", "job", job_id())
    return bool(re.search(r"\bPreemptTime=\d", shown.stdout)) and "Requeue=1" in shown.stdout


def requeue() -> str:
    """Requeue this job, and describe the result.

    SLURM then ends the job's processes, possibly during this call.
    """
    done = _scontrol("requeue", job_id())
    # It is negative if the requeue has also killed scontrol.
    if done.returncode > 0:
        return f"SLURM did not requeue job {job_id()} ({done.stderr.strip()}); submit it again"
    return f"requeued SLURM job {job_id()}"


def _scontrol(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["scontrol", *words]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS_TO_ANSWER, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=str(error))
