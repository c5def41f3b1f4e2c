"""Jobs on a real SLURM: they stop, are requeued and resume with the weights of an
undisturbed run.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.field import train
from tests.field.slurm import Job, Slurm

pytestmark = pytest.mark.field
TRAIN = str(Path(train.__file__))
EXAMPLE = str(Path(__file__).parents[2] / "examples/slurm.sbatch")
ONE_NODE = "--nodes=1 --ntasks-per-node=2"
TWO_NODES = "--nodes=2 --ntasks-per-node=1"
SLOWLY = "step=0.2"


def submit(
    slurm: Slurm, cwd: Path, *arguments: str, options: str = ONE_NODE, start: str = "srun python"
) -> Job:
    """Submit a job that trains with these arguments."""
    quoted = " ".join(f"'{each}'" for each in arguments)
    return slurm.submit(*options.split(), f"--wrap={start} {TRAIN} {quoted}", cwd=cwd)


def weights_of(job: Job) -> set[str]:
    return set(re.findall(r"^weights (\w+)$", job.output, re.MULTILINE))


def starts_of(job: Job) -> set[int]:
    """Return the steps from which ranks trained."""
    return set(map(int, re.findall(r"^rank \d trains from step (\d+)$", job.output, re.MULTILINE)))


def expect_resumed(job: Job, undisturbed: set[str], *, restarts: int = 1) -> None:
    """Fail unless the job was requeued, continued after the step at which it stopped,
    and learned the same.
    """
    assert job.wait() == [("COMPLETED", restarts)], job.output
    stops = set(map(int, re.findall(r"all ranks stop after step (\d+); saved to", job.output)))
    assert starts_of(job) == {0, *stops}, job.output
    assert weights_of(job) == undisturbed, job.output
    assert "Bypassing" not in job.output


@pytest.fixture(scope="session")
def undisturbed(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The weights of a run that is not stopped."""
    job = submit(slurm, tmp_path_factory.mktemp("undisturbed"))
    assert job.wait() == [("COMPLETED", 0)], job.output
    assert len(weights_of(job)) == 1
    return weights_of(job)


# So that the signal for the limit does not arrive while the requeued job starts, which
# kills it.
LATER = "test -z $SLURM_RESTART_COUNT || scontrol update jobid=$SLURM_JOB_ID timelimit=20"
USR1 = "act=scancel --signal=USR1 $SLURM_JOB_ID"
STOPS = {
    "--signal before the time limit": (
        "--signal=USR1@30 --time=20",
        f"{LATER}; srun python",
        ["step=0.5", "act=scontrol update jobid=$SLURM_JOB_ID timelimit=1"],
    ),
    "scancel --signal, without an argument to resume": (
        "",
        "srun python",
        [SLOWLY, USR1, "resume="],
    ),
    "with an unfinished background save": ("", "srun python", [SLOWLY, USR1, "io=slow"]),
    "scontrol requeue": ("", "srun python", [SLOWLY, "act=scontrol requeue $SLURM_JOB_ID"]),
}


@pytest.mark.parametrize(("options", "start", "arguments"), STOPS.values(), ids=STOPS)
def test_requeued(
    options: str,
    start: str,
    arguments: list[str],
    slurm: Slurm,
    undisturbed: set[str],
    tmp_path: Path,
) -> None:
    """The job saves, is requeued, and continues with the next step."""
    job = submit(slurm, tmp_path, *arguments, options=f"{ONE_NODE} {options}", start=start)
    expect_resumed(job, undisturbed)


def test_the_example(slurm: Slurm, undisturbed: set[str], tmp_path: Path) -> None:
    """``examples/slurm.sbatch`` works as it is."""
    expect_resumed(slurm.submit(EXAMPLE, TRAIN, SLOWLY, USR1, cwd=tmp_path), undisturbed)


def test_preempted_on_two_nodes(slurm: Slurm, undisturbed: set[str], tmp_path: Path) -> None:
    """A job that exits within its grace time is requeued, although SLURM leaves that to
    the job.
    """
    preempted = submit(
        slurm, tmp_path, SLOWLY, "devices=1", "nodes=2", options=f"{TWO_NODES} --exclusive"
    )
    preempted.wait_for_output("trains from step 0")
    urgent = slurm.submit(
        "--partition=high", *TWO_NODES.split(), "--exclusive", "--wrap=true", cwd=tmp_path
    )
    expect_resumed(preempted, undisturbed)
    assert urgent.wait() == [("COMPLETED", 0)]


def test_the_tasks_of_an_array_share_a_directory(slurm: Slurm, tmp_path: Path) -> None:
    """Each task continues from the checkpoint that it saved itself, and a new job from
    none.
    """
    arguments = [
        SLOWLY,
        "act=scancel --signal=USR1 ${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",
        "resume=",
    ]
    array = slurm.submit(
        *f"{ONE_NODE} --array=1-2".split(),
        f"--wrap=srun python {TRAIN} seed=$SLURM_ARRAY_TASK_ID {' '.join(map(repr, arguments))}",
        cwd=tmp_path,
    )
    assert array.wait() == [("COMPLETED", 1)] * 2, array.output
    alone = submit(slurm, tmp_path, "seed=1", "resume=")
    assert alone.wait() == [("COMPLETED", 0)], alone.output
    assert starts_of(alone) == {0}
    assert len(weights_of(array)) == 2
    assert weights_of(alone) < weights_of(array), array.output


def test_a_killed_task_is_named(slurm: Slurm, tmp_path: Path) -> None:
    """The other task exits with the dead rank's name, so the job fails."""
    job = submit(slurm, tmp_path, SLOWLY, "act=death of 1")
    assert job.wait() == [("FAILED", 0)], job.output
    assert re.search(
        r"^\[rank 0\] RankDiedError: rank 1 \(host .+\) died", job.output, re.MULTILINE
    ), job.output


def test_two_steps_of_a_job(slurm: Slurm, undisturbed: set[str], tmp_path: Path) -> None:
    """They have the same port: the ranks of one train, and those of the other raise an
    error.
    """
    step = f"srun --exact --ntasks-per-node=2 --ntasks=2 python {TRAIN}"
    options = ["--nodes=1", "--ntasks-per-node=4"]
    job = slurm.submit(*options, f"--wrap={step} root=a & {step} root=b & wait", cwd=tmp_path)
    assert job.wait() == [("COMPLETED", 0)], job.output
    assert len(re.findall(r"^weights", job.output, re.MULTILINE)) == 2, job.output
    assert weights_of(job) == undisturbed
    refused = (
        r"^\S*RendezvousError: rank 0 at tcp://n1:\d+ .+ another run \(SLURM_JOB_ID=.+\) than rank"
        r" (\d)"
    )
    assert sorted(re.findall(refused, job.output, re.MULTILINE)) == ["0", "1"], job.output


MISTAKES = {
    "without srun": (ONE_NODE, "python", [], "this script runs without srun"),
    "ignored by Lightning": (
        ONE_NODE,
        "srun --job-name=bash python",
        [],
        "Lightning ignores SLURM in a job named",
    ),
    "fewer tasks": (
        "--ntasks-per-node=1",
        "srun python",
        [],
        "devices * num_nodes must equal world_size",
    ),
    "another node": (
        ONE_NODE,
        "srun python",
        ["nodes=2"],
        "devices * num_nodes must equal world_size",
    ),
    "an editor's terminal": (
        ONE_NODE,
        "SLURM_NTASKS=1 python",
        [],
        "devices * num_nodes must equal world_size",
    ),
}


@pytest.mark.parametrize(
    ("options", "start", "arguments", "sentence"), MISTAKES.values(), ids=MISTAKES
)
def test_mistakes_are_named(
    options: str, start: str, arguments: list[str], sentence: str, slurm: Slurm, tmp_path: Path
) -> None:
    """Tasks that do not become the Trainer's ranks raise an error with the remedy."""
    job = submit(slurm, tmp_path, *arguments, options=options, start=start)
    assert job.wait() == [("FAILED", 0)], job.output
    assert sentence in job.output
    assert not starts_of(job)
