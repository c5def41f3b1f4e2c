"""Ranks that a real Open MPI or MPICH starts."""

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.field import train
from tests.harness.environment import MARK, marked, skip_because, wait_until_exited

_ROOT = str(Path(__file__).parents[2])
_SECONDS_TO_EXIT = 60.0  # at most; without a watch, the ranks would train for longer


# Open MPI waits for so many seconds before it passes SIGTERM on, and again before it kills
# the ranks. By default, it waits for one second, which a busy machine exceeds.
TIME_TO_SAVE = ["--mca", "odls_base_sigkill_timeout", "6"]
OPTIONS = {"openmpi": ["--allow-run-as-root", "--oversubscribe", *TIME_TO_SAVE], "mpich": []}


def mpirun(
    directory: Path, *arguments: str, kind: str = "openmpi"
) -> subprocess.CompletedProcess[str]:
    """Train on two ranks, and return the launcher's end."""
    program = f"mpirun.{kind}"  # Debian's names
    skip_because(None if shutil.which(program) else f"{program} is not installed")
    command = [program, *OPTIONS[kind], "-n", "2", sys.executable, train.__file__]
    words = [f"init_method=file://{directory}/address", *arguments]
    env = {**os.environ, "PYTHONPATH": _ROOT, "OMP_NUM_THREADS": "1"}
    with open(directory / "log", "a+") as log:
        done = subprocess.run(
            [*command, *words], cwd=directory, env=env, stdout=log, stderr=log, check=False
        )
        log.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, log.read())


def ranks_in(directory: Path) -> list[psutil.Process]:
    """Return the ranks that still run in a directory."""
    ranks = []
    for process in marked(os.environ[MARK]):
        with suppress(psutil.NoSuchProcess):  # it exits meanwhile
            if f"file://{directory}/address" in " ".join(process.cmdline()):
                ranks.append(process)
    return ranks


# The launcher's process, as a command of rank 0 finds it; Hydra has a proxy in between.
LAUNCHER = {
    "openmpi": "$(ps -o ppid= $PPID)",
    "mpich": "$(ps -o ppid= $(ps -o ppid= $PPID))",
}


@pytest.mark.parametrize("kind", LAUNCHER)
def test_ranks_exit_after_their_killed_launcher(kind: str, tmp_path: Path) -> None:
    """Open MPI itself leaves them running."""
    ended = mpirun(tmp_path, "step=1", f"act=kill -KILL {LAUNCHER[kind]}", kind=kind)
    assert ended.returncode == -9, ended.stdout
    assert "rank 0 of 2 trains from step 0" in ended.stdout
    assert not wait_until_exited(lambda: ranks_in(tmp_path), _SECONDS_TO_EXIT)


@pytest.mark.parametrize("kind", LAUNCHER)
def test_ranks_save_after_sigterm(kind: str, tmp_path: Path) -> None:
    """The same command then continues with the next step."""
    stop = f"act=test -e stopped || {{ touch stopped; kill {LAUNCHER[kind]}; }}"
    ended = mpirun(tmp_path, "step=0.2", stop, kind=kind)
    assert "all ranks stop after step" in ended.stdout, ended.stdout
    ended = mpirun(tmp_path, "step=0.2", stop, kind=kind)
    assert ended.returncode == 0, ended.stdout
    assert "rank 1 of 2 trained to step 200" in ended.stdout
    assert ended.stdout.count("rank 0 of 2 trains from step 0") == 1


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    """The other rank prints its number before Open MPI ends it."""
    ended = mpirun(tmp_path, "step=0.05", "act=death of 1")
    assert ended.returncode != 0
    assert "[rank 0] RankDiedError: rank 1 (host" in ended.stdout, ended.stdout


def test_mpich(tmp_path: Path) -> None:
    """Hydra numbers the ranks."""
    ended = mpirun(tmp_path, kind="mpich")
    assert ended.returncode == 0, ended.stdout
    for rank in (0, 1):
        assert f"rank {rank} of 2 trained to step 200" in ended.stdout
