"""On SLURM, the ranks save before the time limit, and only the requeued job resumes."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

from tests.harness.environment import Environment, by_srun
from tests.harness.ranks import Outcome, launch_ranks, run_ranks
from tests.integration import continuing


def train(
    rank: int,
    world_size: int,
    directory: Path,
    *,
    is_stopped: bool,
    ckpt_path: str | None = None,
    **strategy: Any,
) -> bool:
    """Train in a directory that all jobs share; return whether the run resumed.

    If ``is_stopped``, the signal that announces the time limit of a job stops the run.
    """
    time_limit = continuing.signalled("on_train_batch_end", 1, signal.SIGUSR1, ranks=[1])
    run = continuing.Training(continuing.shuffled(), directory, strategy=strategy).run(
        max_epochs=2,
        callbacks=[time_limit] if is_stopped else [],
        default_root_dir=directory,
        ckpt_path=ckpt_path,
    )
    return run.steps[0].moment != (0, 0)


def launch(directory: Path, job: Environment, **options: Any) -> list[Outcome]:
    """Train on the two ranks of a job."""
    return launch_ranks(train, 2, directory, env=job, **options)


def requeued(job: Environment) -> Environment:
    return {**job, "SLURM_RESTART_COUNT": "1"}


def stop_job(directory: Path, job: Environment) -> Path:
    """Stop a job that then has many versions of its checkpoint; return the newest one."""
    outcome, _ = launch(directory, job, is_stopped=True)
    assert outcome.result is False, outcome.story()
    assert "the ranks will finish the current step, save and stop" in outcome.output
    assert f"SLURM did not requeue job {job['SLURM_JOB_ID']}" in outcome.output
    [newest] = directory.rglob("*.ckpt")
    for number in range(1, 8):
        older = shutil.copy(newest, newest.with_stem(f"{newest.stem}-v{number}"))
        os.utime(older, (number, number))
    return newest


RESUMES_ONLY_WITH_LAST = "a requeued job only resumes with trainer.fit(..., ckpt_path='last')"


def test_a_requeued_job_resumes_from_its_newest_file(tmp_path: Path) -> None:
    """As with stock, no ``ckpt_path`` is needed; a finished job leaves no file."""
    job = by_srun()
    newest = stop_job(tmp_path, job)
    outcomes = launch(tmp_path, requeued(job), is_stopped=False)
    assert [outcome.result for outcome in outcomes] == [True, True], outcomes[0].story()
    assert f"from the checkpoint path at {newest}\n" in outcomes[0].output
    assert RESUMES_ONLY_WITH_LAST not in outcomes[0].output
    assert not list(tmp_path.rglob("*.ckpt"))


def test_another_job_of_the_same_command_starts_from_the_beginning(tmp_path: Path) -> None:
    """A job that was requeued before it saved anything logs how to resume."""
    newest = stop_job(tmp_path, by_srun())
    outcomes = launch(tmp_path, requeued(by_srun()), is_stopped=False)
    assert [outcome.result for outcome in outcomes] == [False, False], outcomes[0].story()
    assert RESUMES_ONLY_WITH_LAST in outcomes[0].output
    assert newest.exists()


def test_a_requeued_job_resumes_without_a_stop_checkpoint(tmp_path: Path) -> None:
    """The job itself saves for its requeue, so ``ckpt_path="last"`` finds that file."""
    job = by_srun()
    options: dict[str, Any] = {"ckpt_path": "last", "stop_checkpoint": None}
    first_runs = run_ranks(train, 2, tmp_path, is_stopped=True, env=job, **options)
    next_runs = run_ranks(train, 2, tmp_path, is_stopped=False, env=requeued(job), **options)
    assert (first_runs, next_runs) == ([False, False], [True, True])
