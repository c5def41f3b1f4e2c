"""Run a function on several real rank processes; tests/README.md has an example.

``function(rank, world_size, *args, **kwargs)`` is called on every rank; function,
arguments and results are pickled. Ranks get a copy of the test's environment, changed
by ``env``. They are forked from a server that has imported torch, Lightning and this
package, so a variable that these read on import needs a test with ``scripts``.

Everything here runs in the process of the tests; ``tests.harness.rank_process`` is what
runs in a rank, among it ``announce`` and ``hold``.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

from tests.harness.environment import Environment, Host, by_hand_env, environment_of, free_port
from tests.harness.rank_process import (
    ERROR,
    RESULT,
    RankError,
    announce,
    hold,
    run_rank,
)

__all__ = [
    "HOST",
    "Environment",
    "Outcome",
    "RankProcesses",
    "announce",
    "by_hand_env",
    "error_of",
    "free_port",
    "hold",
    "launch_ranks",
    "measured_coverage",
    "message_of",
    "output_of_all",
    "rank_name",
    "run_ranks",
    "start_server",
    "stories",
]

HOST = os.uname().nodename
_ROOT = Path(__file__).resolve().parents[2]
_CONTEXT = multiprocessing.get_context("forkserver")
_SECONDS_TO_POINT = 120.0  # or to an output
_SECONDS_TO_EXIT = 60.0  # for a rank that was told to write its stacks, or was killed
_PIPE_SIZE = 1 << 20  # bytes that a rank can write while its test does not read


def run_ranks(
    function: Callable[..., Any], world_size: int = 2, *args: Any, **options: Any
) -> list[Any]:
    """Run ``function`` on ``world_size`` ranks and return its results by rank.

    If ranks raise, are killed or exit before the function returns, the test fails with
    their stories: first that of the one that failed first, whose exception is the error's
    cause. The options are those of ``RankProcesses``.
    """
    outcomes = launch_ranks(function, world_size, *args, **options)
    if any(outcome.is_killed or not outcome.has_returned for outcome in outcomes):
        first, *others = sorted(outcomes, key=lambda outcome: outcome.failed_at)
        cause = first.error.exception if first.error else None
        raise AssertionError(stories([first, *others])) from cause
    return [outcome.result for outcome in outcomes]


def launch_ranks(
    function: Callable[..., Any], world_size: int = 2, *args: Any, **options: Any
) -> list[Outcome]:
    """Run ``function`` on ``world_size`` ranks and return, by rank, how each of them
    ended by itself.

    Fail at the time limit: a rank that does not exit fails every test. The options are
    those of ``RankProcesses``.
    """
    with RankProcesses(function, world_size, *args, **options) as ranks:
        return ranks.wait()


@dataclass
class Outcome:
    """How a rank ended.

    Attributes:
        rank: its number.
        pid: its process.
        exit_code: negative for a signal; None while the rank runs.
        has_returned: whether the function returned; never for a rank that became a
            command.
        result: the function's; None unless the function returned.
        error: the exception that escaped from the function, if any.
        output: what the rank wrote to stdout and stderr, in order. If the rank was
            ended at the time limit, this includes the Python stacks of its threads.
    """

    rank: int
    pid: int
    exit_code: int | None = None
    has_returned: bool = False
    result: Any = None
    error: RankError | None = None
    output: str = ""

    @property
    def failure(self) -> RankError:
        """The exception that escaped; fails the test without one."""
        assert self.error is not None, self.story()
        return self.error

    @property
    def is_killed(self) -> bool:
        return self.exit_code is not None and self.exit_code < 0

    @property
    def failed_at(self) -> float:
        """The time of the failure, to find the first one. A kill counts as the earliest,
        because no other failure causes it, and an exit without an error as the latest.
        """
        if self.error is not None:
            return self.error.at
        return 0.0 if self.is_killed else math.inf

    def story(self) -> str:
        """Return a text for a failing test: one line about the end, the traceback unless
        it was printed, and the output.
        """
        parts = [f"rank {self.rank} (pid {self.pid}): {self._end()}"]
        if self.error and self.error.traceback not in self.output:
            parts.append(self.error.traceback)
        parts.append(f"--- output of rank {self.rank} ---\n{self.output.rstrip() or '(nothing)'}")
        return "\n".join(parts)

    def _end(self) -> str:
        if self.exit_code is None:
            return "still running"
        if self.error is not None:
            return f"{self.error.type_name}: {self.error.message}, {_in_words(self.exit_code)}"
        early = "" if self.has_returned else " before the function returned"
        return f"{_in_words(self.exit_code)}{early}"


def _in_words(exit_code: int) -> str:
    return (
        f"ended by {signal.Signals(-exit_code).name}"
        if exit_code < 0
        else f"exit status {exit_code}"
    )


def stories(outcomes: Sequence[Outcome]) -> str:
    """Return the stories of these ranks, one after another."""
    return "\n\n".join(outcome.story() for outcome in outcomes)


def message_of(outcome: Outcome, kind: type[BaseException]) -> str:
    """Return the message of a rank that exited with this error and status 1."""
    assert (outcome.failure.type_name, outcome.exit_code) == (kind.__name__, 1), outcome.story()
    return outcome.failure.message


def error_of(survivor: Outcome, kind: type[Any], culprit: int, pid: int) -> Any:
    """Return the error of a rank that exited with status 1; fail unless it is of this kind
    and names the culprit.
    """
    error: Any = survivor.failure.exception
    assert type(error) is kind, survivor.story()
    assert (error.rank, error.host, error.pid, survivor.exit_code) == (culprit, HOST, pid, 1)
    return error


def rank_name(rank: int, pid: int, host: str = HOST) -> str:
    """Return the name of a rank in messages of the package."""
    return f"rank {rank} (host {host}, pid {pid})"


def output_of_all(outcomes: Sequence[Outcome], *, exit_code: int = 0) -> str:
    """Return the output of all ranks, rank by rank; fail unless each exited with that
    status.
    """
    assert all(outcome.exit_code == exit_code for outcome in outcomes), stories(outcomes)
    return "".join(outcome.output for outcome in outcomes)


class RankProcesses:
    """Rank processes under control, for tests of faults; the context manager ends those
    that still run.

    Args:
        function: called as ``function(rank, world_size, *args, **kwargs)`` on each
            rank.
        world_size: number of ranks.
        time_limit: seconds within which all must exit.
        env: changes to the environment, see ``Environment``; by default several ranks
            have the variables of ranks that a user starts by hand, and a single process
            has none.
        namespaces: for each rank a host of ``network``, or None for this machine.
        kwargs: arguments of the function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        world_size: int = 2,
        *args: Any,
        time_limit: float = 240.0,
        env: Environment | None = None,
        namespaces: Sequence[Host | None] | None = None,
        **kwargs: Any,
    ) -> None:
        self._world_size = world_size
        self._time_limit = time_limit
        self._call = pickle.dumps((function, args, kwargs))
        if env is None:
            env = by_hand_env(world_size) if world_size > 1 else {}
        self._env = env
        self._hosts = namespaces or [None] * world_size
        self._ranks: list[_Rank] = []

    def __enter__(self) -> RankProcesses:
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        start_server()
        for number in range(self._world_size):
            output = Path(self._directory.name, f"{number}.output")
            be_rank = partial(
                run_rank,
                rank=number,
                world_size=self._world_size,
                call=self._call,
                host=self._hosts[number],
                environment=environment_of(number, {**_for_children(), **self._env}),
                cwd=os.getcwd(),
                output=output,
                time_limit=self._time_limit,
            )
            self._ranks.append(_Rank(number, output, be_rank))
        self._deadline = time.monotonic() + self._time_limit
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_all()
        for rank in self._ranks:
            rank.close()
        self._directory.cleanup()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the ranks, including those that exited."""
        return {number: rank.outcome.pid for number, rank in enumerate(self._ranks)}

    def kill(self, rank: int, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to the rank's process, not to its children; fail if the rank has
        exited.
        """
        self._receive(0.0)
        outcome = self._ranks[rank].outcome
        assert outcome.exit_code is None, f"it has already exited:\n{outcome.story()}"
        os.kill(outcome.pid, signal_number)

    def release(self, *ranks: int) -> None:
        """Release these ranks from ``hold``, now or when they arrive there."""
        for rank in ranks:
            self._ranks[rank].pipe.send_bytes(b"")

    def wait_for(self, point: str, rank: int) -> Any:
        """Wait until the rank announces ``point``, and return the announced value.

        An announcement counts once. Fail if the rank exits first, or after two minutes.
        """
        values = self._ranks[rank].points[point]
        self._wait_until(lambda: bool(values), f"announce {point!r}", rank)
        return values.pop(0)

    def wait_for_all(self, point: str, *ranks: int) -> None:
        """Wait until each of these ranks, by default all, announces ``point``."""
        for rank in ranks or self.pids:
            self.wait_for(point, rank)

    def wait_for_output(self, text: str, rank: int) -> str:
        """Wait until the rank has written ``text``, and return all that it has written;
        errors as for ``wait_for``.
        """
        outcome = self._ranks[rank].outcome
        self._wait_until(lambda: text in outcome.output, f"write {text!r}", rank)
        return outcome.output

    def wait(self, *ranks: int) -> list[Outcome]:
        """Wait until these ranks, by default all, exit; return how they ended, in that
        order.
        """
        awaited = [self._ranks[rank] for rank in ranks] or self._ranks
        seconds = self._deadline - time.monotonic()
        self._receive_while(lambda: any(rank.runs for rank in awaited), seconds)
        if any(rank.runs for rank in awaited):
            raise AssertionError(
                f"ranks still ran after {self._time_limit} s\n\n{self._end_with_stacks()}"
            )
        return [rank.outcome for rank in awaited]

    def _running(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.runs]

    def _wait_until(self, condition: Callable[[], bool], action: str, number: int) -> None:
        rank = self._ranks[number]
        self._receive_while(lambda: rank.runs and not condition(), _SECONDS_TO_POINT)
        limit = f"in {_SECONDS_TO_POINT} s" if rank.runs else "before its exit"
        assert condition(), f"rank {number} did not {action} {limit}:\n{rank.outcome.story()}"

    def _receive_while(self, condition: Callable[[], object], seconds: float) -> None:
        """Receive from the ranks while the condition holds, at most for these seconds."""
        deadline = time.monotonic() + seconds
        while condition() and time.monotonic() < deadline:
            self._receive(max(0.0, deadline - time.monotonic()))

    def _receive(self, seconds: float) -> None:
        """Wait up to this time until ranks send something or end; receive that, and
        their output.
        """
        running = self._running()
        sources: list[Any] = []
        for rank in running:
            sources += [rank.process.sentinel, rank.pipe, rank.output]
        ready = connection.wait(sources, seconds)
        for rank in running:
            rank.receive(has_exited=rank.process.sentinel in ready)

    def _end_with_stacks(self) -> str:
        """End the ranks that still run, and return the stories of all."""
        for rank in self._running():
            rank.end_with_stacks()
        self._receive_while(self._running, _SECONDS_TO_EXIT)
        self._kill_all()
        return stories([rank.outcome for rank in self._ranks])

    def _kill_all(self) -> None:
        for rank in self._running():
            rank.signal_group(signal.SIGKILL)
        self._receive_while(self._running, _SECONDS_TO_EXIT)
        assert not self._running(), "SIGKILL did not end a rank"


class _Rank:
    """One rank process, seen from the test.

    Attributes:
        outcome: how the rank ended, or its output so far.
        points: the values of announcements that no test has waited for, by point.
        output: a pipe with what the rank writes.
        pipe: a connection to the rank.
    """

    def __init__(self, number: int, output: Path, be_rank: Callable[..., None]) -> None:
        """Start the process, which calls ``be_rank`` with its end of the pipe."""
        os.mkfifo(output)
        self.output = os.open(output, os.O_RDONLY | os.O_NONBLOCK)
        with contextlib.suppress(PermissionError):
            # Users other than root have a limit for all of their pipes.
            fcntl.fcntl(self.output, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        self._written = b""
        self.pipe, pipe_to_test = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=be_rank, args=(pipe_to_test,))
        with pipe_to_test:
            self.process.start()  # waits for the server to have imported what ranks need
        assert self.process.pid is not None
        self.outcome = Outcome(number, self.process.pid)
        self.points: dict[str, list[Any]] = defaultdict(list)

    @property
    def runs(self) -> bool:
        return self.outcome.exit_code is None

    def receive(self, *, has_exited: bool) -> None:
        """Read the rank's messages and output; those of a rank that exited are
        complete.
        """
        with contextlib.suppress(EOFError, ConnectionResetError):
            while self.pipe.poll():
                point, value = pickle.loads(self.pipe.recv_bytes())
                self.points[point].append(value)
        with contextlib.suppress(BlockingIOError):
            while written := os.read(self.output, _PIPE_SIZE):
                self._written += written
        self.outcome.output = self._written.decode(errors="replace")
        if has_exited:
            self.process.join()
            self.outcome.exit_code = self.process.exitcode
            self.outcome.has_returned = RESULT in self.points
            self.outcome.result = next(iter(self.points[RESULT]), None)
            self.outcome.error = next(iter(self.points[ERROR]), None)

    def end_with_stacks(self) -> None:
        """Have the rank and the processes that it started write their stacks and exit."""
        self.signal_group(signal.SIGABRT)
        self.signal_group(signal.SIGCONT)  # a stopped rank does not handle other signals

    def signal_group(self, number: int) -> None:
        """Send a signal to the rank and the processes that it forked."""
        try:
            os.killpg(self.outcome.pid, number)
        except ProcessLookupError:  # it does not lead its group yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.outcome.pid, number)

    def close(self) -> None:
        os.close(self.output)
        self.pipe.close()
        self.process.close()


# The server that forks the ranks.


def start_server() -> None:
    """Start the server that forks ranks, unless it runs; it imports in the background.

    If coverage is measured, the server does not import the package: measuring begins
    with the rank, and would miss the lines that an import runs.
    """
    package = [] if measured_coverage() else ["lightning_ddp_ext"]
    _CONTEXT.set_forkserver_preload(["tests.harness.preload", *package])
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_PROCESS")
    }
    # Threads for computing must not exist in a process that forks.
    environment["OMP_NUM_THREADS"] = "1"
    environment |= _for_children()
    with mock.patch.dict(os.environ, environment, clear=True):
        forkserver.ensure_running()


def _for_children() -> dict[str, str]:
    """Return variables with which any process that a rank starts finds the package and its
    tests, and prints its stacks if it crashes.
    """
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"}


def measured_coverage() -> Any:
    """Return the ``coverage.Coverage`` that measures this process, or None."""
    coverage = sys.modules.get("coverage")
    return coverage.Coverage.current() if coverage else None
