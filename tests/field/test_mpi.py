"""Ranks that a real Open MPI or MPICH starts."""

import shutil
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.field import train
from tests.harness.environment import skip_because, wait_until_exited
from tests.harness.ranks import Outcome, RankProcesses
from tests.harness.scripts import start_script

SECONDS_TO_EXIT = 60.0  # 200 steps of a second take longer
# Open MPI waits for six seconds before it passes SIGTERM on, and again before it kills
# the ranks. By default, it waits for one second, which a busy machine exceeds.
TIME_TO_SAVE = ("--mca", "odls_base_sigkill_timeout", "6")


class Launcher(NamedTuple):
    """An ``mpirun`` by Debian's name with its options, and its process ID as a shell
    command of rank 0 finds it.
    """

    words: tuple[str, ...]
    pid: str


OPEN_MPI = Launcher(
    ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", *TIME_TO_SAVE),
    pid="$(ps -o ppid= $PPID)",
)
MPICH = Launcher(
    ("mpirun.mpich",),
    pid="$(ps -o ppid= $(ps -o ppid= $PPID))",  # Hydra has a proxy in between
)
each_launcher = pytest.mark.parametrize("launcher", [OPEN_MPI, MPICH], ids=["openmpi", "mpich"])


def started(
    launcher: Launcher, directory: Path, *arguments: str
) -> AbstractContextManager[RankProcesses]:
    """Start two ranks, which train; the launcher is the only process of the result."""
    program = launcher.words[0]
    skip_because(None if shutil.which(program) else f"{program} is not installed")
    words = [*launcher.words, "-n", "2", sys.executable]
    return start_script(
        train.__file__, method_in(directory), *arguments, launcher=words, cwd=directory
    )


def method_in(directory: Path) -> str:
    return f"init_method=file://{directory}/address"


def ended(launcher: Launcher, directory: Path, *arguments: str) -> Outcome:
    """Train on two ranks until the launcher exits."""
    with started(launcher, directory, *arguments) as processes:
        return processes.wait()[0]


def ranks_in(directory: Path) -> list[psutil.Process]:
    """Return the ranks that still run in a directory."""
    word = method_in(directory)
    return [
        each for each in psutil.process_iter(["cmdline"]) if word in (each.info["cmdline"] or [])
    ]


@each_launcher
def test_ranks_exit_after_their_launcher_is_killed(launcher: Launcher, tmp_path: Path) -> None:
    """The ranks exit within a minute, though Open MPI itself leaves them running."""
    with started(launcher, tmp_path, "step=1", f"command=kill -KILL {launcher.pid}") as processes:
        (killed,) = processes.wait()
        assert not wait_until_exited(lambda: ranks_in(tmp_path), SECONDS_TO_EXIT)
    assert killed.exit_code == -signal.SIGKILL, killed.story()
    assert "rank 0 of 2 trains from step 0" in killed.output


@each_launcher
def test_ranks_save_after_sigterm_to_their_launcher(launcher: Launcher, tmp_path: Path) -> None:
    """The same command, run again, continues with the next step to the end."""
    stop = f"command=test -e stopped || {{ touch stopped; kill {launcher.pid}; }}"
    stopped = ended(launcher, tmp_path, "step=0.2", stop)
    assert "all ranks stop after step" in stopped.output, stopped.output
    resumed = ended(launcher, tmp_path, "step=0.2", stop)
    assert resumed.exit_code == 0, resumed.output
    for rank in (0, 1):
        assert f"rank {rank} of 2 trained to step 200" in resumed.output
    assert "rank 0 of 2 trains from step 0" not in resumed.output


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    """The other rank prints the number of the killed one before Open MPI ends it."""
    failed = ended(OPEN_MPI, tmp_path, "step=0.05", "death=1")
    assert failed.exit_code != 0
    assert "[rank 0] RankDiedError: rank 1 (host" in failed.output, failed.output
