"""Runs a function on several real rank processes: the harness of every test that needs more than one rank.

::

    def all_reduce(rank: int, world_size: int, directory: Path) -> float: ...   # at module level: ranks import it

    def test_all_reduce(tmp_path: Path) -> None:
        assert run_ranks(all_reduce, 2, tmp_path) == [3.0, 3.0]

=================  =====================================================================================================
``run_ranks``      results by rank; the first rank that fails is what the test reports, and the others are ended
``launch_ranks``   how each rank ended (exit status, exception, output), whatever it is; nobody is ended early
``RankProcesses``  for faults: start ranks one by one, wait until one is "in step 3", kill it, see what the others do
=================  =====================================================================================================

Each calls ``function(rank, world_size, *args, **kwargs)`` on every rank; function, arguments and results travel by
pickle. A rank that has not ended at the time limit fails the test with the Python stacks of every rank that was still
there.

Ranks get a copy of the test's environment, changed by ``env``. But they are forked from a server that has imported
torch, Lightning and this package, so what these read from the environment *on import* is the server's: test that with
``tests.harness.scripts`` or ``import_package_anew``. Ranks compute on one thread each, and what they start through
``sys.argv[0]`` fails, because a rank is no script.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.harness.outcomes import Outcome, RankError, RanksFailed, RanksHung
from tests.harness.rank_process import STACKS_SIGNAL, Place, Seat, announce, hold, import_package_anew
from tests.harness.rank_run import RankRun, start_server

__all__ = [
    "Environment",
    "Outcome",
    "RankError",
    "RankProcesses",
    "RanksFailed",
    "RanksHung",
    "announce",
    "by_hand_env",
    "environment_of",
    "free_port",
    "hold",
    "import_package_anew",
    "launch_ranks",
    "run_ranks",
    "start_server",
]

# Variables for ranks: a value for all, a function of the rank, or None for a variable that must not be there.
Environment = Mapping[str, "str | Callable[[int], str | None] | None"]

_SECONDS_TO_DUMP_STACKS = 5.0
_SECONDS_TO_FALL = 5.0  # from a rank's exception to its end


def run_ranks(
    function: Callable[..., Any],
    world_size: int = 2,
    *args: Any,
    time_limit: float = 30.0,
    env: Environment | None = None,
    namespaces: Sequence[Place | None] | None = None,
    cwd: str | Path | None = None,
    expect_exit: int | Mapping[int, int] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run ``function`` on ``world_size`` ranks and return its results by rank.

    ``expect_exit`` is the exit status that every rank must have, or a mapping of ranks to theirs (others: 0). The other
    arguments are those of ``RankProcesses``. A rank that ends otherwise raises ``RanksFailed`` after the others have
    been ended; of several, the first one. At the time limit it is ``RanksHung``.
    """
    expected = _expected_statuses(expect_exit, world_size)
    settings: dict[str, Any] = {"time_limit": time_limit, "env": env, "namespaces": namespaces, "cwd": cwd}
    with RankProcesses(function, world_size, *args, **settings, **kwargs) as ranks:
        failed = ranks.wait_for_failure(expected)
        outcomes = ranks.wait()
    if failed is not None:
        first = outcomes[failed]
        raise RanksFailed(first, outcomes) from (first.error.exception if first.error else None)
    return [outcome.result for outcome in outcomes]


def launch_ranks(
    function: Callable[..., Any],
    world_size: int = 2,
    *args: Any,
    time_limit: float = 30.0,
    env: Environment | None = None,
    namespaces: Sequence[Place | None] | None = None,
    cwd: str | Path | None = None,
    **kwargs: Any,
) -> list[Outcome]:
    """Run ``function`` on ``world_size`` ranks and return, by rank, how each of them ended by itself.

    Raises ``RanksHung`` at the time limit: a rank that stays fails every test. The other arguments are those of
    ``RankProcesses``.
    """
    settings: dict[str, Any] = {"time_limit": time_limit, "env": env, "namespaces": namespaces, "cwd": cwd}
    with RankProcesses(function, world_size, *args, **settings, **kwargs) as ranks:
        return ranks.wait()


class RankProcesses:
    """Rank processes under control, for tests of faults; a context manager that ends what is left of them.

    Args:
        function: called as ``function(rank, world_size, *args, **kwargs)`` on each rank.
        world_size: number of ranks.
        time_limit: seconds from the first rank's start within which all must have ended.
        env: changes to the environment, see ``Environment``; nothing such as ``RANK`` is set by itself.
        namespaces: one place per rank (a host of ``tests.harness.network``), or None for the test's own.
        cwd: the working directory; None: the test's own.
        start: the ranks to start on entry (None: all); the others wait for a call of the method.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        world_size: int = 2,
        *args: Any,
        time_limit: float = 30.0,
        env: Environment | None = None,
        namespaces: Sequence[Place | None] | None = None,
        cwd: str | Path | None = None,
        start: Iterable[int] | None = None,
        **kwargs: Any,
    ) -> None:
        if namespaces is not None and len(namespaces) != world_size:
            raise ValueError(f"namespaces needs one entry per rank, {world_size} (got {len(namespaces)})")
        self.world_size = world_size
        self.time_limit = time_limit
        self._call = pickle.dumps((function, args, kwargs))
        self._env = dict(env or {})
        self._places = [pickle.dumps(place) for place in namespaces or [None] * world_size]
        self._cwd = str(cwd or Path.cwd())
        self._start_on_entry = range(world_size) if start is None else list(start)
        self._runs: dict[int, RankRun] = {}
        self._began = 0.0

    def __enter__(self) -> RankProcesses:
        self._directory = tempfile.mkdtemp(prefix="ranks-")
        start_server()
        try:
            for rank in self._start_on_entry:
                self.start(rank)
        except BaseException:
            self._clear()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the ranks started so far, also of ended ones."""
        return {rank: run.pid for rank, run in self._runs.items()}

    def start(self, rank: int) -> None:
        """Start one more rank."""
        if rank in self._runs:
            raise ValueError(f"rank {rank} has been started already")
        self._runs[rank] = RankRun.start(self._seat(rank))
        self._began = self._began or time.monotonic()

    def kill(self, rank: int, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to the rank's process, not to what it has started; an error if it has ended."""
        self._pump(0.0)
        run = self._runs[rank]
        if run.exit_code is not None:
            raise AssertionError(f"nobody to signal:\n{run.outcome(self._began).story()}")
        os.kill(run.pid, signal_number)

    def release(self, rank: int) -> None:
        """Let the rank go on that is, or will be, in ``hold``."""
        self._runs[rank].inbox.send_bytes(b"")

    def output(self, rank: int) -> str:
        """What the rank has written to stdout and stderr so far."""
        return self._runs[rank].output()

    def wait_for(self, point: str, rank: int, timeout: float = 20.0) -> Any:
        """Wait until the rank announces ``point``, and return the value that came with it; an announcement counts once.

        An error if the rank ends before, at once, or if ``timeout`` seconds have passed.
        """
        run = self._runs[rank]
        deadline = time.monotonic() + timeout
        while (found := run.take_point(point)) is None:
            if run.exit_code is not None:
                raise AssertionError(f"no {point!r} before the end:\n{run.outcome(self._began).story()}")
            if time.monotonic() >= deadline:
                raise AssertionError(f"rank {rank} did not announce {point!r} in {timeout} s:\n{run.output()}")
            self._pump(deadline)
        return found.value

    def wait_for_output(self, text: str, rank: int, timeout: float = 20.0) -> None:
        """Wait until the rank has written ``text``; errors as for ``wait_for``."""
        run = self._runs[rank]
        deadline = time.monotonic() + timeout
        while text not in run.output():
            if run.exit_code is not None:
                raise AssertionError(f"no {text!r} before the end:\n{run.outcome(self._began).story()}")
            if time.monotonic() >= deadline:
                raise AssertionError(f"rank {rank} did not write {text!r} in {timeout} s:\n{run.output()}")
            self._pump(time.monotonic() + 0.05)

    def wait(self, *ranks: int) -> list[Outcome]:
        """Wait for the end of these ranks (none named: of all started ones); return how they ended, in that order."""
        runs = [self._runs[rank] for rank in ranks or sorted(self._runs)]
        deadline = self._began + self.time_limit
        while any(run.exit_code is None for run in runs):
            if time.monotonic() >= deadline:
                raise RanksHung(self.time_limit, self._end_with_stacks())
            self._pump(deadline)
        return [run.outcome(self._began) for run in runs]

    def wait_for_failure(self, expected: Mapping[int, int]) -> int | None:
        """Wait until a rank ends otherwise than expected, end all, and return the first such one; None if none does."""
        deadline = self._began + self.time_limit
        while not self._failed(expected):
            if not self._running() or time.monotonic() >= deadline:
                return None
            self._pump(deadline)
        self._pump_while(lambda: any(run.exit_code is None for run in self._failed(expected)), _SECONDS_TO_FALL)
        first = min(self._failed(expected), key=RankRun.order_of_failure)
        self._end()
        return first.rank

    def _seat(self, rank: int) -> Seat:
        return Seat(
            rank=rank,
            world_size=self.world_size,
            call=self._call,
            place=self._places[rank],
            environment=environment_of(rank, self._env),
            cwd=self._cwd,
            output_file=f"{self._directory}/{rank}.output",
            stacks_file=f"{self._directory}/{rank}.stacks",
            time_limit=self.time_limit,
        )

    def _running(self) -> list[RankRun]:
        return [run for run in self._runs.values() if run.exit_code is None]

    def _failed(self, expected: Mapping[int, int]) -> list[RankRun]:
        return [run for run in self._runs.values() if run.has_failed(expected[run.rank])]

    def _pump(self, deadline: float) -> None:
        """Take in what ranks have sent and who has ended, waiting for news until ``deadline`` (0: not at all)."""
        running = self._running()
        sources = [source for run in running for source in run.sources]
        ready = multiprocessing.connection.wait(sources, timeout=max(0.0, deadline - time.monotonic()))
        for run in running:
            run.take_in(has_ended=run.process.sentinel in ready)

    def _pump_while(self, condition: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while condition() and time.monotonic() < deadline:
            self._pump(deadline)

    def _end_with_stacks(self) -> list[Outcome]:
        running = self._running()
        for run in running:
            run.signal(STACKS_SIGNAL)
            run.signal(signal.SIGCONT)  # a stopped rank would never hear of it
        self._pump_while(self._running, _SECONDS_TO_DUMP_STACKS)
        self._end()
        return [run.outcome(self._began, with_stacks=run in running) for _, run in sorted(self._runs.items())]

    def _end(self) -> None:
        for run in self._running():
            run.kill_group()
        self._pump_while(self._running, _SECONDS_TO_FALL)
        assert not self._running(), "SIGKILL did not end a rank"

    def _clear(self) -> None:
        self._end()
        for run in self._runs.values():
            run.close()
        shutil.rmtree(self._directory)


def environment_of(rank: int, env: Environment) -> dict[str, str]:
    """This process's environment, changed by ``env`` as it is for that rank."""
    changes = {name: value(rank) if callable(value) else value for name, value in env.items()}
    merged: dict[str, str | None] = {**os.environ, "PYTEST_CURRENT_TEST": None, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def by_hand_env(world_size: int, port: int | None = None, host: str = "127.0.0.1") -> dict[str, Callable[[int], str]]:
    """Variables of ranks that a user starts one by one on one machine; with a port also where they meet."""
    variables: dict[str, Callable[[int], str]] = {
        "RANK": str,
        "WORLD_SIZE": lambda _: str(world_size),
        "LOCAL_RANK": str,
    }
    if port is not None:
        variables |= {"MASTER_ADDR": lambda _: host, "MASTER_PORT": lambda _: str(port)}
    return variables


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago: a race, for tests that must name a port and nothing else."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
        return port


def _expected_statuses(expect_exit: int | Mapping[int, int] | None, world_size: int) -> dict[int, int]:
    if isinstance(expect_exit, Mapping):
        return {rank: expect_exit.get(rank, 0) for rank in range(world_size)}
    return dict.fromkeys(range(world_size), expect_exit or 0)
