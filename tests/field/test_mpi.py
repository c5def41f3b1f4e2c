"""Ranks that a real Open MPI or MPICH starts."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.field import train
from tests.harness.environment import MARK, marked, skip_because, wait_until_exited

ROOT = str(Path(__file__).parents[2])
SECONDS_TO_EXIT = 60.0  # 200 steps of a second take longer
# Open MPI waits for six seconds before it passes SIGTERM on, and again before it kills
# the ranks. By default, it waits for one second, which a busy machine exceeds.
TIME_TO_SAVE = ["--mca", "odls_base_sigkill_timeout", "6"]


class Launcher(NamedTuple):
    """An ``mpirun`` by Debian's name, its options, and its process ID as a shell command
    of rank 0 finds it.
    """

    program: str
    options: Sequence[str]
    pid: str


OPEN_MPI = Launcher(
    "mpirun.openmpi",
    options=["--allow-run-as-root", "--oversubscribe", *TIME_TO_SAVE],
    pid="$(ps -o ppid= $PPID)",
)
MPICH = Launcher(
    "mpirun.mpich",
    options=[],
    pid="$(ps -o ppid= $(ps -o ppid= $PPID))",  # Hydra has a proxy in between
)
each_launcher = pytest.mark.parametrize("launcher", [OPEN_MPI, MPICH], ids=["openmpi", "mpich"])


class Ended(NamedTuple):
    """The exit status of a launcher, and all that runs in its directory have printed."""

    status: int
    output: str


def train_by(launcher: Launcher, directory: Path, *arguments: str) -> Ended:
    """Train on two ranks until the launcher exits."""
    is_installed = shutil.which(launcher.program) is not None
    skip_because(None if is_installed else f"{launcher.program} is not installed")
    command = [launcher.program, *launcher.options, "-n", "2", sys.executable, train.__file__]
    words = [f"init_method=file://{directory}/address", *arguments]
    env = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    # A file, because ranks that outlive their launcher would keep a pipe open.
    with open(directory / "log", "a+") as log:
        done = subprocess.run(
            [*command, *words], cwd=directory, env=env, stdout=log, stderr=log, check=False
        )
        log.seek(0)
        return Ended(done.returncode, log.read())


def ranks_in(directory: Path) -> list[psutil.Process]:
    """Return the ranks that still run in a directory."""
    ranks = []
    for process in marked(os.environ[MARK]):
        with suppress(psutil.NoSuchProcess):  # a process may exit meanwhile
            if f"file://{directory}/address" in " ".join(process.cmdline()):
                ranks.append(process)
    return ranks


@each_launcher
def test_ranks_exit_after_their_launcher_is_killed(launcher: Launcher, tmp_path: Path) -> None:
    """The ranks exit within a minute, though Open MPI itself leaves them running."""
    ended = train_by(launcher, tmp_path, "step=1", f"command=kill -KILL {launcher.pid}")
    assert ended.status == -signal.SIGKILL, ended.output
    assert "rank 0 of 2 trains from step 0" in ended.output
    assert not wait_until_exited(lambda: ranks_in(tmp_path), SECONDS_TO_EXIT)


@each_launcher
def test_ranks_save_after_sigterm_to_their_launcher(launcher: Launcher, tmp_path: Path) -> None:
    """The same command, run again, continues with the next step to the end."""
    stop = f"command=test -e stopped || {{ touch stopped; kill {launcher.pid}; }}"
    stopped = train_by(launcher, tmp_path, "step=0.2", stop)
    assert "all ranks stop after step" in stopped.output, stopped.output
    resumed = train_by(launcher, tmp_path, "step=0.2", stop)
    assert resumed.status == 0, resumed.output
    for rank in (0, 1):
        assert f"rank {rank} of 2 trained to step 200" in resumed.output
    assert resumed.output.count("rank 0 of 2 trains from step 0") == 1


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    """The other rank prints the number of the killed one before Open MPI ends it."""
    ended = train_by(OPEN_MPI, tmp_path, "step=0.05", "death=1")
    assert ended.status != 0
    assert "[rank 0] RankDiedError: rank 1 (host" in ended.output, ended.output
