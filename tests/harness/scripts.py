r"""Run a script as a user would, in separate processes.

::

    done = run_script(source, launcher=("torchrun", "--nproc-per-node=2"))     # to its end
    assert done.returncode == 0 and "epoch 3" in done.output

    with start_script(source) as script:                                       # for faults
        script.wait_for_line("in step 3")
        os.kill(script.pid, signal.SIGKILL)
        assert script.wait().returncode == 1

    printed = run_on_ranks(path, cwd=tmp_path)                                 # where start and end do not matter

Nothing of a script outlives its test. A script that tests wait for writes whole lines,
``sys.stdout.write("in step 3\n")``, and flushes them: torchrun starts Python with ``-u``, where ``print`` writes a text
and its line break one by one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.harness.environment import Environment, by_hand_env, environment_of, free_port
from tests.harness.outcomes import output_of_all
from tests.harness.processes import MARK, PIPE_SIZE, marked, name_of, wait_until_gone
from tests.harness.ranks import launch_ranks

_ROOT = Path(__file__).resolve().parents[2]
_COMMANDS: dict[str, tuple[str, ...]] = {
    "python": (sys.executable,),
    "torchrun": (sys.executable, "-m", "torch.distributed.run"),
}
_SECONDS_TO_END = 120.0
_SECONDS_TO_PRINT = 10.0  # for processes that end after the script
_numbers = itertools.count()


def run_script(path_or_source: str | Path, *argv: str, **options: Any) -> Script:
    """Run a script to its end; the arguments are those of ``start_script``.

    Fails at the time limit, and if one of the script's processes survives it.
    """
    with start_script(path_or_source, *argv, **options) as script:
        script.wait()
        script.expect_no_survivors()
        return script


def run_on_ranks(
    script: Path, *argv: str, cwd: Path, world_size: int = 2, returncode: int = 0, time_limit: float = 300.0
) -> str:
    """Run a script on rank processes, which have imported torch and Lightning: a fifth of what ``run_script`` takes.

    It runs as under a launcher that sets ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``, or on one process from where it
    forks its ranks. Returns what all of them have printed, rank by rank; fails unless each ends with ``returncode``.
    """
    env = by_hand_env(world_size, free_port()) if world_size > 1 else {}
    outcomes = launch_ranks(be_the_script, world_size, script, argv, cwd, env=env, time_limit=time_limit)
    return output_of_all(outcomes, exit_code=returncode)


def be_the_script(rank: int, world_size: int, script: Path, argv: tuple[str, ...], cwd: Path) -> None:
    """Run a script in a rank process."""
    os.chdir(cwd)
    sys.argv, sys.path[0] = [str(script), *argv], str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


@contextlib.contextmanager
def start_script(
    path_or_source: str | Path,
    *argv: str,
    env: Environment | None = None,
    launcher: Sequence[str] = ("python",),
    time_limit: float = 300.0,
    cwd: str | Path | None = None,
) -> Iterator[Script]:
    """Start a script; what is left of it at the end of the context is killed.

    Args:
        path_or_source: the script's path, or its text (anything with a line break; indentation in common is taken off).
        argv: arguments of the script.
        env: changes to the environment, as for rank 0.
        launcher: the words before the script; ``python`` and ``torchrun`` are those of this environment.
        time_limit: seconds until ``wait`` gives up.
        cwd: the working directory; None: a temporary one.
    """
    with tempfile.TemporaryDirectory(prefix="script-", ignore_cleanup_errors=True) as temporary:
        directory = Path(cwd or temporary)
        words = [part for word in launcher for part in _COMMANDS.get(word, (word,))]
        command = [*words, str(_path_of(path_or_source, directory)), *argv]
        script = Script(command, directory, env or {}, time_limit)
        try:
            yield script
        finally:
            script.close()


class Script:
    """A script that has been started by ``start_script``; what it prints, and how it ends."""

    def __init__(self, command: list[str], cwd: Path, env: Environment, time_limit: float) -> None:
        self._mark = f"{os.environ.get(MARK, os.getpid())}/{os.getpid()}-{next(_numbers)}."
        self._time_limit = time_limit
        self._deadline = time.monotonic() + time_limit
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            env=_environment(env, self._mark),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._printed, self._is_open = b"", True
        self._has_news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process that was started, be it the script or its launcher."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status of that process, once it has been waited for; negative for a signal."""
        return self._process.returncode

    @property
    def output(self) -> str:
        """What has been printed so far, to stdout and stderr in the order in which it came."""
        return self._printed.decode(errors="replace")

    def wait_for_line(self, pattern: str) -> re.Match[str]:
        """Wait for a line that contains the pattern; earlier lines count.

        Fail at the time limit, or as soon as the script's output is complete without it.
        """
        with self._has_news:
            self._has_news.wait_for(
                lambda: not self._is_open or re.search(pattern, self.output, re.MULTILINE),
                self._deadline - time.monotonic(),
            )
        found = re.search(pattern, self.output, re.MULTILINE)
        assert found, self._told(f"no line with {pattern!r} within {self._time_limit} s")
        return found

    def wait(self) -> Script:
        """Wait for the script's own end.

        Fails at the time limit, with the stacks of all of its processes, which are ended.
        """
        try:
            self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._end_with_stacks()
            raise AssertionError(self._told(f"the script had not ended after {self._time_limit} s")) from None
        self._reader.join(_SECONDS_TO_PRINT)
        return self

    def expect_no_survivors(self, seconds: float = _SECONDS_TO_END) -> None:
        """Fail if a process of the script is still there after ``seconds``."""
        names = [name_of(process) for process in wait_until_gone(lambda: marked(self._mark), seconds)]
        assert not names, self._told("\n".join([f"still there {seconds} s after the end of the script:", *names]))

    def close(self) -> None:
        """Kill what is left of it."""
        self._process.kill()  # marked() would not see it before it has begun to run the command
        self._process.wait()
        left = wait_until_gone(lambda: marked(self._mark), _SECONDS_TO_END, kill=True)
        assert not left, f"SIGKILL did not end {left}"
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            while self._is_open:
                printed = os.read(pipe.fileno(), PIPE_SIZE)
                with self._has_news:
                    self._printed += printed
                    self._is_open = bool(printed)
                    self._has_news.notify()

    def _end_with_stacks(self) -> None:
        for process in marked(self._mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGABRT)  # Python writes its stacks (PYTHONFAULTHANDLER) and dies
                process.send_signal(signal.SIGCONT)  # a stopped process would never hear of it
        wait_until_gone(lambda: marked(self._mark), _SECONDS_TO_END)
        self._reader.join(_SECONDS_TO_PRINT)

    def _told(self, what: str) -> str:
        return f"{what}\n--- output of the script ---\n{self.output.rstrip() or '(nothing)'}"


def _environment(env: Environment, mark: str) -> dict[str, str]:
    """Return the environment of a user's shell, with variables to find the processes and their stacks."""
    ours: Environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONDONTWRITEBYTECODE": None,  # each process would compile the package anew
        "PYTHONUNBUFFERED": None,  # it tears the lines of several processes on one pipe apart
    }
    return environment_of(0, {**ours, **env, MARK: mark})


def _path_of(path_or_source: str | Path, directory: Path) -> Path:
    """Return the script's path; a source is written to ``directory``."""
    if isinstance(path_or_source, Path) or "\n" not in path_or_source:
        return Path(path_or_source).resolve()
    path = directory / "script.py"
    path.write_text(textwrap.dedent(path_or_source).lstrip())
    return path
