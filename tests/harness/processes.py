"""Find what a test has started, changed or left behind: processes, threads, files,
definitions and settings.
"""

from __future__ import annotations

import contextlib
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import FunctionType
from typing import Any

import psutil

# In the environment of every process that a test run starts; that of a script begins
# with that of the test run.
MARK = "TEST_HARNESS_MARK"
PIPE_SIZE = 1 << 20
_LOOK_EVERY = 0.1  # seconds


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes whose initial environment has a mark that begins with this
    one.
    """
    beginning = f"\0{MARK}={mark}".encode()
    found = []
    for pid in psutil.pids():
        with (
            contextlib.suppress(OSError, psutil.NoSuchProcess),
            open(f"/proc/{pid}/environ", "rb") as variables,
        ):
            if beginning in b"\0" + variables.read():
                found.append(psutil.Process(pid))
    return found


def children() -> list[psutil.Process]:
    """Return this process's own children, in a tenth of the time that psutil takes to
    look at all processes.
    """
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            found += [psutil.Process(int(pid)) for pid in path.read_text().split()]
    return found


def wait_until(
    condition: Callable[[], object], otherwise: Callable[[], str], seconds: float
) -> None:
    """Fail with a text if a condition is not met within some seconds.

    For conditions outside of this process, which nothing announces.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(_LOOK_EVERY)


def wait_until_exited(
    find: Callable[[], Collection[psutil.Process]], seconds: float, *, kill: bool = False
) -> Collection[psutil.Process]:
    """Wait up to ``seconds`` until ``find`` returns nothing, or kill what it finds;
    return what is left.
    """
    deadline = time.monotonic() + seconds
    while (left := find()) and (rest := deadline - time.monotonic()) > 0:
        for process in left if kill else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, rest)
    return left


def name_of(process: psutil.Process) -> str:
    """Return a line that identifies this process."""
    with contextlib.suppress(psutil.Error):
        return f"process {process.pid}: {' '.join(process.cmdline())[:200]}"
    return f"process {process.pid}"


# Set by pytest for each test, and by libraries once when they are imported or first
# used.
_HARMLESS_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
}
_HARMLESS_FILES = ("__pycache__", ".")  # beginnings of names, as the next one
_TEMPORARY_FILES = "lightning_ddp_ext-"
_SECONDS_TO_END = 60.0  # an interpreter with torch needs some to end, on a busy core


class Snapshot:
    """The state before a test; afterwards ``leaks`` lists additions, and undoes them
    where that is safe.
    """

    def __init__(self) -> None:
        self._directory = Path.cwd()
        self._environment = dict(os.environ)
        self._known = {*_threads(), *_processes(), *_files(self._directory)}

    def leaks(self, seconds: float = _SECONDS_TO_END) -> list[str]:
        """Return one line for each leak; threads and processes have some seconds to end
        by themselves.
        """
        for thread in self._new(_threads()):
            thread.join(seconds)
        processes = wait_until_exited(lambda: self._new(_processes()), seconds)
        lines = [
            *self._left_directory(),
            *self._changed_variables(),
            *(f"thread {thread.name}" for thread in self._new(_threads())),
            *map(name_of, processes),
            *_process_group(),
            *(f"file {path}" for path in sorted(self._new(_files(self._directory)))),
        ]
        if processes:
            wait_until_exited(lambda: self._new(_processes()), _SECONDS_TO_END, kill=True)
        return lines

    def _new(self, things: Iterable[Any]) -> list[Any]:
        return [thing for thing in things if thing not in self._known]

    def _left_directory(self) -> list[str]:
        now = Path.cwd()
        os.chdir(self._directory)
        return (
            [] if now == self._directory else [f"working directory {now} (was {self._directory})"]
        )

    def _changed_variables(self) -> list[str]:
        before = self._environment
        after = dict(os.environ)
        names = sorted({name for name, _ in before.items() ^ after.items()} - _HARMLESS_VARIABLES)
        for name in names:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in names if name in before})
        return [
            f"environment variable {name}={after.get(name)!r} (was {before.get(name)!r})"
            for name in names
        ]


def _threads() -> list[threading.Thread]:
    """Return threads that must end before the test does: those that keep a process
    alive, and the package's own.
    """
    return [
        thread
        for thread in threading.enumerate()
        if not thread.daemon or thread.name.startswith("ddpx")
    ]


def _files(directory: Path) -> set[Path]:
    """List the files in the directory, unless it is shared, and ours in the one for
    temporary files.
    """
    temporary = Path(tempfile.gettempdir())
    here = set() if directory == temporary else set(directory.iterdir())
    ours = {path for path in here if not path.name.startswith(_HARMLESS_FILES)}
    return ours | set(temporary.glob(f"{_TEMPORARY_FILES}*"))


def _processes() -> set[psutil.Process]:
    """Return children and processes with the mark of this test run, except the two
    servers of multiprocessing.
    """
    mark = os.environ.get(MARK)
    found = {*children(), *(marked(mark) if mark else ())}
    servers = {
        os.getpid(),
        multiprocessing.forkserver._forkserver._forkserver_pid,
        multiprocessing.resource_tracker._resource_tracker._pid,
    }
    return {process for process in found if process.pid not in servers and _runs(process)}


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _process_group() -> list[str]:
    if "torch.distributed" not in sys.modules:
        return []
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return []
    line = f"process group {dist.get_backend()} of {dist.get_world_size()} ranks"
    dist.destroy_process_group()
    return [line]


LIBRARIES = ("lightning", "lightning_fabric", "pytorch_lightning", "torch", "torchmetrics")
KINDS = (FunctionType, type, property, classmethod, staticmethod)


def definitions() -> dict[str, Any]:
    """Return functions and classes of all imported modules, and the methods and
    properties of these classes.
    """
    warnings.simplefilter("ignore", FutureWarning)  # of torch's module attributes
    found: dict[str, Any] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in LIBRARIES:
            found |= defined_in(module, module_name)
            for name, cls in list(vars(module).items()):
                if isinstance(cls, type) and cls.__module__ == module_name:
                    found |= defined_in(cls, f"{module_name}.{name}")
    return found


def defined_in(owner: Any, name: str) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for key, value in list(vars(owner).items())
        if isinstance(value, KINDS)
    }


def changed(before: dict[str, Any]) -> list[str]:
    """Return the names of definitions that have changed."""
    now = definitions()
    return sorted(name for name, value in before.items() if now.get(name) is not value)


def of_process() -> dict[str, Any]:
    """Return the environment, signal handlers (including those in C), the limit of open
    files, and our threads.
    """
    found: dict[str, Any] = dict(os.environ)
    found |= {each.name: signal.getsignal(each) for each in signal.Signals}
    found |= dict(
        re.findall(
            r"^(Sig(?:Blk|Ign|Cgt)):\t(.*)$", Path("/proc/self/status").read_text(), re.MULTILINE
        )
    )
    found["files"] = resource.getrlimit(resource.RLIMIT_NOFILE)
    return found | {
        thread.name: "" for thread in threading.enumerate() if thread.name.startswith("ddpx")
    }


def changed_in_process(before: dict[str, Any]) -> dict[str, Any]:
    """List the definitions that have changed, before and now."""
    now = of_process()
    return {name: (before.get(name), now.get(name)) for name, _ in before.items() ^ now.items()}
