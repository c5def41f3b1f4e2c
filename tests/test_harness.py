"""The harness itself: a test that goes wrong says what went wrong, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.harness.leaks import Snapshot
from tests.harness.processes import marked
from tests.harness.ranks import launch_ranks, run_ranks
from tests.harness.scripts import start_script

ROOT = Path(__file__).resolve().parent.parent


def forever() -> None:
    threading.Event().wait()


class LayerError(ValueError):
    """An exception that pickle can rebuild."""


def fail_on_rank_one(rank: int, world_size: int) -> None:
    print(f"rank {rank} was here")
    if rank == 1:
        try:
            raise KeyError("layer3")
        except KeyError as error:
            raise LayerError("no such layer") from error
    forever()


def test_the_first_failure_is_reported_and_the_others_are_ended() -> None:
    """The message begins with the rank that failed, its traceback and its output; the exception itself is the cause."""
    first = (
        r"(?s)^rank 1 \(pid \d+\): LayerError: no such layer, exit status 1\n.*\nrank 0 \(pid \d+\): ended by SIGKILL"
    )
    with pytest.raises(AssertionError, match=first) as caught:
        run_ranks(fail_on_rank_one)
    message = str(caught.value)
    assert "in fail_on_rank_one" in message
    assert message.count("Traceback") == 2, "its own and its cause's, each once"
    assert "rank 1 was here" in message
    assert isinstance(caught.value.__cause__, LayerError)
    assert isinstance(caught.value.__cause__.__cause__, KeyError)
    assert not any(psutil.pid_exists(int(pid)) for pid in re.findall(r"\(pid (\d+)\)", message))


def leave_in_many_ways(rank: int, world_size: int) -> None:
    if rank == 0:
        sys.exit(7)
    if rank == 1:
        sys.exit("a message")
    if rank == 2:
        raise KeyboardInterrupt
    if rank == 3:
        sys.excepthook = lambda kind, error, trace: print("hooked", error)
        raise LayerError("no such layer")
    if rank == 4:
        os.kill(os.getpid(), signal.SIGKILL)


def test_exit_statuses_are_those_of_the_interpreter() -> None:
    """``sys.exit`` keeps its status, an interrupt is SIGINT, an exception is what ``sys.excepthook`` makes of it."""
    outcomes = launch_ranks(leave_in_many_ways, 6)
    assert [outcome.exit_code for outcome in outcomes] == [7, 1, -signal.SIGINT, 1, -signal.SIGKILL, 0]
    assert outcomes[1].output == "a message\n"
    assert "KeyboardInterrupt" in outcomes[2].output
    assert outcomes[3].output == "hooked no such layer\n"
    assert "ended by SIGKILL" in outcomes[4].story()


def hang_or_stop(rank: int, world_size: int) -> str:
    if rank == 1:
        threading.Thread(target=forever, name="helper", daemon=True).start()
        forever()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    return "done"


def test_a_hang_ends_at_the_time_limit_with_stacks() -> None:
    """The stacks of all threads of the ranks that are still there; the others tell how they ended."""
    with pytest.raises(AssertionError, match=r"^not all ranks had ended after 3\.0 s\n") as caught:
        run_ranks(hang_or_stop, 3, time_limit=3.0)
    _, done, hung, stopped = re.split(r"^rank \d \(pid \d+\): ", str(caught.value), flags=re.MULTILINE)
    assert done.startswith("exit status 0")
    assert "in hang_or_stop" not in done
    assert "in hang_or_stop" in hung
    assert hung.count("in forever") == 2, "main thread and helper"
    assert "in hang_or_stop" in stopped


TOY_TEST = """
    import atexit, os, threading
    import pytest
    from tests.harness.ranks import launch_ranks
    from tests.harness.scripts import run_script

    def work(rank, world_size):
        import toy
        atexit.register(toy.at_exit)
        thread = threading.Thread(target=toy.in_thread)
        thread.start()
        thread.join()

    def test_work():
        launch_ranks(work, 2)
        assert run_script("import toy\\ntoy.in_script()").returncode == 0

    def test_leak():
        os.environ["LEAKED"] = "yes"

    @pytest.fixture
    def on_any_machine(monkeypatch):
        monkeypatch.delenv("DDPX_TESTS_NEED_EVERYTHING")

    def test_hosts(two_hosts):
        pass

    def test_hosts_elsewhere(on_any_machine, two_hosts):
        pass
"""


def test_what_holds_for_every_test(tmp_path: Path) -> None:
    """Coverage counts lines of ranks, threads, exit handlers and scripts; a leak fails; hosts may be required."""
    functions = "".join(f"def {name}():\n    return 1\n" for name in ("in_thread", "at_exit", "in_script"))
    (tmp_path / "toy.py").write_text(f"AT_IMPORT = True\n{functions}")
    settings = ("branch = true", "parallel = true", "source = toy", "concurrency = multiprocessing,thread")
    (tmp_path / ".coveragerc").write_text("\n".join(["[run]", *settings, "patch = subprocess", ""]))
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_inner.py").write_text(textwrap.dedent(TOY_TEST))
    options = ("-q", "-rs", "-p", "no:cacheprovider", "--cov", "--cov-report=term-missing")
    environment = {name: "" for name in os.environ if name.startswith("COV")} | {
        "DDPX_TESTS_NEED_EVERYTHING": "1",
        "PATH": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--cov-config=.coveragerc", "."],
        cwd=tmp_path,
        env={**os.environ, **environment, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    toy = next(line for line in done.stdout.splitlines() if line.startswith("toy.py"))
    assert toy.split()[-1] == "100%", done.stdout
    assert "environment variable LEAKED='yes' (was None)" in done.stdout
    assert "has to run, as DDPX_TESTS_NEED_EVERYTHING is set: network namespaces need the programs ip" in done.stdout
    assert "SKIPPED [1]" in done.stdout


# Leaves a process behind that is in another session and whose parent has gone.
ORPHAN = """
    import os, subprocess, sys, time
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    subprocess.Popen(command, start_new_session=True, stdout=-3, stderr=-3)
    print("leaving")
"""


def test_an_orphan_of_a_script_is_found_and_killed() -> None:
    """Also one that has moved to another session and lost its parent."""
    with (
        pytest.raises(AssertionError, match=r"(?s)still there 0.5 s.*threading.Event.*leaving"),
        start_script(ORPHAN) as script,
    ):
        script.wait().expect_no_survivors(seconds=0.5)
    assert not [process for process in marked(os.environ["TEST_HARNESS_MARK"]) if "Event" in str(process.cmdline())]


def test_leaks_in_the_process_are_named_and_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables, threads, files, the working directory and the process group."""
    here, temporary, release = tmp_path / "here", tmp_path / "temporary", threading.Event()
    here.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))  # tests beside this one look into the true one
    monkeypatch.setenv("HARNESS_A", "a")
    before, environment = Snapshot(), dict(os.environ)
    assert before.leaks() == []

    os.environ["HARNESS_A"], os.environ["HARNESS_B"] = "changed", "b"
    names = ("user", False), ("ddpx-beat", True), ("harmless", True)
    threads = [threading.Thread(target=release.wait, name=name, daemon=daemon) for name, daemon in names]
    for thread in threads:
        thread.start()
    (temporary / "ddpx-leftover").touch()
    (temporary / "somebody-elses").touch()
    (here / "lightning_logs").mkdir()
    os.chdir(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    leaks = before.leaks(seconds=0.1)
    release.set()
    for thread in threads:
        thread.join()

    assert set(leaks) == {
        "environment variable HARNESS_A='changed' (was 'a')",
        "environment variable HARNESS_B='b' (was None)",
        "thread user",
        "thread ddpx-beat",
        f"file {temporary / 'ddpx-leftover'}",
        f"file {here / 'lightning_logs'}",
        f"working directory {tmp_path} (was {here})",
        "process group gloo of 1 ranks",
    }
    assert (dict(os.environ), Path.cwd(), dist.is_initialized()) == (environment, here, False)


def test_leaked_processes_are_named_and_killed() -> None:
    """A child, and one that has lost its parent."""
    before = Snapshot()
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    child = subprocess.Popen(command, env={})  # without the mark of this test run
    subprocess.run([sys.executable, "-c", f"import subprocess; subprocess.Popen({command!r})"], check=True)
    leaks = before.leaks(seconds=0.5)
    assert ["threading.Event" in line for line in leaks] == [True, True]
    child.wait()
    assert not psutil.pid_exists(child.pid)
