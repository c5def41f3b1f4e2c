"""Find what a test leaves behind in the pytest process and around it."""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from tests.harness.processes import MARK, children, marked, name_of, wait_until_exited

# Set by pytest for each test, and by libraries once when they are imported or first used.
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
    """The state before a test; afterwards ``leaks`` lists additions, and undoes them where that is safe."""

    def __init__(self) -> None:
        self._directory = Path.cwd()
        self._environment = dict(os.environ)
        self._known = {*_threads(), *_processes(), *_files(self._directory)}

    def leaks(self, seconds: float = _SECONDS_TO_END) -> list[str]:
        """Return one line for each leak; threads and processes have some seconds to end by themselves."""
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
        return [] if now == self._directory else [f"working directory {now} (was {self._directory})"]

    def _changed_variables(self) -> list[str]:
        before, after = self._environment, dict(os.environ)
        names = sorted({name for name, _ in before.items() ^ after.items()} - _HARMLESS_VARIABLES)
        for name in names:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in names if name in before})
        return [f"environment variable {name}={after.get(name)!r} (was {before.get(name)!r})" for name in names]


def _threads() -> list[threading.Thread]:
    """Return threads that must end before the test does: those that keep a process alive, and the package's own."""
    return [thread for thread in threading.enumerate() if not thread.daemon or thread.name.startswith("ddpx")]


def _files(directory: Path) -> set[Path]:
    """List the files in the directory, unless it is shared, and ours in the one for temporary files."""
    temporary = Path(tempfile.gettempdir())
    here = set() if directory == temporary else set(directory.iterdir())
    ours = {path for path in here if not path.name.startswith(_HARMLESS_FILES)}
    return ours | set(temporary.glob(f"{_TEMPORARY_FILES}*"))


def _processes() -> set[psutil.Process]:
    """Return children and processes with the mark of this test run, except the two servers of multiprocessing."""
    mark = os.environ.get(MARK)
    found = {*children(), *(marked(mark) if mark else ())}
    servers = {
        os.getpid(),
        multiprocessing.forkserver._forkserver._forkserver_pid,  # type: ignore[attr-defined]
        multiprocessing.resource_tracker._resource_tracker._pid,  # type: ignore[attr-defined]
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
