"""On SLURM, the ranks save before the time limit, and the requeued job resumes."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness.environment import Environment, by_srun
from tests.harness.ranks import Outcome, launch_ranks
from tests.harness.training import signalled
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
    time_limit = signalled("on_train_batch_end", 1, signal.SIGUSR1, ranks=[1])
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
    """Stop a job; return its checkpoint."""
    earlier = set(directory.rglob("*.ckpt"))
    outcome, _ = launch(directory, job, is_stopped=True)
    assert outcome.result is False, outcome.story()
    assert "the ranks will finish the current step, save and stop" in outcome.output
    assert f"SLURM did not requeue job {job['SLURM_JOB_ID']}" in outcome.output
    [saved] = set(directory.rglob("*.ckpt")) - earlier
    assert job["SLURM_JOB_ID"] in saved.parent.name
    return saved


@pytest.mark.parametrize("ckpt_path", [None, "last"])
def test_a_requeued_job_resumes_from_its_own_file(ckpt_path: str | None, tmp_path: Path) -> None:
    """As with stock, no ``ckpt_path`` is needed. Another job of the same command leaves a newer
    file, which stays; a finished job leaves none.
    """
    job = by_srun()
    own = stop_job(tmp_path, job)
    newer = stop_job(tmp_path, by_srun())
    outcomes = launch(tmp_path, requeued(job), is_stopped=False, ckpt_path=ckpt_path)
    assert [outcome.result for outcome in outcomes] == [True, True], outcomes[0].story()
    assert f"from the checkpoint path at {own}\n" in outcomes[0].output
    assert list(tmp_path.rglob("*.ckpt")) == [newer]


@pytest.mark.parametrize("ckpt_path", [None, "last"])
def test_another_job_resumes_only_if_it_is_asked_to(ckpt_path: str | None, tmp_path: Path) -> None:
    """A job without a file of its own, requeued or not, continues an earlier one with "last"."""
    saved = stop_job(tmp_path, by_srun())
    outcomes = launch(tmp_path, requeued(by_srun()), is_stopped=False, ckpt_path=ckpt_path)
    resumes = ckpt_path is not None
    assert [outcome.result for outcome in outcomes] == [resumes] * 2, outcomes[0].story()
    assert saved.exists() is not resumes
