"""Start this node's ranks with the variables that they need, and wait for them.

With ``start_method="popen"`` or under another launcher, the process that calls the
Trainer is a rank itself (:class:`ScriptLauncher`). With the other start methods, it
waits for processes that run a function (:class:`ProcessesLauncher`).

Both set a run's environment variables only while they start ranks or run, and then
restore them. In a script with started ranks, ``LOCAL_RANK`` stays, which tells a stock
strategy later in the script that the ranks exist, and so does ``OMP_NUM_THREADS``.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch.multiprocessing
from typing_extensions import override

from lightning_ddp_ext.errors import ConfigurationError, RankFailedError
from lightning_ddp_ext.rendezvous.process_context import leave
from lightning_ddp_ext.rendezvous.request import NO_LIMIT
from lightning_ddp_ext.supervision.excepthook import print_line
from lightning_ddp_ext.supervision.failure import supervised
from lightning_ddp_ext.supervision.launching_process import (
    LAUNCHER_PID,
    stop_with_multiprocessing,
)
from lightning_ddp_ext.supervision.started_ranks import (
    EXIT_WITHIN,
    ChildScripts,
    join_ranks,
    record_started,
    started_ranks,
)

from ..callbacks.rank_debugger import rank_debugger_of
from ..checkpoints.run_files import RunFiles
from ..private.lightning_tree import (
    ClusterEnvironment,
    GlobalStateSnapshot,
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    TunerExitException,
    check_bad_cuda_fork,
    check_missing_main_guard,
    disable_module_memory_sharing,
    lightning_name,
    pl,
    set_num_threads_if_needed,
)
from ..stopping.last_step import LastStepSaver
from ..stopping.stops import StoppedException
from .environment import source_of
from .joining import Rendezvous, temporary_path

# The variables that a rank has from its launcher, except for RANK.
_RANK_VARIABLES = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Exceptions that all ranks raise at the same point, so that no rank has failed.
_HARMLESS = (TunerExitException, StoppedException)


@dataclass(frozen=True)
class Collaborators:
    """The strategy's collaborators that a launcher uses.

    Attributes:
        rendezvous: where and how the ranks connect.
        files: the stop checkpoints.
        last_step: saves the last step after a failure.
        deadline: the longest time for which started ranks may save before they exit.
    """

    rendezvous: Rendezvous
    files: RunFiles
    last_step: LastStepSaver
    deadline: timedelta


@contextmanager
def _environment_with(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables in the block, and remove those that are ``None``.

    Afterwards, restore them and all variables of a rank, which the block may also set.
    """
    before = {name: os.environ.get(name) for name in ("RANK", *_RANK_VARIABLES, *variables)}
    _set_variables(variables)
    try:
        yield
    finally:
        _set_variables(before)


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


class ScriptLauncher(SubprocessScriptLauncher):
    """Runs the script again for each of this node's other ranks.

    If another launcher has started the ranks, it starts none. A process starts ranks
    only once; later Trainers in the script use the same ranks.

    Unlike Lightning's launcher, this one does not kill the other ranks as soon as one
    fails, but only those that are still running after a time limit at exit, or after
    Ctrl-C.
    """

    def __init__(self, strategy: pl.strategies.DDPStrategy, parts: Collaborators) -> None:
        super().__init__(_environment_of(strategy), strategy.num_processes, strategy.num_nodes)
        self._parts = parts

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        variables: Mapping[str, str | None]  # of this process in the run
        started = started_ranks()
        if started is not None:
            self.procs = list(started.children)
            variables = {**started.variables, "WORLD_SIZE": str(self._size)}
        elif self.cluster_environment.creates_processes_externally:
            missing = self._parts.rendezvous.missing_variables(self.cluster_environment)
            variables = missing if self._size > 1 else {}
        else:
            variables = self._start_ranks(trainer)
        set_num_threads_if_needed(num_processes=self.num_processes)
        with _environment_with(variables), self._parts.files.begin(trainer, args) as passed:
            return supervised(
                function,
                *passed,
                harmless=_HARMLESS,
                handler=sys._getframe(1),  # the Trainer's calling frame, which runs later hooks
                save=self._parts.last_step.save,
                **kwargs,
            )

    @property
    def _size(self) -> int:
        """The number of the Trainer's ranks."""
        return self.num_processes * self.num_nodes

    def _start_ranks(self, trainer: Any) -> Mapping[str, str | None]:
        """Start this node's other ranks, and return this process's variables in a run."""
        address = self._parts.rendezvous.start_variables(self.cluster_environment, self.num_nodes)
        # The started ranks would inherit a user's RANK.
        with _environment_with({**address, LAUNCHER_PID: str(os.getpid()), "RANK": None}):
            self._call_children_scripts()  # sets variables even if it starts nothing
            of_rank = {name: os.environ[name] for name in _RANK_VARIABLES}
        variables = {**address, **of_rank, "LOCAL_RANK": "0"}
        if self._size == 1:
            return {**variables, "RANK": None}  # a user's, which is not that of this run
        if self.procs:
            os.environ["LOCAL_RANK"] = "0"  # remains, since the ranks still exist
        is_debugged = rank_debugger_of(trainer) is not None
        # This registers an exit handler. Exit handlers run in reverse order, so it precedes
        # the one that removes the file of `start_variables`.
        record_started(
            ChildScripts(
                list(self.procs),
                variables,
                exit_within=NO_LIMIT.total_seconds() if is_debugged else EXIT_WITHIN,
                save_within=self._parts.deadline.total_seconds(),
            )
        )
        return dict(variables)


class ProcessesLauncher(MultiProcessingLauncher):
    """Starts this node's ranks with spawn, fork or forkserver, and waits for them."""

    _strategy: pl.strategies.DDPStrategy

    def __init__(
        self,
        strategy: pl.strategies.DDPStrategy,
        parts: Collaborators,
        *,
        start_method: Literal["spawn", "fork", "forkserver"],
    ) -> None:
        super().__init__(strategy, start_method=start_method)
        self._parts = parts
        self._environment = _environment_of(strategy)
        if start_method == "forkserver" and not self._environment.creates_processes_externally:
            check_missing_main_guard()
            preloaded = ["__main__", "torch.distributed", lightning_name, "lightning_ddp_ext"]
            multiprocessing.set_forkserver_preload(preloaded)

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """Start the ranks, wait for them, and give the Trainer rank 0's results.

        This replaces Lightning's own method, which has no step between starting the
        processes and waiting that could be overridden.

        Raises:
            ConfigurationError: this process is a rank already.
            NotImplementedError: a second call of ``fit`` of this Trainer.
            Exception: a rank failed; see :func:`join_ranks`.
        """
        self._check_can_launch(trainer)
        leave()
        address = self._parts.rendezvous.start_variables(
            self._environment, self._strategy.num_nodes
        )
        results = _Results(temporary_path())
        with (
            self._parts.files.begin(trainer, args) as passed,
            _environment_with({**address, "RANK": None}),  # ranks would inherit a user's RANK
        ):
            # As Lightning's launcher does. The environment returns the address above, or
            # chooses one.
            os.environ["MASTER_ADDR"] = self._environment.main_address
            os.environ["MASTER_PORT"] = str(self._environment.main_port)
            self._run_ranks(function, passed, kwargs, trainer, results)
        output = results.load()
        if trainer is None:
            return output
        self._already_fit |= trainer.state.fn == "fit"
        self._recover_results_in_main_process(output, trainer)
        return output.trainer_results

    def _check_can_launch(self, trainer: Any) -> None:
        """Raise if this process cannot start ranks, or cannot run this Trainer again."""
        environment = self._environment
        if environment.creates_processes_externally:
            raise ConfigurationError(
                f"start_method={self._start_method!r} starts the ranks itself, but this process is"
                f" already rank {environment.global_rank()} of {environment.world_size()} according"
                f" to {source_of(environment)}; use strategy='ddp_ext' here, or start the script"
                " without a launcher"
            )
        if self._already_fit and trainer is not None and trainer.state.fn == "fit":
            raise NotImplementedError(
                f"a Trainer with start_method={self._start_method!r} can call fit() only once;"
                " create a new Trainer and continue with fit(ckpt_path=...)"
            )
        if self._start_method == "spawn":
            check_missing_main_guard()
        else:
            check_bad_cuda_fork()

    def _state_for_ranks(self) -> GlobalStateSnapshot | None:
        """Capture seeds and torch's flags for the ranks.

        Forked ranks have them already. With CUDA, ranks of a fork server get none, as
        with Lightning's launcher: capturing initialises CUDA in this process.
        """
        if self._start_method == "fork":
            return None
        may_initialise_cuda = self._start_method == "spawn" or not torch.cuda.is_available()
        return GlobalStateSnapshot.capture() if may_initialise_cuda else None

    def _run_ranks(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        trainer: Any,
        results: _Results,
    ) -> None:
        """Run the function in one process for each rank, and wait until all exit."""
        state = self._state_for_ranks()
        processes = torch.multiprocessing.start_processes(
            self._run_rank,
            args=(dict(os.environ), trainer, function, args, kwargs, results, state),
            nprocs=self._strategy.num_processes,
            join=False,
            start_method=self._start_method,
        )
        self.procs = processes.processes
        join_ranks(
            processes,
            results_file=results.path,
            stop_within=self._parts.deadline.total_seconds(),
            first_rank=self._environment.node_rank() * self._strategy.num_processes,
        )

    def _run_rank(
        self,
        local_rank: int,
        environ: dict[str, str],
        trainer: Any,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        results: Any,
        state: GlobalStateSnapshot | None,
    ) -> None:
        """Run the function in a started process, with the variables of the launching one.

        The other arguments are those of Lightning's ``_wrapping_function``, which takes
        ``results`` for a queue.
        """
        # A fork server passes on the environment of its start, which may be outdated.
        os.environ.clear()
        os.environ.update(environ)
        stop_with_multiprocessing()
        if self._start_method == "forkserver":
            # Pickled tensors are in shared memory, so the ranks would all train the
            # same parameters. Lightning only copies them for spawn.
            args, kwargs = disable_module_memory_sharing((args, kwargs))
        supervise = partial(
            supervised, function, harmless=_HARMLESS, save=self._parts.last_step.save
        )
        try:
            self._wrapping_function(local_rank, trainer, supervise, args, kwargs, results, state)
        except RankFailedError as error:
            print_line(error)  # the launching process prints one traceback
            raise
        finally:
            leave()


def _environment_of(strategy: pl.strategies.DDPStrategy) -> ClusterEnvironment:
    assert strategy.cluster_environment is not None  # the Trainer has set it
    return strategy.cluster_environment


@dataclass(frozen=True)
class _Results:
    """A file with rank 0's results, which replaces the queue of Lightning's launcher.

    Lightning reads that queue after all processes have exited. The queue is a pipe of
    64 KiB, so with about 300 logged metrics, rank 0 would wait forever for a reader.
    """

    path: str

    def put(self, results: Any) -> None:
        """Write the results; Lightning's own code calls this on rank 0."""
        with open(self.path, "xb", opener=partial(os.open, mode=0o600)) as file:
            pickle.dump(results, file)

    def load(self) -> Any:
        """Read the results, and remove the file."""
        with open(self.path, "rb") as file:
            os.unlink(self.path)
            return pickle.load(file)
