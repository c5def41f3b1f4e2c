"""What a test may not leave behind in the process of pytest and around it."""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.harness import network
from tests.harness.processes import MARK, kill_until_gone, marked, name_of, wait_until_gone

# Set by pytest for each test, and by libraries once when they are imported or first used.
_HARMLESS_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
}
_HARMLESS_FILES = ("__pycache__", ".")  # beginnings of names, as the next one
_TEMPORARY_FILES = "ddpx"


@dataclass(frozen=True)
class Snapshot:
    """What there is before a test; afterwards ``leaks`` says what has been added, and undoes it where that is safe."""

    environment: dict[str, str]
    directory: Path
    files: frozenset[Path]
    processes: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]

    @classmethod
    def take(cls) -> Snapshot:
        cwd = Path.cwd()
        environment, threads = dict(os.environ), frozenset(threading.enumerate())
        return cls(environment, cwd, _files(cwd), frozenset(_processes()), threads)

    def leaks(self, seconds: float = 5.0) -> list[str]:
        """One line for each leak; threads and processes have some seconds to end by themselves."""
        found = (
            *self._left_directory(),
            *self._changed_variables(),
            *self._new_threads(seconds),
            *self._new_processes(seconds),
            *_process_group(),
            *(f"file {path}" for path in sorted(_files(self.directory) - self.files)),
            *(f"network namespace {name}" for name in network.leftovers()),
        )
        return list(found)

    def _left_directory(self) -> list[str]:
        now = Path.cwd()
        os.chdir(self.directory)
        return [] if now == self.directory else [f"working directory {now} (was {self.directory})"]

    def _changed_variables(self) -> list[str]:
        before, after = self.environment, dict(os.environ)
        changed = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
        culprits = [name for name in changed if name not in _HARMLESS_VARIABLES]
        for name in culprits:
            _set(name, before.get(name))
        return [f"environment variable {name}={after.get(name)!r} (was {before.get(name)!r})" for name in culprits]

    def _new_threads(self, seconds: float) -> list[str]:
        culprits = [thread for thread in threading.enumerate() if thread not in self.threads and _must_end(thread)]
        for thread in culprits:
            thread.join(seconds)
        return [f"thread {thread.name}" for thread in culprits if thread.is_alive()]

    def _new_processes(self, seconds: float) -> list[str]:
        left = wait_until_gone(lambda: _processes() - self.processes, seconds)
        lines = [name_of(process) for process in left]
        if left:
            kill_until_gone(lambda: _processes() - self.processes)
        return lines


def _files(directory: Path) -> frozenset[Path]:
    """What is in the directory, unless it is everybody's, and what is ours in the one for temporary files."""
    temporary = Path(tempfile.gettempdir())
    here = [] if directory == temporary else os.listdir(directory)
    ours = [directory / name for name in here if not name.startswith(_HARMLESS_FILES)]
    ours += [temporary / name for name in os.listdir(temporary) if name.startswith(_TEMPORARY_FILES)]
    return frozenset(ours)


def _must_end(thread: threading.Thread) -> bool:
    return not thread.daemon or thread.name.startswith("ddpx")


def _processes() -> set[psutil.Process]:
    """Children, and what carries the mark of this test run; without the two servers of multiprocessing, which stay."""
    this = psutil.Process()
    mark = os.environ.get(MARK)
    found = {*this.children(recursive=True), *(marked(mark) if mark else ())}
    servers = {
        multiprocessing.forkserver._forkserver._forkserver_pid,  # type: ignore[attr-defined]
        multiprocessing.resource_tracker._resource_tracker._pid,  # type: ignore[attr-defined]
    }
    return {process for process in found if process != this and process.pid not in servers and _runs(process)}


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


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
