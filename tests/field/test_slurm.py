"""Jobs on a real SLURM: they stop, are requeued and resume with the weights of an
undisturbed run.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.field import train
from tests.field.slurm import End, Job, Slurm, why_unavailable
from tests.harness.environment import free_port, skip_because

TRAIN = str(Path(train.__file__))
EXAMPLE = str(Path(__file__).parents[2] / "examples/slurm.sbatch")
ONE_NODE = "--nodes=1 --ntasks-per-node=2"
TWO_NODES = "--nodes=2 --ntasks-per-node=1"
SRUN = "srun python"
SLOWLY = "step=0.2"
FINISHED = [End("COMPLETED", requeues=0)]
FINISHED_AFTER_A_REQUEUE = [End("COMPLETED", requeues=1)]
FAILED = [End("FAILED", requeues=0)]


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


def weights_of(job: Job) -> set[str]:
    return train.weights_in(job.output)


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
    assert weights_of(job) == undisturbed, job.output
    # Lightning's own handler, which ours replaces, logs "Bypassing SIGTERM" and does no more.
    assert "Bypassing" not in job.output


@pytest.fixture(scope="session")
def undisturbed(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The weights of a run that is not stopped."""
    job = submit(slurm, tmp_path_factory.mktemp("undisturbed"))
    assert job.wait() == FINISHED, job.output
    assert len(weights_of(job)) == 1
    return weights_of(job)


class Stop(NamedTuple):
    """A way to stop and requeue a job: the script's arguments, one of which acts on the
    job, further options of ``sbatch``, and the words before the script.
    """

    arguments: Sequence[str]
    options: str = ""
    start: str = SRUN


# The requeued job has a longer limit, or the signal for the limit arrives while it
# starts, and kills it.
LATER = "test -z $SLURM_RESTART_COUNT || scontrol update jobid=$SLURM_JOB_ID timelimit=20"
USR1 = "command=scancel --signal=USR1 $SLURM_JOB_ID"
REQUEUE_ON_143 = """
requeue_on_143() { "$@"; [ $? != 143 ] || scontrol requeue $SLURM_JOB_ID; }
requeue_on_143 srun python"""
STOPS = [
    pytest.param(
        Stop(
            ["step=0.5", "command=scontrol update jobid=$SLURM_JOB_ID timelimit=1"],
            options="--signal=USR1@30 --time=20",
            start=f"{LATER}; {SRUN}",
        ),
        id="--signal before the time limit",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        Stop([SLOWLY, USR1, "resume="]), id="scancel --signal, without an argument to resume"
    ),
    pytest.param(
        Stop([SLOWLY, "command=scontrol requeue $SLURM_JOB_ID"]),
        id="scontrol requeue",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        Stop([SLOWLY, "command=scancel --signal=TERM $SLURM_JOB_ID"], start=REQUEUE_ON_143),
        id="by the batch script",
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.parametrize("stop", STOPS)
def test_a_stopped_job_is_requeued_and_continues(
    stop: Stop, slurm: Slurm, undisturbed: set[str], tmp_path: Path
) -> None:
    """The job saves, and after its requeue begins with the next step."""
    options = f"{ONE_NODE} {stop.options}"
    job = submit(slurm, tmp_path, *stop.arguments, options=options, start=stop.start)
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
    assert job.wait() == [End(state, requeues=0)], job.output
    stops = stops_of(job)
    assert len(stops) == 1, job.output
    again = submit(slurm, tmp_path, *arguments)
    assert again.wait() == FINISHED, again.output
    assert starts_of(again) == set(stops), again.output
    assert weights_of(again) == undisturbed


def test_a_job_whose_step_is_cancelled_saves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    """The job fails, and is not requeued."""
    job = submit(slurm, tmp_path, "step=0.5", once("scancel $SLURM_JOB_ID.0"))
    assert job.wait() == FAILED, job.output
    assert stops_of(job) == [], job.output


def test_each_task_of_an_array_continues_from_its_own_checkpoint(
    slurm: Slurm, tmp_path: Path
) -> None:
    """The tasks share a directory; a new job there begins at step 0."""
    arguments = [
        SLOWLY,
        "command=scancel --signal=USR1 ${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",
        "resume=",
    ]
    array = slurm.submit(
        *f"{ONE_NODE} --array=1-2".split(),
        f"--wrap=srun python {TRAIN} seed=$SLURM_ARRAY_TASK_ID {' '.join(map(repr, arguments))}",
        cwd=tmp_path,
    )
    assert array.wait() == FINISHED_AFTER_A_REQUEUE * 2, array.output
    alone = submit(slurm, tmp_path, "seed=1", "resume=")
    assert alone.wait() == FINISHED, alone.output
    assert starts_of(alone) == {0}
    assert len(weights_of(array)) == 2
    assert weights_of(alone) < weights_of(array), array.output


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


# The second task waits until the test creates a file.
LATE = """srun --kill-on-bad-exit=1 bash -c '
until [ $SLURM_PROCID = 0 ] || [ -e go ]; do sleep 0.1; done; exec "$@"' - python"""


def test_a_task_waits_for_a_late_one(slurm: Slurm, undisturbed: set[str], tmp_path: Path) -> None:
    """The run learns the same as without the delay."""
    job = submit(slurm, tmp_path, start=LATE)
    job.wait_for_output("Seed set to")
    (tmp_path / "go").touch()
    assert job.wait() == FINISHED, job.output
    assert weights_of(job) == undisturbed


def test_a_missing_task_is_named(slurm: Slurm, tmp_path: Path) -> None:
    """The first task raises an error after ``init_timeout``, and the job fails."""
    job = submit(slurm, tmp_path, "init_timeout=3", start=LATE)
    assert job.wait() == FAILED, job.output
    assert re.search(r"RendezvousError: rank 1 of 2 did not connect to tcp://n1:\d+", job.output)


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
    assert weights_of(job) == undisturbed
    assert f"process group: gloo, 2 ranks, {init_method}" in job.output


def test_srun_without_a_job_name_is_refused_in_an_interactive_job(
    slurm: Slurm, tmp_path: Path
) -> None:
    """In ``salloc``, Lightning would let each of the two tasks train alone."""
    ended = slurm.run("salloc", *ONE_NODE.split(), *SRUN.split(), TRAIN, cwd=tmp_path)
    assert ended.returncode != 0
    assert "srun started 2 tasks, but Lightning ignores SLURM" in ended.stdout, ended.stdout
    assert train.weights_in(ended.stdout) == set()


@pytest.mark.nightly
@pytest.mark.parametrize("start", ["srun --job-name=train python", "python"])
def test_two_ranks_train_in_an_interactive_job(
    start: str, slurm: Slurm, undisturbed: set[str], tmp_path: Path
) -> None:
    """In ``salloc``, srun starts both ranks if it has a job name; without srun, the
    first rank starts the second.
    """
    ended = slurm.run("salloc", *ONE_NODE.split(), *start.split(), TRAIN, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert "process group: gloo, 2 ranks" in ended.stdout
    assert train.weights_in(ended.stdout) == undisturbed


def test_two_steps_with_the_same_port_do_not_mix(
    slurm: Slurm, undisturbed: set[str], tmp_path: Path
) -> None:
    """The ranks of one step train; those of the other train later, or raise an error."""
    step = f"srun --exact --ntasks-per-node=2 --ntasks=2 python {TRAIN} init_timeout=20"
    options = ["--nodes=1", "--ntasks-per-node=4"]
    job = slurm.submit(*options, f"--wrap={step} root=a & {step} root=b & wait", cwd=tmp_path)
    assert job.wait() == FINISHED, job.output
    assert weights_of(job) == undisturbed
    trained = len(re.findall(r"^weights", job.output, re.MULTILINE))
    refused = len(re.findall(r"^\S*RendezvousError: ", job.output, re.MULTILINE))
    assert (trained, refused) in [(2, 2), (4, 0)], job.output


class Mistake(NamedTuple):
    """A job whose tasks do not become the Trainer's ranks, and what its error says."""

    error: str
    options: str = ONE_NODE
    start: str = SRUN
    arguments: Sequence[str] = ()


DIFFERENT = "devices * num_nodes must equal world_size"
IGNORED = "Lightning ignores SLURM in a job named {!r}"
MISTAKES = [
    pytest.param(
        Mistake(IGNORED.format("bash"), options=f"{ONE_NODE} --job-name=bash"),
        id="a job named bash",
    ),
    pytest.param(
        Mistake(IGNORED.format("interactive"), options=f"{ONE_NODE} --job-name=interactive"),
        id="a job named interactive",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        Mistake(DIFFERENT, options="--ntasks-per-node=1"),
        id="fewer tasks",
    ),
    pytest.param(
        Mistake(DIFFERENT, arguments=["devices=4"]),
        id="more devices",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        Mistake(DIFFERENT, arguments=["nodes=2"]),
        id="another node",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        Mistake(DIFFERENT, start="SLURM_NTASKS=1 python"),
        id="an editor's terminal",
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_tasks_that_do_not_fit_the_trainer_are_refused(
    mistake: Mistake, slurm: Slurm, tmp_path: Path
) -> None:
    """The error has the remedy, and no rank trains."""
    job = submit(slurm, tmp_path, *mistake.arguments, options=mistake.options, start=mistake.start)
    assert job.wait() == FAILED, job.output
    assert mistake.error in job.output
    assert starts_of(job) == set()
