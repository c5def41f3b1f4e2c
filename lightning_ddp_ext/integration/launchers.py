"""Start the ranks of this node so that they find each other, know who started them, and end with them."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch.multiprocessing
from typing_extensions import override

from lightning_ddp_ext.errors import GroupInUseError, RankDiedError, RankFailedError, WorldError
from lightning_ddp_ext.integration.environment import source_of
from lightning_ddp_ext.integration.lightning_tree import (
    GlobalStateSnapshot,
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    TunerExitException,
    check_missing_main_guard,
    disable_module_memory_sharing,
    lightning_name,
    set_num_threads_if_needed,
)
from lightning_ddp_ext.integration.meeting import Meeting, arrange_meeting, environment_of_started_ranks
from lightning_ddp_ext.rendezvous.process_group import current, leave
from lightning_ddp_ext.rendezvous.store import serve
from lightning_ddp_ext.supervision.failure import supervised
from lightning_ddp_ext.supervision.last_words import print_line
from lightning_ddp_ext.supervision.orphans import watch_launcher

if TYPE_CHECKING:
    from lightning_ddp_ext.integration.strategy import DDPExtStrategy

LAUNCHER_PID = "DDPX_LAUNCHER_PID"

# Seconds that other ranks have to end by themselves after the first one has failed, then they are killed.
_END_WITHIN = 5.0
_NOTICE_AFTER = 10.0


@dataclass
class StartedRanks:
    """The ranks that this process, local rank 0 itself, has started by running its script again."""

    meeting: Meeting
    world_size: int
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def bad_news(self) -> str | None:
        """A sentence on a child that has ended; asked during the roll call, which such a child will never answer."""
        for local_rank, child in enumerate(self.children, start=1):
            status = child.poll()
            if status is not None:
                return (
                    f"local rank {local_rank} (host {socket.gethostname()}, pid {child.pid}) ended {_in_words(status)} "
                    "before it answered the roll call; look at its output"
                )
        return None

    def wait(self) -> None:
        """Wait for the children, as anybody who starts processes does; not for long after a failure."""
        failed = getattr(sys, "last_value", None) is not None
        alive = self._alive_after(_END_WITHIN if failed else _NOTICE_AFTER)
        if alive and not failed:
            sys.stderr.write(f"waiting for {', '.join(alive)} to end as this process has; Ctrl-C ends them\n")
            with suppress(KeyboardInterrupt):
                self._alive_after(float("inf"))
        for child in self.children:
            if child.poll() is None:
                child.kill()

    def _alive_after(self, seconds: float) -> list[str]:
        moment = time.monotonic() + seconds
        for child in self.children:
            remaining = moment - time.monotonic()
            with suppress(subprocess.TimeoutExpired):
                child.wait(None if remaining == float("inf") else max(0.0, remaining))
        return [
            f"local rank {local_rank} (pid {child.pid})"
            for local_rank, child in enumerate(self.children, start=1)
            if child.poll() is None
        ]


_started: StartedRanks | None = None


def started_ranks() -> StartedRanks | None:
    """The ranks that this process has started by running its script again, if it has."""
    return _started


class ScriptLauncher(SubprocessScriptLauncher):
    """Runs the script once more for each further rank of this node, or does nothing where others started them.

    A process starts ranks once: later Trainers in the script use the same ones. Unlike Lightning's own, it leaves
    no variables behind in this process's environment, and kills nobody who can end by himself.

    Args:
        strategy: what the launcher works for.
    """

    def __init__(self, strategy: DDPExtStrategy) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        _refuse_other_size(self.num_processes * self.num_nodes)
        if _started is not None:
            self.procs = list(_started.children)
        elif not self.cluster_environment.creates_processes_externally:
            self._start()
        set_num_threads_if_needed(num_processes=self.num_processes)
        return supervised(function, *args, harmless=(TunerExitException,), **kwargs)

    def _start(self) -> None:
        global _started
        meeting = arrange_meeting(
            self._strategy.chosen_init_method,
            self.cluster_environment,
            run_id=self._strategy.run_id,
            num_nodes=self.num_nodes,
            node_rank=self.cluster_environment.node_rank(),
        )
        with environment_of_started_ranks({**meeting.variables, LAUNCHER_PID: str(os.getpid())}):
            self._call_children_scripts()
        _started = StartedRanks(meeting, self.num_processes * self.num_nodes, list(self.procs))
        atexit.register(_started.wait)
        _keep_others_from_starting_ranks()


def _refuse_other_size(world_size: int) -> None:
    membership = current()
    joined = _started if membership is None else membership.world
    if joined is not None and joined.world_size != world_size:
        raise GroupInUseError(
            f"this script's world_size is {joined.world_size} already, and this Trainer wants {world_size}; give every "
            "Trainer of a script the same devices and num_nodes, or run the other one in a script of its own"
        )


def _keep_others_from_starting_ranks() -> None:
    """Have a stock strategy in this script use the ranks that are there, as it would after one of its own kind.

    It looks for ``LOCAL_RANK`` in the environment to learn that; without it, it would run the script once more.
    """

    def use_those(self: SubprocessScriptLauncher) -> None:
        _refuse_other_size(self.num_processes * self.num_nodes)

    SubprocessScriptLauncher._call_children_scripts = use_those  # type: ignore[method-assign]


class ProcessesLauncher(MultiProcessingLauncher):
    """Starts all ranks of this node by spawn, fork or forkserver, hosts their store, and waits for them.

    Args:
        strategy: what the launcher works for.
        start_method: ``"spawn"``, ``"fork"`` or ``"forkserver"``.
    """

    def __init__(self, strategy: DDPExtStrategy, start_method: Any) -> None:
        super().__init__(strategy, start_method=start_method)
        self._ddpx = strategy
        self._listener: socket.socket | None = None
        self._ticket: Ticket | None = None
        environment = strategy.cluster_environment
        assert environment is not None
        if start_method == "forkserver" and not environment.creates_processes_externally:
            _warm_up_forkserver()

    @property
    def meeting(self) -> Meeting | None:
        """In a started process: where the ranks meet."""
        return self._ticket.meeting if self._ticket else None

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self._refuse_second_launcher()
        environment = self._ddpx.cluster_environment
        assert environment is not None
        meeting = arrange_meeting(
            self._ddpx.chosen_init_method,
            environment,
            run_id=self._ddpx.run_id,
            num_nodes=self._ddpx.num_nodes,
            node_rank=environment.node_rank(),
        )
        self._listener = meeting.listener
        try:
            with (
                tempfile.TemporaryDirectory(prefix="lightning_ddp_ext-") as directory,
                environment_of_started_ranks(meeting.variables),
                self._started_by(self._start_processes),
            ):
                self._ticket = self._write_ticket(meeting, results_file=f"{directory}/results")
                return super().launch(function, *args, trainer=trainer, **kwargs)
        finally:
            if self._listener is not None:
                self._listener.close()
            self._ticket = None

    def _write_ticket(self, meeting: Meeting, results_file: str) -> Ticket:
        # Lightning carries seeds and torch's flags over to spawned processes; those of a fork server need it as much.
        state = GlobalStateSnapshot.capture() if self._start_method == "forkserver" else None
        here = Meeting(meeting.where, meeting.variables)
        return Ticket(here, os.getpid(), dict(os.environ), state, results_file)

    def _refuse_second_launcher(self) -> None:
        environment = self._ddpx.cluster_environment
        assert environment is not None
        if environment.creates_processes_externally:
            raise WorldError(
                f"start_method={self._start_method!r} starts the ranks itself, but this process was started as one of "
                f"them already (rank {environment.global_rank()} of {environment.world_size()}, from "
                f"{source_of(environment)}); use strategy='ddp_ext' here, or start the script without a launcher"
            )
        if current() is not None:
            raise GroupInUseError(
                f"start_method={self._start_method!r} starts ranks, but this process is a rank of an earlier Trainer "
                "already; use the same strategy for every Trainer of a script"
            )

    @contextmanager
    def _started_by(self, start: Callable[..., Any]) -> Iterator[None]:
        # Lightning starts its processes with this function and offers no hook between their start and the join.
        original = torch.multiprocessing.start_processes
        torch.multiprocessing.start_processes = partial(start, original)
        try:
            yield
        finally:
            torch.multiprocessing.start_processes = original

    def _start_processes(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> RankProcesses:
        context = original(*args, **kwargs)
        # The store's server has a thread, so it comes after the fork.
        store = serve(self._listener) if self._listener is not None else None
        self._listener = None
        return RankProcesses(context, store)

    @override
    def _wrapping_function(
        self,
        process_idx: int,
        trainer: Any,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        return_queue: Any,
        global_states: Any = None,
    ) -> None:
        assert self._ticket is not None
        self._ticket.enter()
        if self._listener is not None:
            self._listener.close()  # inherited by fork; the launching process hosts the store
        if self._start_method == "forkserver":
            # What is pickled for another process is shared memory: the ranks would all train on the same parameters,
            # each overwriting the others'. Lightning thinks of it for spawn alone.
            args, kwargs = disable_module_memory_sharing((args, kwargs))
        supervised_function = partial(supervised, function, harmless=(TunerExitException,))
        through_file: Any = ResultsQueue(return_queue, self._ticket.results_file)
        try:
            super()._wrapping_function(
                process_idx, trainer, supervised_function, args, kwargs, through_file, global_states
            )
        except RankFailedError as error:
            print_line(error)  # the launching process prints the traceback of the first rank that failed
            raise
        finally:
            leave()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_listener": None}


@dataclass(frozen=True)
class Ticket:
    """What a started process needs to know of the one that started it."""

    meeting: Meeting
    launcher_pid: int
    environment: dict[str, str]
    global_state: GlobalStateSnapshot | None
    results_file: str

    def enter(self) -> None:
        """Called first thing in the started process."""
        # A fork server hands on the environment of its own start, which may be long past.
        os.environ.clear()
        os.environ.update(self.environment)
        if self.global_state is not None:
            self.global_state.restore()
        watch_launcher(self.launcher_pid)


@dataclass(frozen=True)
class ResultsQueue:
    """The sending end of Lightning's queue for what rank 0 brings back, of any length.

    Lightning reads the queue when all processes have ended, and a pipe holds 64 KiB: with some 300 logged metrics
    rank 0 would wait for a reader for ever. So the message goes into a file, and only its name through the pipe.
    """

    queue: Any
    path: str

    def put(self, results: Any) -> None:
        """Send ``results``; the other end gets them as they are."""
        with open(self.path, "wb") as file:
            pickle.dump(results, file)
        self.queue.put(_InFile(self.path))


@dataclass(frozen=True)
class _InFile:
    """Stands for what is pickled in a file, which is what comes out at the other end."""

    path: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.path,)


def _load(path: str) -> Any:
    with open(path, "rb") as file:  # written by a process of our own
        return pickle.load(file)


class RankProcesses:
    """The started processes; joining them names the first that failed, and gives the others time to say why.

    Args:
        context: what torch returned when it started them.
        store: the server of their store, open as long as they run.
    """

    def __init__(self, context: Any, store: object) -> None:
        self._context = context
        self._store = store
        self.processes = context.processes

    def join(self) -> bool:
        """Wait for all processes. Raises what the first one that failed raised; always returns ``True``."""
        try:
            self._wait_for_an_end()
        except BaseException:
            self._interrupt()
            raise
        self._end_the_rest()
        self._store = None
        culprit = self._culprit()
        if culprit is not None:
            self._raise(culprit)
        return True

    def _wait_for_an_end(self) -> None:
        """Wait until one has failed, or all have ended."""
        running = {process.sentinel: process for process in self.processes}
        while running and not self._failed():
            for sentinel in wait(list(running)):
                running.pop(sentinel).join()

    def _interrupt(self) -> None:
        """Ctrl-C in a terminal reaches all processes, but that of a notebook this one alone, which then ends them."""
        try:
            for request in (None, signal.SIGINT):
                self._end_within(_END_WITHIN / 2, request)
        finally:
            for process in self.processes:
                if process.exitcode is None:
                    process.kill()

    def _end_within(self, seconds: float, request: signal.Signals | None) -> None:
        moment = time.monotonic() + seconds
        for process in self.processes:
            if request is not None and process.exitcode is None:
                os.kill(process.pid, request)
        for process in self.processes:
            process.join(max(0.0, moment - time.monotonic()))

    def _failed(self) -> list[int]:
        return [index for index, process in enumerate(self.processes) if process.exitcode not in (None, 0)]

    def _end_the_rest(self) -> None:
        moment = time.monotonic() + _END_WITHIN
        self._killed = []
        for index, process in enumerate(self.processes):
            process.join(max(0.0, moment - time.monotonic()) if self._failed() else None)
            if process.exitcode is None:
                self._killed.append(index)
                process.kill()
                process.join()

    def _culprit(self) -> int | None:
        """The process whose end explains that of the others."""
        failed = [index for index in self._failed() if index not in self._killed]
        return min(failed, key=self._order_of_blame, default=None)

    def _order_of_blame(self, index: int) -> tuple[int, float]:
        """Sorts a kill first, then own exceptions as they came, then ends without a word, then those of bystanders."""
        if self.processes[index].exitcode < 0:
            return 0, 0.0
        path = self._context.error_files[index]  # torch's own file, made by its wrapper for a traceback
        try:
            with open(path, "rb") as file:
                text = str(pickle.load(file))
        except OSError:
            return 2, 0.0  # the process was ended, by sys.exit or because nothing could wake it
        is_bystander = text.rstrip().rpartition("\n")[2].startswith("lightning_ddp_ext.errors.Rank")
        return (3 if is_bystander else 1), os.stat(path).st_mtime

    def _raise(self, index: int) -> None:
        process = self.processes[index]
        if process.exitcode < 0:
            raise RankDiedError(
                f"local rank {index} (host {socket.gethostname()}, pid {process.pid}) died: it was ended "
                f"{_in_words(process.exitcode)}; the other ranks were stopped",
                rank=index,
                host=socket.gethostname(),
                pid=process.pid,
            )
        self._context.sentinels.clear()
        self._context.sentinels[process.sentinel] = index
        self._context.join()


def _warm_up_forkserver() -> None:
    """Start the server now, so that it imports while the user's code still builds model and data."""
    check_missing_main_guard()
    multiprocessing.set_forkserver_preload(["__main__", "torch.distributed", lightning_name, "lightning_ddp_ext"])
    with suppress(ValueError):
        forkserver.ensure_running()


def _in_words(status: int) -> str:
    if status >= 0:
        return f"with status {status}"
    try:
        return f"by {signal.Signals(-status).name}"
    except ValueError:
        return f"by signal {-status}"


def watch_own_launcher() -> None:
    """In a process that a :class:`ScriptLauncher` started: end when that one is gone, or if it is already."""
    launcher = os.environ.pop(LAUNCHER_PID, None)  # it means this process, and none that this one starts
    if launcher is not None:
        watch_launcher(int(launcher))
