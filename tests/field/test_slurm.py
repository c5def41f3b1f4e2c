"""Jobs on a real SLURM: they stop, are requeued and resume with the weights of an
undisturbed run.

SLURM runs on this machine, with two nodes. Its daemons see another ``/etc/hosts``, in which
both nodes are 127.0.0.1; the machine's file does not change. On Debian, install them with
``apt-get install --no-install-recommends slurmctld slurmd slurm-client munge``.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.field import train
from tests.field.train import starts_in, stops_in, weights_in
from tests.harness.environment import MARK, free_port, skip_because
from tests.harness.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
PATH = os.environ.get("PATH", os.defpath)
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged", "unshare")
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_TO_START = 120.0
LIGHTNINGS_FIRST_PORT = 15_000  # of job 0; it uses the last four digits
SECONDS_TO_EXIT = 300.0  # of a job, with one requeue, on a busy machine
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY"}
CONFIGURATION = """\
ClusterName=field
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
FirstJobId={first_job}
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,sched_interval=1,bf_interval=1
KillWait=15
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=60 State=UP
PartitionName=lowest Nodes=n1,n2 PriorityTier=1 GraceTime=0 State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=10 State=UP
"""


def wait_until(
    condition: Callable[[], object], otherwise: Callable[[], str], seconds: float
) -> None:
    """Fail with a text if a condition is not met within some seconds.

    For conditions outside of this process, which nothing announces.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(SECONDS_BETWEEN_LOOKS)


def path_of(program: str) -> str | None:
    return shutil.which(program, path=f"{PATH}:/usr/sbin:/sbin")


def first_job() -> int:
    """Return the first of 99 numbers of jobs that no other SLURM of tests on this machine has.

    Lightning makes a job's port of its number: with the same number as a job of another
    SLURM, a task would connect to that job. Numbers are reserved by hundreds: the first port
    of a hundred stands for it, because ``free_port`` gives a port to one process only. The
    jobs have the 99 numbers after it.
    """
    first_port = LIGHTNINGS_FIRST_PORT
    return free_port("", range(first_port, first_port + 10_000, 100)) - first_port + 1


class End(NamedTuple):
    """How a job ended: its final state, and how often it was requeued before."""

    state: str
    requeues: int


class Slurm:
    """A SLURM whose files are in a directory; ``end`` ends its daemons and all jobs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._configuration = root / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start munge, the controller and a daemon for each node; wait until the nodes
        are idle.
        """
        self._configure()
        files = {
            "--key-file": "munge.key",
            "--socket": "munge.socket",
            "--pid-file": "munge.pid",
            "--log-file": "munge.log",
            "--seed-file": "munge.seed",
        }
        options = [f"{name}={self._root / file}" for name, file in files.items()]
        self._start("munged", "--foreground", "--force", *options)
        self._wait_until((self._root / "munge.socket").is_socket, "munge has no socket")
        self._start("slurmctld", "-D", "-f", self._configuration)
        for node in ("n1", "n2"):
            slurmd = (
                f"mount --bind {self._root}/hosts /etc/hosts"
                f" && exec {path_of('slurmd')} -D -N {node} -f {self._configuration}"
            )
            self._start("unshare", "--mount", "sh", "-c", slurmd)
        self._wait_until(self._has_idle_nodes, "its nodes are not idle")

    def _configure(self) -> None:
        """Write the files that the daemons read."""
        for name in ("state", "n1", "n2"):
            (self._root / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        ports = [free_port() for _ in range(3)]
        self._configuration.write_text(
            CONFIGURATION.format(host=host, root=self._root, ports=ports, first_job=first_job())
        )
        (self._root / "hosts").write_text(f"127.0.0.1 localhost n1 n2 {host}\n")
        key = self._root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))

    def end(self) -> None:
        is_running = self._execute("scancel", "--user=root").returncode == 0
        if is_running:
            self._wait_until(self._has_no_jobs, "jobs are left")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start(self, program: str, *words: object) -> None:
        """Start a daemon, which outlives the test that needs it first."""
        command = [str(path_of(program)), *map(str, words)]
        unmarked = {name: value for name, value in os.environ.items() if name != MARK}
        with open(self._root / f"{len(self._daemons)}-{program}.out", "wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=unmarked,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )

    def _has_idle_nodes(self) -> bool:
        listed = self._execute("sinfo", "--noheader", "-p", "low", "-t", "idle", "-o", "%D")
        return listed.stdout.strip() == "2"

    def _has_no_jobs(self) -> bool:
        listed = self._execute("squeue", "--noheader")
        return listed.returncode == 0 and not listed.stdout.strip()

    def _wait_until(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Fail with the daemons' output if a condition is not met in two minutes."""
        wait_until(
            condition,
            lambda: f"{otherwise} after {SECONDS_TO_START:g} s\n{self._logs()}",
            SECONDS_TO_START,
        )

    def _logs(self) -> str:
        return "\n".join(
            f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(self._root.glob("*.out"))
        )

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a user's shell on this cluster."""
        unset = {"PYTHONUNBUFFERED", "PYTEST_CURRENT_TEST"}
        return {
            **{name: value for name, value in os.environ.items() if name not in unset},
            "SLURM_CONF": str(self._configuration),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{PATH}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def _execute(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run one of SLURM's commands to its end, which may be a failure."""
        return subprocess.run(
            command,
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def call(self, *command: str, cwd: Path | None = None) -> str:
        """Return the output of one of SLURM's commands; fail if the command fails."""
        done = self._execute(*command, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, *words: str, cwd: Path) -> Job:
        """Submit a job with the arguments of ``sbatch`` in a directory."""
        return Job(self, self.call("sbatch", "--parsable", "--open-mode=append", *words, cwd=cwd))


@dataclass(frozen=True)
class Job:
    """A submitted job, and its number in a SLURM."""

    slurm: Slurm
    number: str

    @property
    def output(self) -> str:
        """The text that all starts of the job have written."""
        log = Path(self._fact("StdOut"))
        return log.read_text() if log.exists() else ""

    def _fact(self, name: str) -> str:
        """Return a fact that the controller states about the job, such as ``JobState``."""
        shown = self.slurm.call("scontrol", "show", "job", self.number)
        (fact,) = re.findall(rf"\b{name}=(\S+)", shown)
        return str(fact)

    def wait(self) -> End:
        """Wait until the job exits for good; return how it ended."""
        self._wait_until(lambda: self._fact("JobState") in FINAL, "is still running")
        return End(self._fact("JobState"), int(self._fact("Restarts")))

    def wait_for_output(self, text: str) -> None:
        """Wait until the job has written ``text``."""
        self._wait_until(lambda: text in self.output, f"has not written {text!r}")

    def _wait_until(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Fail with the job's output if a condition is not met in five minutes."""
        wait_until(
            condition, lambda: f"job {self.number} {otherwise}:\n{self.output}", SECONDS_TO_EXIT
        )


# Jobs.

TRAIN = str(Path(train.__file__))
ONE_NODE = "--nodes=1 --ntasks-per-node=2"
TWO_NODES = "--nodes=2 --ntasks-per-node=1"
SRUN = "srun python"
SLOWLY = "step=0.2"
FINISHED = End("COMPLETED", requeues=0)
FAILED = End("FAILED", requeues=0)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Start a SLURM with two nodes; skip if it cannot run here."""
    missing = [program for program in PROGRAMS if path_of(program) is None]
    skip_because(f"{', '.join(missing)} not installed" if missing else None)
    skip_because("SLURM's daemons need root" if os.geteuid() != 0 else None)
    started = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        started.start()
        yield started
    finally:
        started.end()


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


def expect_resumed(job: Job, undisturbed: set[str]) -> None:
    """Fail unless the job was requeued, continued after the step at which it stopped,
    and learned the same.
    """
    assert job.wait() == End("COMPLETED", requeues=1), job.output
    stops = stops_in(job.output)
    assert stops, job.output
    assert {start.step for start in starts_in(job.output)} == {0, *stops}, job.output
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


# The words before the script. The requeued job has a longer limit, or the signal for the limit
# arrives while it starts, and kills it.
LONGER_WHEN_REQUEUED = (
    "test -z $SLURM_RESTART_COUNT || scontrol update jobid=$SLURM_JOB_ID timelimit=20"
)
# An argument of the script: rank 0 signals the whole job.
USR1 = "command=scancel --signal=USR1 $SLURM_JOB_ID"
# The words before the script, which exits with 143 after SIGTERM.
REQUEUE_ON_143 = """
requeue_on_143() { "$@"; [ $? != 143 ] || scontrol requeue $SLURM_JOB_ID; }
requeue_on_143 srun python"""


# Each case is a way to stop and requeue a job: the script's arguments, one of which acts on
# the job, further options of ``sbatch``, and the words before the script.
@pytest.mark.parametrize(
    ("arguments", "options", "start"),
    [
        pytest.param(
            ["step=0.5", "command=scontrol update jobid=$SLURM_JOB_ID timelimit=1"],
            "--signal=USR1@30 --time=20",
            f"{LONGER_WHEN_REQUEUED}; {SRUN}",
            id="--signal before the time limit",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            [SLOWLY, USR1, "resume="],
            "",
            SRUN,
            id="scancel --signal, without an argument to resume",
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
    ],
)
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
    example = str(ROOT / "examples/slurm.sbatch")
    expect_resumed(slurm.submit(example, TRAIN, SLOWLY, USR1, cwd=tmp_path), undisturbed)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("--partition=low", id="with a grace time"),
        pytest.param("--partition=lowest", id="without a grace time", marks=pytest.mark.nightly),
        pytest.param(
            "--partition=low --signal=USR1@60", id="by --signal", marks=pytest.mark.nightly
        ),
    ],
)
def test_a_preempted_job_on_two_nodes_is_requeued_and_continues(
    options: str, slurm: Slurm, undisturbed: set[str], tmp_path: Path
) -> None:
    """A job that exits within its grace time requeues itself, because SLURM does not."""
    on_two_nodes = f"{TWO_NODES} --exclusive"
    preempted = submit(
        slurm, tmp_path, "step=0.5", "devices=1", "nodes=2", options=f"{on_two_nodes} {options}"
    )
    preempted.wait_for_output(train.ONE_STEP_DONE)
    urgent = slurm.submit("--partition=high", *on_two_nodes.split(), "--wrap=true", cwd=tmp_path)
    expect_resumed(preempted, undisturbed)
    assert urgent.wait() == FINISHED


def once(command: str) -> str:
    """Return the script's argument for a command that only the first job runs."""
    return f"command=test -e stopped || {{ touch stopped; {command}; }}"


@pytest.mark.parametrize(
    ("command", "state"),
    [
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
    ],
)
def test_a_job_that_is_not_requeued_saves_and_a_new_job_continues(
    command: str, state: str, slurm: Slurm, undisturbed: set[str], tmp_path: Path
) -> None:
    """The same command, submitted again, begins with the next step."""
    arguments = ["step=0.5", once(command)]
    job = submit(slurm, tmp_path, *arguments)
    assert job.wait() == End(state, requeues=0), job.output
    stops = stops_in(job.output)
    assert len(stops) == 1, job.output
    again = submit(slurm, tmp_path, *arguments)
    assert again.wait() == FINISHED, again.output
    assert {start.step for start in starts_in(again.output)} == set(stops), again.output
    assert weights_in(again.output) == undisturbed


def test_a_job_whose_step_is_cancelled_saves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    """The job fails, and is not requeued."""
    job = submit(slurm, tmp_path, "step=0.5", once("scancel $SLURM_JOB_ID.0"))
    assert job.wait() == FAILED, job.output
    assert stops_in(job.output) == [], job.output


DIED = r"^\[rank 0\] RankDiedError: rank 1 \(host .+\) died"


@pytest.mark.parametrize(
    ("srun", "fault", "message"),
    [
        pytest.param(
            "srun --kill-on-bad-exit=0", "death=1", DIED, id="killed", marks=pytest.mark.nightly
        ),
        pytest.param(
            "srun --kill-on-bad-exit=1", "death=1", DIED, id="killed, and SLURM ends the others"
        ),
        pytest.param(
            "srun",
            "error=1",
            r"^\[rank 0\] RankFailedError: rank 1 \(host .+\) failed, .+: ValueError: a broken"
            " sample",
            id="raises",
        ),
    ],
)
def test_a_failed_task_is_named_by_the_other_one_which_saves(
    srun: str, fault: str, message: str, slurm: Slurm, tmp_path: Path
) -> None:
    """The checkpoint has the fourth step, in which the task fails; the job fails.

    A task that raises saves, too, if it has the lock first.
    """
    job = submit(slurm, tmp_path, SLOWLY, fault, start=f"{srun} python")
    assert job.wait() == FAILED, job.output
    assert re.search(message, job.output, re.MULTILINE), job.output
    assert re.search(r"^\[rank \d\] saved step 4 to", job.output, re.MULTILINE), job.output


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("env://", marks=pytest.mark.nightly),
        pytest.param("tcp://n1:{port}", marks=pytest.mark.nightly),
        "file://{directory}/rank0",
    ],
)
def test_ranks_on_two_nodes_connect_by_each_init_method(
    method: str, slurm: Slurm, undisturbed: set[str], shared_dir: Path, tmp_path: Path
) -> None:
    """Rank 0 logs the init method, and two nodes learn the same as one."""
    init_method = method.format(port=free_port(), directory=shared_dir)
    job = submit(
        slurm,
        tmp_path,
        "devices=1",
        "nodes=2",
        f"init_method={init_method}",
        options=TWO_NODES,
    )
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
    output = run_script(TRAIN, launcher=launcher, cwd=tmp_path, env=slurm.environment)
    assert "process group: gloo, 2 ranks" in output
    assert weights_in(output) == undisturbed
