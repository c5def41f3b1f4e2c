r"""Run a script as a user would, in processes of its own.

::

    done = run_script(source, launcher=("torchrun", "--nproc-per-node=2"))     # to its end
    assert done.returncode == 0 and "epoch 3" in done.stdout

    with start_script(source) as script:                                       # for faults
        script.wait_for_line("in step 3")
        script.kill(rank=1)
        assert script.wait().returncode == 1

Nothing of a script outlives its test. A script that tests wait for writes whole lines,
``sys.stdout.write("in step 3\n")``, and flushes them: torchrun starts Python with ``-u``, where ``print`` writes a text
and its line break one by one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from tests.harness.environment import Environment, environment_of
from tests.harness.processes import MARK, kill_until_gone, marked, name_of, wait_until_gone

_ROOT = Path(__file__).resolve().parents[2]
_COMMANDS: dict[str, tuple[str, ...]] = {
    "python": (sys.executable,),
    "torchrun": (sys.executable, "-m", "torch.distributed.run"),
}
# Ranks that /proc does not tell apart (spawn, fork, forkserver) print such a line, flushed.
_RANK_LINE = re.compile(r"^harness: rank (\d+) is process (\d+)$")
_SECONDS_TO_END = 5.0
_numbers = itertools.count()


@dataclass(frozen=True)
class Completed:
    """How a script ended; ``output`` is stdout and stderr as they came."""

    returncode: int
    stdout: str
    stderr: str
    output: str


class ScriptFailed(AssertionError):
    """A script did not do what was waited for; the message ends with its output."""

    def __init__(self, what: str, output: str) -> None:
        super().__init__(f"{what}\n--- output of the script ---\n{output.rstrip() or '(nothing)'}")


class ScriptHung(ScriptFailed):
    """A script had not ended at its time limit; the output has the Python stacks of each of its processes."""


def run_script(
    path_or_source: str | Path,
    *argv: str,
    env: Environment | None = None,
    launcher: Sequence[str] = ("python",),
    time_limit: float = 60.0,
    cwd: str | Path | None = None,
) -> Completed:
    """Run a script to its end; the arguments are those of ``start_script``.

    Raises ``ScriptHung`` at the time limit, and ``ScriptFailed`` if one of its processes survives it.
    """
    with start_script(path_or_source, *argv, env=env, launcher=launcher, time_limit=time_limit, cwd=cwd) as script:
        completed = script.wait()
        script.expect_no_survivors()
        return completed


@contextlib.contextmanager
def start_script(
    path_or_source: str | Path,
    *argv: str,
    env: Environment | None = None,
    launcher: Sequence[str] = ("python",),
    time_limit: float = 60.0,
    cwd: str | Path | None = None,
    rank: int = 0,
) -> Iterator[Script]:
    """Start a script; what is left of it at the end of the context is killed.

    Args:
        path_or_source: the script's path, or its text (anything with a line break; indentation in common is taken off).
        argv: arguments of the script.
        env: changes to the environment, as for ranks; functions in it are called with ``rank``.
        launcher: the words before the script; ``python`` and ``torchrun`` are those of this environment. The
            ``prefix`` of a host of ``network`` goes first.
        time_limit: seconds until ``wait`` gives up.
        cwd: the working directory; None: a temporary one.
        rank: for scripts that are started one per rank or node.
    """
    with tempfile.TemporaryDirectory(prefix="script-", ignore_cleanup_errors=True) as temporary:
        directory = Path(cwd or temporary)
        mark = f"{os.environ.get(MARK, os.getpid())}/{os.getpid()}-{next(_numbers)}."
        words = [part for word in launcher for part in _COMMANDS.get(word, (word,))]
        command = [*words, str(_path_of(path_or_source, directory)), *argv]
        script = Script(command, directory, _environment(env or {}, rank, mark), mark, time_limit)
        try:
            yield script
        finally:
            script.close()


class Script:
    """A script that has been started; made by ``start_script``."""

    def __init__(self, command: list[str], cwd: Path, env: dict[str, str], mark: str, time_limit: float) -> None:
        self._mark = mark
        self._began = time.monotonic()
        self._deadline = self._began + time_limit
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._transcript = _Transcript({"stdout": self._process.stdout, "stderr": self._process.stderr})

    @property
    def pid(self) -> int:
        """The process that was started, be it the script or its launcher."""
        return self._process.pid

    @property
    def output(self) -> str:
        """What has been printed so far, stdout and stderr in the order in which lines came."""
        return self._transcript.text()

    def wait_for_line(self, pattern: str, timeout: float = 30.0) -> re.Match[str]:
        """Wait for a line, of stdout or stderr, that contains the pattern; lines that have come already count.

        Raises ``ScriptFailed`` after ``timeout`` seconds, or at once if all of the script's output has come without it.
        """
        found = self._transcript.wait_for(re.compile(pattern), timeout)
        if found is None:
            raise ScriptFailed(f"no line with {pattern!r} within {timeout} s", self.output)
        return found

    def rank_pids(self) -> dict[int, int]:
        """Process ids by rank, as far as they can be told.

        From lines ``harness: rank 1 is process 4242`` that ranks print, else from ``RANK`` or ``LOCAL_RANK`` in the
        environment that a process was started with; rank 0 of a script that starts the others itself is the script.
        """
        printed = {int(m[1]): int(m[2]) for line in self.output.splitlines() if (m := _RANK_LINE.match(line))}
        return {0: self.pid} | _ranks_in_environments(marked(self._mark)) | printed

    def kill(self, rank: int, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to the process of a rank; to the script or launcher itself: ``os.kill(script.pid, …)``."""
        pids = self.rank_pids()
        if rank not in pids:
            raise ScriptFailed(f"no process of rank {rank} among {pids}", self.output)
        os.kill(pids[rank], signal_number)

    def wait(self) -> Completed:
        """Wait for the script's own end.

        Raises ``ScriptHung`` at the time limit, with the stacks of all of its processes, which are ended.
        """
        try:
            self._process.wait(max(self._deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            raise self._end_with_stacks() from None
        self._transcript.wait_for_end()
        text = self._transcript.text
        return Completed(self._process.returncode, text("stdout"), text("stderr"), text())

    def survivors(self, seconds: float = 0.0) -> list[psutil.Process]:
        """Processes of the script that are still there after ``seconds``, or none as soon as none is."""
        return wait_until_gone(lambda: marked(self._mark), seconds)

    def expect_no_survivors(self, seconds: float = _SECONDS_TO_END) -> None:
        """Fail if a process of the script is still there after ``seconds``."""
        left = self.survivors(seconds)
        if left:
            names = "\n".join(name_of(process) for process in left)
            raise ScriptFailed(f"still there {seconds} s after the end of the script:\n{names}", self.output)

    def close(self) -> None:
        """Kill what is left and let go of the pipes."""
        self._process.kill()  # marked() would not see it before it has begun to run the command
        left = kill_until_gone(lambda: marked(self._mark))
        self._process.wait()
        self._transcript.close()
        assert not left, f"SIGKILL did not end {left}"

    def _end_with_stacks(self) -> ScriptHung:
        for process in marked(self._mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGABRT)  # Python writes its stacks (PYTHONFAULTHANDLER) and dies
                process.send_signal(signal.SIGCONT)  # a stopped process would never hear of it
        self.survivors(_SECONDS_TO_END)
        kill_until_gone(lambda: marked(self._mark))
        self._transcript.wait_for_end()
        return ScriptHung(f"the script had not ended after {time.monotonic() - self._began:.1f} s", self.output)


class _Transcript:
    """Lines of several pipes in the order in which they come; a thread reads each pipe."""

    def __init__(self, pipes: dict[str, IO[bytes]]) -> None:
        self._lines: list[tuple[str, str]] = []
        self._changed = threading.Condition()
        self._pipes = pipes
        self._open = set(pipes)
        self._threads = [threading.Thread(target=self._follow, args=(name,), daemon=True) for name in pipes]
        for thread in self._threads:
            thread.start()

    def text(self, name: str | None = None) -> str:
        with self._changed:
            return "".join(line for source, line in self._lines if name in (None, source))

    def wait_for(self, pattern: re.Pattern[str], timeout: float) -> re.Match[str] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._search(pattern) or not self._open, timeout)
            return self._search(pattern)

    def wait_for_end(self) -> None:
        """Wait until all has been read; not for long, as a process that survives may hold a pipe."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open, timeout=2.0)

    def close(self) -> None:
        for thread in self._threads:
            thread.join(timeout=5.0)
        for pipe in self._pipes.values():
            pipe.close()

    def _search(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        return next((found for _, line in self._lines if (found := pattern.search(line))), None)

    def _follow(self, name: str) -> None:
        for line in self._pipes[name]:
            with self._changed:
                self._lines.append((name, line.decode(errors="replace")))
                self._changed.notify_all()
        with self._changed:
            self._open.discard(name)
            self._changed.notify_all()


def _ranks_in_environments(processes: Iterable[psutil.Process]) -> dict[int, int]:
    """The oldest process of each rank: what a rank starts has its environment."""
    ranks: dict[int, int] = {}
    for process in sorted(processes, key=lambda process: (process.create_time(), process.pid)):
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            rank = variables.get("RANK", variables.get("LOCAL_RANK"))
            if rank is not None:
                ranks.setdefault(int(rank), process.pid)
    return ranks


def _environment(env: Environment, rank: int, mark: str) -> dict[str, str]:
    """What a user's shell would have, plus what finds the processes and their stacks."""
    ours: Environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONDONTWRITEBYTECODE": None,  # each process would compile the package anew
        "PYTHONUNBUFFERED": None,  # it tears the lines of several processes on one pipe apart
    }
    return environment_of(rank, {**ours, **env, MARK: mark})


def _path_of(path_or_source: str | Path, directory: Path) -> Path:
    """The script's path; a source is written to ``directory`` under a name of its own, once."""
    if isinstance(path_or_source, Path) or "\n" not in path_or_source:
        return Path(path_or_source).resolve()
    source = textwrap.dedent(path_or_source).lstrip()
    path = directory / f"script_{zlib.crc32(source.encode()):08x}.py"
    if not path.exists():
        path.write_text(source)
    return path
