"""Jobs on a real SLURM: they stop, are requeued and resume with the weights of an
undisturbed run.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.field import train
from tests.field.slurm import End, Job, Slurm, why_unavailable
from tests.field.train import weights_in
from tests.harness.environment import free_port, skip_because
from tests.harness.scripts import run_script

TRAIN = str(Path(train.__file__))
EXAMPLE = str(Path(__file__).parents[2] / "examples/slurm.sbatch")
ONE_NODE = "--nodes=1 --ntasks-per-node=2"
TWO_NODES = "--nodes=2 --ntasks-per-node=1"
SRUN = "srun python"
SLOWLY = "step=0.2"
FINISHED = End("COMPLETED", requeues=0)
FINISHED_AFTER_A_REQUEUE = End("COMPLETED", requeues=1)
FAILED = End("FAILED", requeues=0)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Start a SLURM with two nodes; skip if it cannot run here."""
    skip_because(why_unavailable())
    with Slurm(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def submit(
    slurm: Slurm, cwd: Path, *arguments: str, options: str = ONE_NODE, start: str = SRUN
) -> Job:
    """Submit a job that runs the training script.

    Args:
        slurm: where to submit it.
        cwd: the working directory.
        arguments: of the script.
        options: of ``sbatch``.
        start: the words before the script.
    """
    quoted = " ".join(f"'{argument}'" for argument in arguments)
    return slurm.submit(*options.split(), f"--wrap={start} {TRAIN} {quoted}", cwd=cwd)


def starts_of(job: Job) -> set[int]:
    """Return the steps from which ranks trained."""
    steps = re.findall(r"^rank \d of 2 trains from step (\d+)$", job.output, re.MULTILINE)
    return set(map(int, steps))


def stops_of(job: Job) -> list[int]:
    """Return the steps after which all ranks stopped and saved."""
    steps = re.findall(r"all ranks stop after step (\d+); saved to", job.output)
    return list(map(int, steps))


def expect_resumed(job: Job, undisturbed: set[str]) -> None:
    """Fail unless the job was requeued, continued after the step at which it stopped,
    and learned the same.
    """
    assert job.wait() == FINISHED_AFTER_A_REQUEUE, job.output
    stops = stops_of(job)
    assert stops, job.output
    assert starts_of(job) == {0, *stops}, job.output
    assert weights_in(job.output) == undisturbed, job.output
    # Lightning's own handler, which ours replaces, logs "Bypassing SIGTERM" and does no more.
    assert "Bypassing" not in job.output


@pytest.fixture(scope="session")
def undisturbed(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The weights of a run that is not stopped."""
    job = submit(slurm, tmp_path_factory.mktemp("undisturbed"))
    assert job.wait() == FINISHED, job.output
    weights = weights_in(job.output)
    assert len(weights) == 1
    return weights


# The requeued job has a longer limit, or the signal for the limit arrives while it
# starts, and kills it.
LATER = "test -z $SLURM_RESTART_COUNT || scontrol update jobid=$SLURM_JOB_ID timelimit=20"
USR1 = "command=scancel --signal=USR1 $SLURM_JOB_ID"
REQUEUE_ON_143 = """
requeue_on_143() { "$@"; [ $? != 143 ] || scontrol requeue $SLURM_JOB_ID; }
requeue_on_143 srun python"""
# Ways to stop and requeue a job: the script's arguments, one of which acts on the job,
# further options of ``sbatch``, and the words before the script.
STOPS = [
    pytest.param(
        ["step=0.5", "command=scontrol update jobid=$SLURM_JOB_ID timelimit=1"],
        "--signal=USR1@30 --time=20",
        f"{LATER}; {SRUN}",
        id="--signal before the time limit",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        [SLOWLY, USR1, "resume="], "", SRUN, id="scancel --signal, without an argument to resume"
    ),
    pytest.param(
        [SLOWLY, "command=scontrol requeue $SLURM_JOB_ID"],
        "",
        SRUN,
        id="scontrol requeue",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        [SLOWLY, "command=scancel --signal=TERM $SLURM_JOB_ID"],
        "",
        REQUEUE_ON_143,
        id="by the batch script",
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.parametrize(("arguments", "options", "start"), STOPS)
def test_a_stopped_job_is_requeued_and_continues(
    arguments: list[str],
    options: str,
    start: str,
    slurm: Slurm,
    undisturbed: set[str],
    tmp_path: Path,
) -> None:
    """The job saves, and after its requeue begins with the next step."""
    job = submit(slurm, tmp_path, *arguments, options=f"{ONE_NODE} {options}", start=start)
    expect_resumed(job, undisturbed)


def test_the_example_script_is_requeued_and_continues(
    slurm: Slurm, undisturbed: set[str], tmp_path: Path
) -> None:
    """``examples/slurm.sbatch`` works unchanged."""
    expect_resumed(slurm.submit(EXAMPLE, TRAIN, SLOWLY, USR1, cwd=tmp_path), undisturbed)


PREEMPTIONS = [
    pytest.param("--partition=low", id="with a grace time"),
    pytest.param("--partition=lowest", id="without a grace time", marks=pytest.mark.nightly),
    pytest.param("--partition=low --signal=USR1@60", id="by --signal", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("options", PREEMPTIONS)
def test_a_preempted_job_on_two_nodes_is_requeued_and_continues(
    options: str, slurm: Slurm, undisturbed: set[str], tmp_path: Path
) -> None:
    """A job that exits within its grace time requeues itself, because SLURM does not."""
    arguments = ["step=0.5", "devices=1", "nodes=2"]
    preempted = submit(slurm, tmp_path, *arguments, options=f"{TWO_NODES} --exclusive {options}")
    preempted.wait_for_output("trains from step 0")
    urgent = slurm.submit(
        "--partition=high", *TWO_NODES.split(), "--exclusive", "--wrap=true", cwd=tmp_path
    )
    expect_resumed(preempted, undisturbed)
    assert urgent.wait() == FINISHED


def once(command: str) -> str:
    """Return the script's argument for a command that only the first job runs."""
    return f"command=test -e stopped || {{ touch stopped; {command}; }}"


ENDS = [
    pytest.param("scancel $SLURM_JOB_ID", "CANCELLED", id="scancel"),
    pytest.param(
        "scancel --signal=TERM $SLURM_JOB_ID",
        "FAILED",
        id="scancel --signal",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        "scontrol update jobid=$SLURM_JOB_ID timelimit=1",
        "TIMEOUT",
        id="time limit without --signal",
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.parametrize(("command", "state"), ENDS)
def test_a_job_that_is_not_requeued_saves_and_a_new_job_continues(
    command: str, state: str, slurm: Slurm, undisturbed: set[str], tmp_path: Path
) -> None:
    """The same command, submitted again, begins with the next step."""
    arguments = ["step=0.5", once(command)]
    job = submit(slurm, tmp_path, *arguments)
    assert job.wait() == End(state, requeues=0), job.output
    stops = stops_of(job)
    assert len(stops) == 1, job.output
    again = submit(slurm, tmp_path, *arguments)
    assert again.wait() == FINISHED, again.output
    assert starts_of(again) == set(stops), again.output
    assert weights_in(again.output) == undisturbed


def test_a_job_whose_step_is_cancelled_saves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    """The job fails, and is not requeued."""
    job = submit(slurm, tmp_path, "step=0.5", once("scancel $SLURM_JOB_ID.0"))
    assert job.wait() == FAILED, job.output
    assert stops_of(job) == [], job.output


DIED = r"^\[rank 0\] RankDiedError: rank 1 \(host .+\) died"
FAILURES = [
    pytest.param(
        "srun --kill-on-bad-exit=0", "death=1", DIED, id="killed", marks=pytest.mark.nightly
    ),
    pytest.param(
        "srun --kill-on-bad-exit=1", "death=1", DIED, id="killed, and SLURM ends the others"
    ),
    pytest.param(
        "srun",
        "error=1",
        r"^\[rank 0\] RankFailedError: rank 1 \(host .+\) failed, .+: ValueError: a broken sample",
        id="raises",
    ),
]


@pytest.mark.parametrize(("srun", "fault", "message"), FAILURES)
def test_a_failed_task_is_named_by_the_other_one_which_saves(
    srun: str, fault: str, message: str, slurm: Slurm, tmp_path: Path
) -> None:
    """The checkpoint has the fourth step, in which the task fails; the job fails.

    A task that raises saves, too, if it has the lock first.
    """
    arguments = [SLOWLY, fault]
    job = submit(slurm, tmp_path, *arguments, start=f"{srun} python")
    assert job.wait() == FAILED, job.output
    assert re.search(message, job.output, re.MULTILINE), job.output
    assert re.search(r"^\[rank \d\] saved step 4 to", job.output, re.MULTILINE), job.output


METHODS = [
    pytest.param("env://", marks=pytest.mark.nightly),
    pytest.param("tcp://n1:{port}", marks=pytest.mark.nightly),
    "file://{directory}/rank0",
]


@pytest.mark.parametrize("method", METHODS)
def test_ranks_on_two_nodes_connect_by_each_init_method(
    method: str, slurm: Slurm, undisturbed: set[str], shared_dir: Path, tmp_path: Path
) -> None:
    """Rank 0 logs the init method, and two nodes learn the same as one."""
    init_method = method.format(port=free_port(), directory=shared_dir)
    arguments = ["devices=1", "nodes=2", f"init_method={init_method}"]
    job = submit(slurm, tmp_path, *arguments, options=TWO_NODES)
    assert job.wait() == FINISHED, job.output
    assert weights_in(job.output) == undisturbed
    assert f"process group: gloo, 2 ranks, {init_method}" in job.output


@pytest.mark.nightly
@pytest.mark.parametrize("start", ["srun --job-name=train python", "python"])
def test_two_ranks_train_in_an_interactive_job(
    start: str, slurm: Slurm, undisturbed: set[str], tmp_path: Path
) -> None:
    """In ``salloc``, srun starts both ranks if it has a job name; without srun, the
    first rank starts the second.
    """
    launcher = ["salloc", *ONE_NODE.split(), *start.split()]
    ended = run_script(TRAIN, launcher=launcher, cwd=tmp_path, env=slurm.environment)
    assert ended.exit_code == 0, ended.output
    assert "process group: gloo, 2 ranks" in ended.output
    assert weights_in(ended.output) == undisturbed
