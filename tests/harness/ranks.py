"""Run a function on several real rank processes.

::

    def all_reduce(rank: int, world_size: int, directory: Path) -> float: ...   # at module level: ranks import it

    def test_all_reduce(tmp_path: Path) -> None:
        assert run_ranks(all_reduce, 2, tmp_path) == [3.0, 3.0]

``run_ranks`` returns results by rank; a rank that fails fails the test. ``launch_ranks`` returns how each rank ended.
``RankProcesses`` is for faults: start ranks one by one, wait until one is "in step 3", kill it, see what the others do.

Each calls ``function(rank, world_size, *args, **kwargs)`` on every rank; function, arguments and results travel by
pickle. Ranks that have not ended at the time limit fail the test with their Python stacks.

Ranks get a copy of the test's environment, changed by ``env``. But they are forked from a server that has imported
torch, Lightning and this package: what these read from the environment on import is tested with ``scripts``.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests.harness.environment import Environment, by_hand_env, environment_of, free_port
from tests.harness.outcomes import Outcome, RanksFailed, RanksHung
from tests.harness.rank_process import STACKS_SIGNAL, Place, RankError, RankStart, announce, hold, import_package_anew
from tests.harness.rank_server import Rank, start_server

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
]

_SECONDS_TO_END = 5.0  # for a rank that was told to write its stacks, or was killed


def run_ranks(
    function: Callable[..., Any],
    world_size: int = 2,
    *args: Any,
    time_limit: float = 30.0,
    env: Environment | None = None,
    namespaces: Sequence[Place | None] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run ``function`` on ``world_size`` ranks and return its results by rank.

    When a rank fails, the others are ended, and the test fails with ``RanksFailed``. The arguments are those of
    ``RankProcesses``.
    """
    settings: dict[str, Any] = {"time_limit": time_limit, "env": env, "namespaces": namespaces}
    with RankProcesses(function, world_size, *args, **settings, **kwargs) as ranks:
        first = ranks.wait_for_failure()
        outcomes = ranks.wait()
    if first is not None:
        failed = outcomes[first]
        raise RanksFailed(failed, outcomes) from (failed.error.exception if failed.error else None)
    return [outcome.result for outcome in outcomes]


def launch_ranks(
    function: Callable[..., Any],
    world_size: int = 2,
    *args: Any,
    time_limit: float = 30.0,
    env: Environment | None = None,
    namespaces: Sequence[Place | None] | None = None,
    **kwargs: Any,
) -> list[Outcome]:
    """Run ``function`` on ``world_size`` ranks and return, by rank, how each of them ended by itself.

    Raises ``RanksHung`` at the time limit: a rank that stays fails every test. The arguments are those of
    ``RankProcesses``.
    """
    settings: dict[str, Any] = {"time_limit": time_limit, "env": env, "namespaces": namespaces}
    with RankProcesses(function, world_size, *args, **settings, **kwargs) as ranks:
        return ranks.wait()


class RankProcesses:
    """Rank processes under control, for tests of faults; a context manager that ends what is left of them.

    Args:
        function: called as ``function(rank, world_size, *args, **kwargs)`` on each rank.
        world_size: number of ranks.
        time_limit: seconds from the first rank's start within which all must have ended.
        env: changes to the environment, see ``Environment``; nothing such as ``RANK`` is set by itself.
        namespaces: one place per rank (a host of ``network``), or None for the test's own.
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
        start: Iterable[int] | None = None,
        **kwargs: Any,
    ) -> None:
        self.world_size = world_size
        self.time_limit = time_limit
        self._call = pickle.dumps((function, args, kwargs))
        self._env = dict(env or {})
        self._places = [pickle.dumps(place) for place in namespaces or [None] * world_size]
        self._start_on_entry = range(world_size) if start is None else list(start)
        self._ranks: dict[int, Rank] = {}
        self._deadline = 0.0

    def __enter__(self) -> RankProcesses:
        self._directory = tempfile.mkdtemp(prefix="ranks-")
        start_server()
        try:
            for rank in self._start_on_entry:
                self.start(rank)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_all()
        for rank in self._ranks.values():
            rank.close()
        shutil.rmtree(self._directory)

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the ranks started so far, also of ended ones."""
        return {number: rank.pid for number, rank in self._ranks.items()}

    def start(self, rank: int) -> None:
        """Start one more rank."""
        assert rank not in self._ranks, f"rank {rank} has been started already"
        files = f"{self._directory}/{rank}"
        self._ranks[rank] = Rank(
            RankStart(
                rank=rank,
                world_size=self.world_size,
                call=self._call,
                place=self._places[rank],
                environment=environment_of(rank, self._env),
                cwd=str(Path.cwd()),
                output_file=f"{files}.output",
                stacks_file=f"{files}.stacks",
                time_limit=self.time_limit,
            )
        )
        self._deadline = self._deadline or time.monotonic() + self.time_limit

    def kill(self, rank: int, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to the rank's process, not to what it has started; an error if it has ended."""
        self._receive(0.0)
        process = self._ranks[rank]
        assert process.exit_code is None, f"it has ended already:\n{process.outcome().story()}"
        os.kill(process.pid, signal_number)

    def release(self, rank: int) -> None:
        """Let the rank go on that is, or will be, in ``hold``."""
        self._ranks[rank].pipe.send_bytes(b"")

    def output(self, rank: int) -> str:
        """What the rank has written to stdout and stderr so far."""
        return self._ranks[rank].output()

    def wait_for(self, point: str, rank: int, timeout: float = 20.0) -> Any:
        """Wait until the rank announces ``point``, and return the value that came with it; an announcement counts once.

        An error if the rank ends before, at once, or if ``timeout`` seconds have passed.
        """
        points = self._ranks[rank].points
        self._wait_until(lambda: any(name == point for name, _ in points), f"announce {point!r}", rank, timeout)
        found = next(each for each in points if each[0] == point)
        points.remove(found)
        return found[1]

    def wait_for_output(self, text: str, rank: int, timeout: float = 20.0) -> None:
        """Wait until the rank has written ``text``; errors as for ``wait_for``."""
        self._wait_until(lambda: text in self.output(rank), f"write {text!r}", rank, timeout, look_every=0.05)

    def wait(self, *ranks: int) -> list[Outcome]:
        """Wait for the end of these ranks (none named: of all started ones); return how they ended, in that order."""
        awaited = [self._ranks[rank] for rank in ranks or sorted(self._ranks)]
        while any(rank.exit_code is None for rank in awaited):
            if time.monotonic() >= self._deadline:
                raise RanksHung(self.time_limit, self._end_with_stacks())
            self._receive(self._deadline)
        return [rank.outcome() for rank in awaited]

    def wait_for_failure(self) -> int | None:
        """Wait until a rank fails, end all, and return which was the first; None if all end well or time is up."""
        while not (failed := [rank for rank in self._ranks.values() if rank.has_failed()]):
            if not self._running() or time.monotonic() >= self._deadline:
                return None
            self._receive(self._deadline)
        for rank in failed:  # has raised, and has exit handlers to run
            self._receive_while(lambda rank=rank: rank.exit_code is None, _SECONDS_TO_END)  # type: ignore[misc]
        self._kill_all()
        return min(failed, key=Rank.failed_at).number

    def _wait_until(
        self, condition: Callable[[], bool], what: str, rank: int, timeout: float, look_every: float | None = None
    ) -> None:
        process, deadline = self._ranks[rank], time.monotonic() + timeout
        while not condition():
            assert process.exit_code is None, f"rank {rank} did not {what} before its end:\n{process.outcome().story()}"
            assert time.monotonic() < deadline, f"rank {rank} did not {what} in {timeout} s:\n{process.output()}"
            self._receive(deadline if look_every is None else time.monotonic() + look_every)

    def _running(self) -> list[Rank]:
        return [rank for rank in self._ranks.values() if rank.exit_code is None]

    def _receive(self, deadline: float) -> None:
        """Wait until ranks send something or end, or until ``deadline`` (0: not at all), and take it in."""
        running = self._running()
        sources = [source for rank in running for source in rank.sources()]
        ready = connection.wait(sources, timeout=max(0.0, deadline - time.monotonic()))
        for rank in running:
            rank.receive(has_ended=rank.process.sentinel in ready)

    def _receive_while(self, condition: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while condition() and time.monotonic() < deadline:
            self._receive(deadline)

    def _end_with_stacks(self) -> list[Outcome]:
        for rank in self._running():
            rank.signal(STACKS_SIGNAL)
            rank.signal(signal.SIGCONT)  # a stopped rank would never hear of it
        self._receive_while(self._running, _SECONDS_TO_END)
        self._kill_all()
        return [rank.outcome() for _, rank in sorted(self._ranks.items())]

    def _kill_all(self) -> None:
        for rank in self._running():
            rank.kill_group()
        self._receive_while(self._running, _SECONDS_TO_END)
        assert not self._running(), "SIGKILL did not end a rank"
