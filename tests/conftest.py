"""Configure the test run: markers, the server of rank processes, a check for leaks after
each test, and fixtures that tests of several subpackages use.
"""

import contextlib
import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import hypothesis
import psutil
import pytest
import torch.distributed as dist

from tests.harness.environment import (
    MARK,
    Network,
    marked,
    name_of,
    network,
    skip_because,
    wait_until_exited,
    why_no_hosts,
)
from tests.harness.ranks import measured_coverage, start_server

_ROOT = Path(__file__).resolve().parent.parent
_STARTERS = ("tests.harness", "tests.integration")
_MARKED_FOLDERS = ("field", "gpu", "programs")
_SECONDS_TO_EXIT = 60.0  # an interpreter with torch needs some to exit, on a busy core
# Set by pytest for each test, and by libraries once when they are imported or first
# used.
_HARMLESS = {
    "PYTEST_CURRENT_TEST",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
}

hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")


def pytest_configure(config: pytest.Config) -> None:
    """Set what all processes of this test run inherit."""
    gc.disable()  # until all tests are imported
    os.environ[MARK] = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # In a shell's background; scripts would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Threads that spin while they wait would take time from other tests.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    _use_own_temporary_directory()
    measuring = measured_coverage()
    if measuring is not None:  # one place, whatever directory a process works in
        os.environ["COVERAGE_FILE"] = str(Path(measuring.config.data_file).absolute())


def _use_own_temporary_directory() -> None:
    """Make temporary files in a directory of this process, so that files of other
    processes are not taken for leaks.
    """
    # ``tmp_path`` stays where it is, and its files remain after the run.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    of_this_process = tempfile.mkdtemp(prefix="tests-")
    tempfile.tempdir = of_this_process
    os.environ["TMPDIR"] = of_this_process
    # After multiprocessing has removed its own directory there, at priority -100.
    multiprocessing.util.Finalize(
        None, shutil.rmtree, (of_this_process,), {"ignore_errors": True}, exitpriority=-200
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test ``ranks`` if its module may start processes, else ``unit``; tests in
    some folders also get the folder's name, because not every machine can run them.
    """
    for item in items:
        if isinstance(item, pytest.Function):
            item.add_marker("ranks" if _uses_helpers(item.module) else "unit")
            folder = item.path.parent.name
            if folder in _MARKED_FOLDERS:
                item.add_marker(folder)


def _uses_helpers(module: ModuleType) -> bool:
    """Whether the module has something from modules that start processes."""
    origins = [
        getattr(value, "__module__", None) or getattr(value, "__name__", "")
        for value in vars(module).values()
    ]
    return any(str(origin).startswith(_STARTERS) for origin in origins)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server of rank processes before a test needs it; exclude imported
    objects from garbage collection.
    """
    gc.freeze()
    gc.enable()
    needs_ranks = any(item.get_closest_marker("ranks") for item in session.items)
    if needs_ranks and not session.config.option.collectonly:
        start_server()


class Snapshot:
    """The state of this process before a test; after it, ``leaks`` lists what is left."""

    def __init__(self) -> None:
        self._directory = Path.cwd()
        self._processes = _processes()
        self._threads = _threads()
        self._state_before = self._state()

    def _state(self) -> set[str]:
        """Return a line for each variable and file, and for directory and process group."""
        variables = os.environ.items()
        return {
            f"working directory {Path.cwd()}",
            f"initialised process group: {dist.is_initialized()}",
            *(f"file {path}" for path in _files(self._directory)),
            *(f"variable {name}={value!r}" for name, value in variables if name not in _HARMLESS),
        }

    def leaks(self) -> list[str]:
        """Return one line for each leak; threads and processes have some time to exit.

        Processes that are left are killed.
        """
        threads = [thread for thread in _threads() if thread not in self._threads]
        for thread in threads:
            thread.join(_SECONDS_TO_EXIT)
        processes = wait_until_exited(
            lambda: [each for each in _processes() if each not in self._processes],
            _SECONDS_TO_EXIT,
        )
        names = [*map(name_of, processes), *(each.name for each in threads if each.is_alive())]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return [*names, *sorted(self._state() ^ self._state_before)]


def _threads() -> list[threading.Thread]:
    """Return threads that must end before the test does: those that are not daemons, and
    the package's.
    """
    return [
        thread
        for thread in threading.enumerate()
        if not thread.daemon or thread.name.startswith("ddpx")
    ]


def _files(directory: Path) -> set[Path]:
    """Return the package's temporary files, and the files in the directory unless that is
    the one for temporary files.
    """
    temporary = Path(tempfile.gettempdir())
    packages = set(temporary.glob("lightning_ddp_ext-*"))
    if directory == temporary:
        return packages
    caches = ("__pycache__", ".")
    return packages | {path for path in directory.iterdir() if not path.name.startswith(caches)}


def _processes() -> list[psutil.Process]:
    """Return the running children of this process, and processes with the mark of this
    test run, except the two servers of multiprocessing.
    """
    pids = {process.pid for process in marked(os.environ[MARK])}
    # In a tenth of the time that psutil takes to look at the parents of all processes.
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids |= {int(pid) for pid in path.read_text().split()}
    pids -= {
        os.getpid(),
        multiprocessing.forkserver._forkserver._forkserver_pid,
        multiprocessing.resource_tracker._resource_tracker._pid,
    }
    running = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves variables, threads, processes, files or a process group
    behind.
    """
    before = Snapshot()
    yield
    leaks = before.leaks()
    if leaks:
        pytest.fail("the test leaks:\n" + "\n".join(leaks), pytrace=False)


@pytest.fixture
def shared_dir() -> Iterator[Path]:
    """Make a directory that several hosts could share; skip if only directories for
    temporary files are writable.
    """
    parent = next(filter(_can_be_shared, (_ROOT, Path.home())), None)
    if parent is None:
        skip_because("clone and home are temporary directories, or another user's")
    directory = parent / f".pytest_shared_{uuid.uuid4().hex[:12]}"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


def _can_be_shared(path: Path) -> bool:
    temporary = (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm")
    return os.access(path, os.W_OK) and not any(map(path.is_relative_to, temporary))


@pytest.fixture
def two_hosts() -> Iterator[Network]:
    """Make hosts ``host-a`` and ``host-b`` on one network; skip where network namespaces
    are not allowed.
    """
    skip_because(why_no_hosts())
    with network("host-a", "host-b") as hosts:
        yield hosts


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 4 MiB; skip if mounts are not allowed."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(directory)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    reason = mounted.stderr.partition("\n")[0]
    skip_because(f"no file system can be mounted here: {reason}" if mounted.returncode else None)
    yield directory
    subprocess.run(["umount", "--lazy", directory], check=True)
