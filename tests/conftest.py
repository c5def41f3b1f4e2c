"""Fixtures for all tests: no leaks, a directory that hosts share, two hosts, a small
disk.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.harness.environment import skip_because
from tests.harness.network import Network, network, why_unavailable
from tests.harness.processes import MARK, Snapshot
from tests.harness.rank_process import measured_coverage, start_server

_ROOT = Path(__file__).resolve().parent.parent
_STARTERS = (
    "tests.harness.ranks",
    "tests.harness.scripts",
    "tests.field.slurm",
    "tests.field.train",
)

hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")


def pytest_configure(config: pytest.Config) -> None:
    """Mark all processes to come, and send their coverage to one place, whatever
    directory they work in.
    """
    gc.disable()  # until all tests are imported
    os.environ[MARK] = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # In a shell's background; scripts would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Threads that spin while they wait would take time from other tests.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    _use_own_temporary_directory()
    measuring = measured_coverage()
    if measuring is not None:
        os.environ["COVERAGE_FILE"] = str(Path(measuring.config.data_file).absolute())


def _use_own_temporary_directory() -> None:
    """Make temporary files in a directory of this process, in which what a test leaves
    behind is seen.
    """
    # The base of ``tmp_path``, which stays.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    of_this_process = tempfile.mkdtemp(prefix="tests-")
    tempfile.tempdir = of_this_process
    os.environ["TMPDIR"] = of_this_process
    # After multiprocessing has removed what it has there, which it does at -100.
    multiprocessing.util.Finalize(
        None, shutil.rmtree, (of_this_process,), {"ignore_errors": True}, exitpriority=-200
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test ``ranks`` if its module starts processes, itself or through a
    helper, and else ``unit``.
    """
    for item in items:
        if isinstance(item, pytest.Function):
            item.add_marker("ranks" if _starts_processes(item.module.__name__) else "unit")


@functools.cache
def _starts_processes(module: str) -> bool:
    """Whether the module has something from the harness's ``ranks`` or ``scripts``,
    itself or through a helper.
    """
    if module in _STARTERS:
        return True
    origins = {
        str(getattr(value, "__module__", None)) for value in vars(sys.modules[module]).values()
    }
    return any(
        _starts_processes(origin) for origin in origins - {module} if origin.startswith("tests.")
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server of rank processes before a test needs it; leave what was
    imported out of collections.
    """
    gc.freeze()
    gc.enable()
    if not session.config.option.collectonly and any(
        item.get_closest_marker("ranks") for item in session.items
    ):
        start_server()


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
    """Make a fresh directory that several hosts could share; skips if all writable ones
    are temporary.
    """
    temporary = (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm")
    parents = [
        path for path in (_ROOT, Path.home()) if not any(map(path.is_relative_to, temporary))
    ]
    writable = [path for path in parents if os.access(path, os.W_OK)]
    skip_because(
        None
        if writable
        else "clone and home are below a directory for temporary files, or another user's"
    )
    directory = writable[0] / f".pytest_shared_{uuid.uuid4().hex[:12]}"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def two_hosts() -> Iterator[Network]:
    """Hosts ``host-a`` and ``host-b`` on one network; skips where network namespaces
    are not allowed.
    """
    skip_because(why_unavailable())
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
