"""The harness itself: a test that goes wrong says what went wrong, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.harness.leaks import Snapshot
from tests.harness.processes import marked
from tests.harness.ranks import run_ranks
from tests.harness.scripts import start_script


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


# Leaves a process behind that is in another session and whose parent has exited.
ORPHAN = """
    import subprocess, sys
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    subprocess.Popen(command, start_new_session=True, stdout=-3, stderr=-3)
    print("leaving")
"""


def test_an_orphan_of_a_script_is_found_and_killed() -> None:
    """This holds for one that moved to another session and lost its parent."""
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
    (temporary / "lightning_ddp_ext-leftover").touch()
    (temporary / "another-users").touch()
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
        f"file {temporary / 'lightning_ddp_ext-leftover'}",
        f"file {here / 'lightning_logs'}",
        f"working directory {tmp_path} (was {here})",
        "process group gloo of 1 ranks",
    }
    assert (dict(os.environ), Path.cwd(), dist.is_initialized()) == (environment, here, False)
