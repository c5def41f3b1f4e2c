"""Start the ranks of this node so that they find each other, know who started them, and end with them."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any

import torch.multiprocessing
from typing_extensions import override

from lightning_ddp_ext.errors import ConfigurationError, GroupInUseError, RankFailedError
from lightning_ddp_ext.rendezvous.process_context import current, leave
from lightning_ddp_ext.supervision.debugger import NO_LIMIT
from lightning_ddp_ext.supervision.exception_report import print_line
from lightning_ddp_ext.supervision.failure import supervised
from lightning_ddp_ext.supervision.parent_watch import LAUNCHER_PID, watch_launcher
from lightning_ddp_ext.supervision.rank_processes import (
    ChildScripts,
    RankProcesses,
    StartedRanks,
    note_started,
    started_ranks,
)

from .callbacks.rank_debugger import debugged_rank
from .checkpoint_paths import with_last_checkpoint
from .environment import source_of
from .joining import environment_of_started_ranks, start_variables
from .lightning_tree import (
    ClusterEnvironment,
    GlobalStateSnapshot,
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    TunerExitException,
    check_missing_main_guard,
    disable_module_memory_sharing,
    lightning_name,
    set_num_threads_if_needed,
)
from .stopping import StoppedException

if TYPE_CHECKING:
    from .strategy import DDPExtStrategy

_HARMLESS = (TunerExitException, StoppedException)


class ScriptLauncher(SubprocessScriptLauncher):
    """Runs the script once more for each further rank of this node, or does nothing where others started them.

    A process starts ranks once: later Trainers in the script use the same ones. Unlike Lightning's own, it leaves
    none of the ranks' variables behind in this process's environment, and kills no rank that still works.
    """

    def __init__(self, strategy: DDPExtStrategy) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        _refuse_other_size(self.num_processes * self.num_nodes)
        started = started_ranks()
        if started is not None:
            self.procs = list(started.scripts.children)
        elif not self.cluster_environment.creates_processes_externally:
            self._start(trainer)
        set_num_threads_if_needed(num_processes=self.num_processes)
        args = with_last_checkpoint(args, trainer, is_rank_zero=self._strategy.is_global_zero)
        return supervised(function, *args, harmless=_HARMLESS, **kwargs)

    def _start(self, trainer: Any) -> None:
        start = start_variables(self._strategy)
        with environment_of_started_ranks({**start.variables, LAUNCHER_PID: str(os.getpid())}):
            self._call_children_scripts()
        limit = {} if debugged_rank(trainer) is None else {"at_most": NO_LIMIT.total_seconds()}
        scripts = ChildScripts(list(self.procs), **limit)
        note_started(StartedRanks(start.variables, self.num_processes * self.num_nodes, scripts))
        atexit.register(start.clean_up)
        atexit.register(scripts.wait)  # before that
        _keep_others_from_starting_ranks()


def _refuse_other_size(world_size: int) -> None:
    context = current()
    joined = started_ranks() if context is None or len(context.table) == 1 else context.world
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

    for tree in ("lightning.pytorch", "pytorch_lightning"):
        module: Any = sys.modules.get(f"{tree}.strategies.launchers.subprocess_script")
        if module is not None:
            module._SubprocessScriptLauncher._call_children_scripts = use_those


class ProcessesLauncher(MultiProcessingLauncher):
    """Starts all ranks of this node by spawn, fork or forkserver, and waits for them."""

    def __init__(self, strategy: DDPExtStrategy, start_method: Any) -> None:
        super().__init__(strategy, start_method=start_method)
        self._ddpx = strategy
        self._child: _Child | None = None
        if start_method == "forkserver" and not self._environment.creates_processes_externally:
            # Started now, the server imports while the user's code still builds model and data.
            check_missing_main_guard()
            preloaded = ["__main__", "torch.distributed", lightning_name, "lightning_ddp_ext"]
            multiprocessing.set_forkserver_preload(preloaded)
            with suppress(ValueError):
                forkserver.ensure_running()

    @property
    def _environment(self) -> ClusterEnvironment:
        assert self._ddpx.cluster_environment is not None
        return self._ddpx.cluster_environment

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self._refuse_second_launcher()
        start = start_variables(self._ddpx)
        try:
            with (
                tempfile.TemporaryDirectory(prefix="lightning_ddp_ext-") as directory,
                environment_of_started_ranks(start.variables),
                self._joined_by_us(),
            ):
                # Lightning carries seeds and torch's flags over to spawned processes; a fork server's need it as much.
                state = GlobalStateSnapshot.capture() if self._start_method == "forkserver" else None
                self._child = _Child(os.getpid(), dict(os.environ), state, f"{directory}/results")
                return super().launch(function, *args, trainer=trainer, **kwargs)
        finally:
            start.clean_up()
            self._child = None

    def _refuse_second_launcher(self) -> None:
        environment, context = self._environment, current()
        if environment.creates_processes_externally:
            raise ConfigurationError(
                f"start_method={self._start_method!r} starts the ranks itself, but this process was started as one of "
                f"them already (rank {environment.global_rank()} of {environment.world_size()}, from "
                f"{source_of(environment)}); use strategy='ddp_ext' here, or start the script without a launcher"
            )
        if context is not None and len(context.table) > 1:
            raise GroupInUseError(
                f"start_method={self._start_method!r} starts ranks, but this process is a rank of an earlier Trainer "
                "already; use the same strategy for every Trainer of a script"
            )
        leave()

    @contextmanager
    def _joined_by_us(self) -> Iterator[None]:
        # Lightning starts its processes with this function and offers no hook between their start and the join.
        original: Callable[..., Any] = torch.multiprocessing.start_processes

        def start(*args: Any, **kwargs: Any) -> RankProcesses:
            assert self._child is not None
            deadline = self._ddpx.stops.deadline.total_seconds()
            return RankProcesses(original(*args, **kwargs), self._child.results_file, deadline)

        torch.multiprocessing.start_processes = start
        try:
            yield
        finally:
            torch.multiprocessing.start_processes = original

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
        assert self._child is not None
        self._child.enter()
        if self._start_method == "forkserver":
            # What is pickled for another process is shared memory: the ranks would all train on the same parameters,
            # each overwriting the others'. Lightning thinks of it for spawn alone.
            args, kwargs = disable_module_memory_sharing((args, kwargs))
        args = with_last_checkpoint(args, trainer, is_rank_zero=self._environment.node_rank() == process_idx == 0)
        work = partial(supervised, function, harmless=_HARMLESS)
        queue: Any = _ResultsQueue(return_queue, self._child.results_file)
        try:
            super()._wrapping_function(process_idx, trainer, work, args, kwargs, queue, global_states)
        except RankFailedError as error:
            print_line(error)  # the launching process prints the traceback of the first rank that failed
            raise
        finally:
            leave()


@dataclass(frozen=True)
class _Child:
    """What a started process needs to know of the one that started it."""

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
class _ResultsQueue:
    """The sending end of Lightning's queue for what rank 0 brings back: it sends the name of a file.

    Lightning reads the queue when all processes have ended, and a pipe holds 64 KiB: with some 300 logged metrics
    rank 0 would wait for a reader for ever.
    """

    queue: Any
    path: str

    def put(self, results: Any) -> None:
        """Send ``results``; the other end gets them as they are."""
        with open(self.path, "wb") as file:
            pickle.dump(results, file)
        self.queue.put(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.path,)


def _load(path: str) -> Any:
    with open(path, "rb") as file:  # written by a process of our own
        return pickle.load(file)
