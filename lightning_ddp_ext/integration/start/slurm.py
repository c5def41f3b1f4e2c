"""Identify this process's SLURM job, find out whether it needs a requeue, and requeue it."""

from __future__ import annotations

import os
import re
import signal
import subprocess

from ..private.lightning_tree import ClusterEnvironment, SLURMEnvironment

_SECONDS_TO_ANSWER = 10.0  # of SLURM's controller, which may be busy


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


def requeue_signal_of(environment: ClusterEnvironment | None) -> signal.Signals | None:
    """Return SLURM's signal before a time limit, if Lightning requeues jobs after it."""
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None


def needs_requeue(environment: ClusterEnvironment | None, signum: int) -> bool:
    """Whether this job must be requeued after this signal.

    It must be before a time limit, and if another job preempts it: SLURM does not requeue
    a preempted job that exits within its grace time.
    """
    requeue_signal = requeue_signal_of(environment)
    if requeue_signal is None:
        return False
    return signum == requeue_signal or (signum == signal.SIGTERM and _is_preempted())


def _is_preempted() -> bool:
    """Whether SLURM stops this job in favour of another one, and would requeue it."""
    shown = _scontrol("show", "job", job_id())
    return bool(re.search(r"\bPreemptTime=\d", shown.stdout)) and "Requeue=1" in shown.stdout


def requeue() -> str:
    """Requeue this job, and describe the result.

    SLURM then ends the job's processes, possibly during this call.
    """
    done = _scontrol("requeue", job_id())
    # The status is negative if the requeue has already killed scontrol.
    if done.returncode > 0:
        return f"SLURM did not requeue job {job_id()} ({done.stderr.strip()}); submit it again"
    return f"requeued SLURM job {job_id()}"


def _scontrol(*words: str) -> subprocess.CompletedProcess[str]:
    """Run ``scontrol``; without an answer, the result has status 1 and the reason."""
    command = ["scontrol", *words]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS_TO_ANSWER, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=str(error))
