"""Run a script as a user would, in separate processes."""

import contextlib
import os
import re
import runpy
import signal
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.harness.ranks import (
    Environment,
    RankProcesses,
    by_hand_env,
    free_port,
    launch_ranks,
    output_of_all,
)

# In scripts that fork their ranks, instead of running again for each.
_FORKS = r'ddp_ext_(fork|notebook)|start_method="fork"'
_COMMANDS: dict[str, tuple[str, ...]] = {
    "python": (sys.executable,),
    "torchrun": (sys.executable, "-m", "torch.distributed.run"),
}


def run_script(path_or_source: str | Path, *argv: str, exit_code: int = 0, **options: Any) -> str:
    """Run a script to its end, and return its output; fail unless it exits with this
    status. The other arguments are those of ``start_script``.
    """
    with start_script(path_or_source, *argv, **options) as script:
        return output_of_all(script.wait(), exit_code=exit_code)


@contextlib.contextmanager
def start_script(
    path_or_source: str | Path,
    *argv: str,
    env: Environment | None = None,
    launcher: Sequence[str] = ("python",),
    time_limit: float = 300.0,
    cwd: str | Path | None = None,
) -> Iterator[RankProcesses]:
    """Start a script, as the only process of ``RankProcesses``.

    Args:
        path_or_source: the script's path, or its text (anything with a line break;
            common indentation is removed).
        argv: arguments of the script.
        env: changes to the environment, as for rank 0.
        launcher: the words before the script; ``python`` and ``torchrun`` are those of
            this environment.
        time_limit: seconds until ``wait`` gives up.
        cwd: the working directory; None: a temporary one.
    """
    with tempfile.TemporaryDirectory(prefix="script-", ignore_cleanup_errors=True) as temporary:
        directory = Path(cwd or temporary)
        words = [part for word in launcher for part in _COMMANDS.get(word, (word,))]
        command = [*words, str(_path_of(path_or_source, directory)), *argv]
        env = {**_changes_to_a_shell(), **(env or {})}
        with RankProcesses(
            _be_the_command, 1, command, directory, env=env, time_limit=time_limit
        ) as script:
            yield script


def run_on_ranks(
    script: Path,
    *argv: str,
    cwd: Path,
    world_size: int | None = None,
    time_limit: float = 300.0,
) -> str:
    """Run a script on rank processes that have imported torch and Lightning, five times
    as fast as ``run_script``.

    It runs as under a launcher that sets ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``:
    by default on two ranks, or in one process if it forks its ranks itself. Return the
    output of all of them, rank by rank; fail unless each exits with status 0.
    """
    if world_size is None:
        world_size = 1 if re.search(_FORKS, script.read_text()) else 2
    env = by_hand_env(world_size, free_port()) if world_size > 1 else {}
    outcomes = launch_ranks(
        be_the_script, world_size, script, argv, cwd, env=env, time_limit=time_limit
    )
    return output_of_all(outcomes, exit_code=0)


def print_line(text: str) -> None:
    """In a script that tests wait for: write a whole line, and flush it.

    torchrun starts Python with ``-u``, where ``print`` writes a text and its line break
    one by one.
    """
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def be_the_script(
    rank: int, world_size: int, script: Path, argv: tuple[str, ...], cwd: Path
) -> None:
    """Run a script in a rank process, as its function."""
    os.chdir(cwd)
    sys.argv = [str(script), *argv]
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


def _be_the_command(rank: int, world_size: int, command: Sequence[str], cwd: Path) -> None:
    """Replace a rank process by a command, with the environment that a shell would give
    it.
    """
    os.chdir(cwd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(command[0], command)


def _changes_to_a_shell() -> Environment:
    """Return changes that make the test's environment a user's shell."""
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "OMP_NUM_THREADS": "1",  # two would wait for each other's core
        "PYTHONDONTWRITEBYTECODE": None,  # each process would compile the package anew
        "PYTHONUNBUFFERED": None,  # it tears the lines of several processes on one pipe apart
    }


def _path_of(path_or_source: str | Path, directory: Path) -> Path:
    """Return the script's path; a source is written to ``directory``."""
    if isinstance(path_or_source, Path) or "\n" not in path_or_source:
        return Path(path_or_source).resolve()
    path = directory / "script.py"
    path.write_text(textwrap.dedent(path_or_source).lstrip())
    return path
