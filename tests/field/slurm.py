"""Run a real SLURM on this machine, with two nodes, and jobs on it as users submit
them.

The daemons see another ``/etc/hosts``, in which both nodes are 127.0.0.1; the machine's
file does not change. On Debian, install them with ``apt-get install
--no-install-recommends slurmctld slurmd slurm-client munge``.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.harness.environment import MARK, free_port, wait_until

_ROOT = Path(__file__).resolve().parents[2]
_PATH = os.environ.get("PATH", os.defpath)
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged", "unshare")
_SECONDS_TO_START = 120.0
_SECONDS_TO_EXIT = 300.0  # of a job, with one requeue, on a busy machine
_FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY"}
_CONFIGURATION = """\
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


def why_unavailable() -> str | None:
    """Return the reason why SLURM cannot run here, or ``None``."""
    missing = [program for program in _PROGRAMS if _path_of(program) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    return "SLURM's daemons need root" if os.geteuid() != 0 else None


def _path_of(program: str) -> str | None:
    return shutil.which(program, path=f"{_PATH}:/usr/sbin:/sbin")


class End(NamedTuple):
    """How a job ended: its final state, and how often it was requeued before."""

    state: str
    requeues: int


class Slurm:
    """A SLURM whose files are in a directory; the context manager starts its daemons,
    and ends them and all jobs.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._configuration = root / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        self._configure()
        try:
            self._start_daemons()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _configure(self) -> None:
        """Write the files that the daemons read."""
        for name in ("state", "n1", "n2"):
            (self._root / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        ports = [free_port() for _ in range(3)]
        # Lightning makes a port of the job's number, which another SLURM on this machine
        # must not use as well.
        first_job = 1 + 100 * secrets.randbelow(99)
        self._configuration.write_text(
            _CONFIGURATION.format(host=host, root=self._root, ports=ports, first_job=first_job)
        )
        (self._root / "hosts").write_text(f"127.0.0.1 localhost n1 n2 {host}\n")
        key = self._root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))

    def _start_daemons(self) -> None:
        """Start munge, the controller and a daemon for each node; wait until the nodes
        are idle.
        """
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
                f" && exec {_path_of('slurmd')} -D -N {node} -f {self._configuration}"
            )
            self._start("unshare", "--mount", "sh", "-c", slurmd)
        self._wait_until(self._has_idle_nodes, "its nodes are not idle")

    def __exit__(self, *_: object) -> None:
        is_controlled = self._execute("scancel", "--user=root").returncode == 0
        if is_controlled:
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
        command = [str(_path_of(program)), *map(str, words)]
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
            lambda: f"{otherwise} after {_SECONDS_TO_START:g} s\n{self._logs()}",
            _SECONDS_TO_START,
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
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{_PATH}",
            "PYTHONPATH": str(_ROOT),
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


class Job:
    """A submitted job."""

    def __init__(self, slurm: Slurm, number: str) -> None:
        self._number = number
        self._slurm = slurm

    @property
    def output(self) -> str:
        """The text that all starts of the job have written."""
        log = Path(self._fact("StdOut"))
        return log.read_text() if log.exists() else ""

    def _fact(self, name: str) -> str:
        """Return a fact that the controller states about the job, such as ``JobState``."""
        shown = self._slurm.call("scontrol", "show", "job", self._number)
        (fact,) = re.findall(rf"\b{name}=(\S+)", shown)
        return str(fact)

    def wait(self) -> End:
        """Wait until the job exits for good; return how it ended."""
        self._wait_until(lambda: self._fact("JobState") in _FINAL, "is still running")
        return End(self._fact("JobState"), int(self._fact("Restarts")))

    def wait_for_output(self, text: str) -> None:
        """Wait until the job has written ``text``."""
        self._wait_until(lambda: text in self.output, f"has not written {text!r}")

    def _wait_until(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Fail with the job's output if a condition is not met in five minutes."""
        wait_until(
            condition, lambda: f"job {self._number} {otherwise}:\n{self.output}", _SECONDS_TO_EXIT
        )
