"""Jobs on a real SLURM: they stop, are requeued and resume with the weights of an
undisturbed run.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.field import train
from tests.field.slurm import Job, Slurm, why_unavailable
from tests.harness.environment import free_port, skip_because

TRAIN = str(Path(train.__file__))
EXAMPLE = str(Path(__file__).parents[2] / "examples/slurm.sbatch")
ONE_NODE = "--nodes=1 --ntasks-per-node=2"
TWO_NODES = "--nodes=2 --ntasks-per-node=1"
SLOWLY = "step=0.2"


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Start a SLURM with two nodes; skip if it cannot run here."""
    skip_because(why_unavailable())
    with Slurm(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def submit(
    slurm: Slurm, cwd: Path, *arguments: str, options: str = ONE_NODE, start: str = "srun python"
) -> Job:
    """Submit a job that trains with these arguments."""
    quoted = " ".join(f"'{argument}'" for argument in arguments)
    return slurm.submit(*options.split(), f"--wrap={start} {TRAIN} {quoted}", cwd=cwd)


def weights_of(job: Job) -> set[str]:
    return train.weights_in(job.output)


def starts_of(job: Job) -> set[int]:
    """Return the steps from which ranks trained."""
    steps = re.findall(r"^rank \d of 2 trains from step (\d+)$", job.output, re.MULTILINE)
    return set(map(int, steps))


def expect_resumed(job: Job, undisturbed: set[str]) -> None:
    """Fail unless the job was requeued, continued after the step at which it stopped,
    and learned the same.
    """
    assert job.wait() == [("COMPLETED", 1)], job.output
    stops = re.findall(r"all ranks stop after step (\d+); saved to", job.output)
    assert stops, job.output
    assert starts_of(job) == {0, *map(int, stops)}, job.output
    assert weights_of(job) == undisturbed, job.output
    # Lightning's own handler, which ours replaces, logs "Bypassing SIGTERM" and does no more.
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
IF_143 = """
requeue_on_143() { "$@"; [ $? != 143 ] || scontrol requeue $SLURM_JOB_ID; }
requeue_on_143 srun python"""
STOPS = [
    pytest.param(
        "--signal=USR1@30 --time=20",
        f"{LATER}; srun python",
        ["step=0.5", "act=scontrol update jobid=$SLURM_JOB_ID timelimit=1"],
        id="--signal before the time limit",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        "",
        "srun python",
        [SLOWLY, USR1, "resume="],
        id="scancel --signal, without an argument to resume",
    ),
    pytest.param(
        "",
        "srun python",
        [SLOWLY, USR1, "stop_checkpoint=None"],
        id="without a stop checkpoint",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        "",
        "srun python",
        [SLOWLY, "act=scontrol requeue $SLURM_JOB_ID"],
        id="scontrol requeue",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        "",
        IF_143,
        [SLOWLY, "act=scancel --signal=TERM $SLURM_JOB_ID"],
        id="by the batch script",
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.parametrize(("options", "start", "arguments"), STOPS)
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


PREEMPTIONS = [
    pytest.param("--partition=low", id="with a grace time"),
    pytest.param("--partition=lowest", id="without a grace time", marks=pytest.mark.nightly),
    pytest.param("--partition=low --signal=USR1@60", id="by --signal", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("options", PREEMPTIONS)
def test_preempted_on_two_nodes(
    options: str, slurm: Slurm, undisturbed: set[str], tmp_path: Path
) -> None:
    """A preempted job is requeued, also if it exits within its grace time, when SLURM
    leaves that to the job.
    """
    arguments = ["step=0.5", "devices=1", "nodes=2"]
    preempted = submit(slurm, tmp_path, *arguments, options=f"{TWO_NODES} --exclusive {options}")
    preempted.wait_for_output("trains from step 0")
    urgent = slurm.submit(
        "--partition=high", *TWO_NODES.split(), "--exclusive", "--wrap=true", cwd=tmp_path
    )
    expect_resumed(preempted, undisturbed)
    assert urgent.wait() == [("COMPLETED", 0)]


ENDS = [
    pytest.param("scancel $SLURM_JOB_ID", "CANCELLED", True, id="scancel"),
    pytest.param(
        "scancel --signal=TERM $SLURM_JOB_ID",
        "FAILED",
        True,
        id="scancel --signal",
        marks=pytest.mark.nightly,
    ),
    pytest.param("scancel $SLURM_JOB_ID.0", "FAILED", False, id="scancel of a step"),
    pytest.param(
        "scontrol update jobid=$SLURM_JOB_ID timelimit=1",
        "TIMEOUT",
        True,
        id="time limit without --signal",
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.parametrize(("act", "state", "is_saved"), ENDS)
def test_not_requeued(
    act: str, state: str, is_saved: bool, slurm: Slurm, undisturbed: set[str], tmp_path: Path
) -> None:
    """The job ends; if it saved, the same command in a new job continues."""
    arguments = ["step=0.5", f"act=test -e stopped || {{ touch stopped; {act}; }}"]
    job = submit(slurm, tmp_path, *arguments)
    assert job.wait() == [(state, 0)], job.output
    stops = re.findall(r"all ranks stop after step (\d+); saved to", job.output)
    assert len(stops) == (1 if is_saved else 0), job.output
    if is_saved:
        again = submit(slurm, tmp_path, *arguments)
        assert again.wait() == [("COMPLETED", 0)], again.output
        assert starts_of(again) == {*map(int, stops)}, again.output
        assert weights_of(again) == undisturbed


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


DIED = r"^\[rank 0\] RankDiedError: rank 1 \(host .+\) died"
FAULTS = [
    pytest.param(
        "srun --kill-on-bad-exit=0", "act=death of 1", DIED, id="killed", marks=pytest.mark.nightly
    ),
    pytest.param(
        "srun --kill-on-bad-exit=1", "act=death of 1", DIED, id="killed, and SLURM ends the others"
    ),
    pytest.param(
        "srun",
        "act=error of 1",
        r"^\[rank 0\] RankFailedError: rank 1 \(host .+\) failed, .+: ValueError: a broken sample",
        id="raises",
    ),
]


@pytest.mark.parametrize(("srun", "act", "sentence"), FAULTS)
def test_a_failed_task(srun: str, act: str, sentence: str, slurm: Slurm, tmp_path: Path) -> None:
    """The other task names the failed rank and saves, and the job fails."""
    arguments = [SLOWLY, act, "rescue_checkpoint=rescued.ckpt"]
    job = submit(slurm, tmp_path, *arguments, start=f"{srun} python")
    assert job.wait() == [("FAILED", 0)], job.output
    assert re.search(sentence, job.output, re.MULTILINE), job.output
    # ``act`` runs in the fourth step.
    assert "[rank 0] saved step 4 to" in job.output, job.output


# The second task waits until the test creates a file.
LATE = """srun --kill-on-bad-exit=1 bash -c '
until [ $SLURM_PROCID = 0 ] || [ -e go ]; do sleep 0.1; done; exec "$@"' - python"""


def test_a_late_task(slurm: Slurm, undisturbed: set[str], tmp_path: Path) -> None:
    """The first task waits for it."""
    job = submit(slurm, tmp_path, start=LATE)
    job.wait_for_output("Seed set to")
    (tmp_path / "go").touch()
    assert job.wait() == [("COMPLETED", 0)], job.output
    assert weights_of(job) == undisturbed


def test_a_missing_task(slurm: Slurm, tmp_path: Path) -> None:
    """The first task names it after ``init_timeout``, and the job fails."""
    job = submit(slurm, tmp_path, "init_timeout=3", start=LATE)
    assert job.wait() == [("FAILED", 0)], job.output
    assert re.search(r"MissingRanksError: rank 1 of 2 did not connect to tcp://n1:\d+", job.output)


METHODS = [
    pytest.param("env://", marks=pytest.mark.nightly),
    pytest.param("tcp://n1:{port}", marks=pytest.mark.nightly),
    "file://{directory}/rank0",
]


@pytest.mark.parametrize("method", METHODS)
def test_init_methods_on_two_nodes(
    method: str, slurm: Slurm, undisturbed: set[str], shared_dir: Path, tmp_path: Path
) -> None:
    """The ranks connect by each of them."""
    where = method.format(port=free_port(), directory=shared_dir)
    arguments = ["devices=1", "nodes=2", f"init_method={where}"]
    job = submit(slurm, tmp_path, *arguments, options=TWO_NODES)
    assert job.wait() == [("COMPLETED", 0)], job.output
    assert weights_of(job) == undisturbed
    assert f"process group: gloo, 2 ranks, {where}" in job.output


FORMED = "process group: gloo, 2 ranks"
INTERACTIVE = [
    pytest.param(
        "srun python", "srun started 2 tasks, but Lightning ignores SLURM", False, id="srun"
    ),
    pytest.param(
        "srun --job-name=train python",
        FORMED,
        True,
        id="srun with a name",
        marks=pytest.mark.nightly,
    ),
    pytest.param("python", FORMED, True, id="without srun", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("start", "sentence", "trains"), INTERACTIVE)
def test_in_an_interactive_job(
    start: str, sentence: str, trains: bool, slurm: Slurm, undisturbed: set[str], tmp_path: Path
) -> None:
    """In ``salloc``, tasks that would train alone raise an error; the other ways train."""
    ended = slurm.run("salloc", *ONE_NODE.split(), *start.split(), TRAIN, cwd=tmp_path)
    assert sentence in ended.stdout, ended.stdout
    assert (ended.returncode == 0) == trains, ended.stdout
    assert train.weights_in(ended.stdout) == (undisturbed if trains else set())


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


DIFFERENT = "devices * num_nodes must equal world_size"
IGNORED = "Lightning ignores SLURM in a job named {!r}"
MISTAKES = [
    pytest.param(ONE_NODE, "python", [], "this script runs without srun", id="without srun"),
    pytest.param(
        f"{ONE_NODE} --job-name=bash",
        "srun python",
        [],
        IGNORED.format("bash"),
        id="a job named bash",
    ),
    pytest.param(
        f"{ONE_NODE} --job-name=interactive",
        "srun python",
        [],
        IGNORED.format("interactive"),
        id="a job named interactive",
        marks=pytest.mark.nightly,
    ),
    pytest.param("--ntasks-per-node=1", "srun python", [], DIFFERENT, id="fewer tasks"),
    pytest.param(
        ONE_NODE,
        "srun python",
        ["devices=4"],
        DIFFERENT,
        id="more devices",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        ONE_NODE,
        "srun python",
        ["nodes=2"],
        DIFFERENT,
        id="another node",
        marks=pytest.mark.nightly,
    ),
    pytest.param(ONE_NODE, "SLURM_NTASKS=1 python", [], DIFFERENT, id="an editor's terminal"),
]


@pytest.mark.parametrize(("options", "start", "arguments", "sentence"), MISTAKES)
def test_mistakes_are_named(
    options: str, start: str, arguments: list[str], sentence: str, slurm: Slurm, tmp_path: Path
) -> None:
    """Tasks that do not become the Trainer's ranks raise an error with the remedy."""
    job = submit(slurm, tmp_path, *arguments, options=options, start=start)
    assert job.wait() == [("FAILED", 0)], job.output
    assert sentence in job.output
    assert not starts_of(job)
