"""The harness itself: a test that goes wrong says what went wrong, and leaves nothing behind."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.harness.leaks import Snapshot
from tests.harness.network import Network, leftovers, network
from tests.harness.processes import marked
from tests.harness.ranks import (
    RankProcesses,
    RanksFailed,
    RanksHung,
    announce,
    by_hand_env,
    hold,
    launch_ranks,
    run_ranks,
)
from tests.harness.scripts import ScriptFailed, ScriptHung, run_script, start_script

ROOT = Path(__file__).resolve().parent.parent


def forever() -> None:
    threading.Event().wait()


def what_a_rank_sees(rank: int, world_size: int, *, word: str) -> tuple[object, ...]:
    names = ("RANK", "LOCAL_RANK", "MASTER_PORT", "GIVEN", "TAKEN", "PYTEST_CURRENT_TEST")
    return rank, world_size, word, torch.tensor(rank), {name: os.environ[name] for name in names if name in os.environ}


def test_ranks_get_arguments_and_variables_and_return_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables come from the test's environment of this moment and from ``env``, by rank where it is a function."""
    monkeypatch.setenv("GIVEN", "by the test")
    monkeypatch.setenv("TAKEN", "by the test")
    seen = run_ranks(what_a_rank_sees, 2, word="hello", env={**by_hand_env(2, port=29500), "TAKEN": None})
    for rank in range(2):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": "29500", "GIVEN": "by the test"}
        assert seen[rank] == (rank, 2, "hello", torch.tensor(rank), variables)


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
    """The message has the traceback and the output of the rank that failed; the exception itself is the cause."""
    with pytest.raises(RanksFailed, match=r"^rank 1 \(pid \d+\): LayerError: no such layer, exit status 1") as caught:
        run_ranks(fail_on_rank_one)
    message = str(caught.value)
    assert "in fail_on_rank_one" in message
    assert message.count("Traceback") == 2, "its own and its cause's, each once"
    assert "rank 1 was here" in message
    assert isinstance(caught.value.__cause__, LayerError)
    assert isinstance(caught.value.__cause__.__cause__, KeyError)
    other = caught.value.outcomes[0]
    assert other.exit_code == -signal.SIGKILL
    assert not psutil.pid_exists(other.pid)


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
    with pytest.raises(RanksHung) as caught:
        run_ranks(hang_or_stop, 3, time_limit=1.0)
    done, hung, stopped = caught.value.outcomes
    assert (done.exit_code, done.result, done.stacks) == (0, "done", "")
    assert "in hang_or_stop" in hung.stacks
    assert hung.stacks.count("in forever") == 2, "main thread and helper"
    assert hung.stacks in str(caught.value)
    assert "in hang_or_stop" in stopped.stacks


def note_the_end(rank: int, world_size: int, directory: Path) -> None:
    def note(line: str) -> None:
        with (directory / str(rank)).open("a") as notes:
            notes.write(line)

    def note_late() -> None:
        threading.main_thread().join()
        note("thread\n")

    atexit.register(note, "first registered\n")
    atexit.register(note, "second registered\n")
    threading.Thread(target=note_late).start()
    if rank == 1:
        raise LayerError


def test_exit_handlers_run_once_and_after_threads(tmp_path: Path) -> None:
    """As at the end of a script: first non-daemon threads end, then handlers run, the last one first."""
    launch_ranks(note_the_end, 2, tmp_path)
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == "thread\nsecond registered\nfirst registered\n"


def walk(rank: int, world_size: int) -> str:
    for step in range(3):
        announce("step", step)
    hold("in the middle")
    return "arrived"


def test_ranks_under_control() -> None:
    """Ranks start one by one, say where they are, wait to be released, can be killed, and end with their context."""
    with RankProcesses(walk, 4, start=[0]) as ranks:
        assert [ranks.wait_for("step", 0) for _ in range(3)] == [0, 1, 2]
        ranks.start(2)
        ranks.start(3)
        assert list(ranks.pids) == [0, 2, 3]
        ranks.wait_for("in the middle", 2)
        ranks.kill(2)
        assert ranks.wait(2)[0].exit_code == -signal.SIGKILL
        with pytest.raises(AssertionError, match=r"rank 2 did not announce 'elsewhere' before its end:\nrank 2"):
            ranks.wait_for("elsewhere", 2, timeout=60.0)
        ranks.release(0)
        assert ranks.wait(0)[0].result == "arrived"
    assert not any(psutil.pid_exists(pid) for pid in ranks.pids.values())


TOY_TEST = """
    import atexit, threading
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
"""


def test_coverage_counts_lines_of_ranks_and_scripts(tmp_path: Path) -> None:
    """Those run on import, in threads, in exit handlers and in scripts, whatever directory they work in."""
    names = ("in_thread", "at_exit", "in_script")
    (tmp_path / "toy.py").write_text("AT_IMPORT = True\n" + "".join(f"def {name}():\n    return 1\n" for name in names))
    settings = (
        "branch = true\nparallel = true\nsource = toy\nconcurrency = multiprocessing,thread\npatch = subprocess\n"
    )
    (tmp_path / ".coveragerc").write_text(f"[run]\n{settings}")
    options = ("--cov", "--cov-report=term-missing", "--cov-config=.coveragerc")
    environment = {name: "" for name in os.environ if name.startswith("COV")}
    done = run_pytest(tmp_path, TOY_TEST, *options, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    toy = next(line for line in done.stdout.splitlines() if line.startswith("toy.py"))
    assert toy.split()[-1] == "100%", done.stdout


def test_a_script_runs_as_a_user_would_run_it(tmp_path: Path) -> None:
    """Its text or its path, with arguments, variables and a directory."""
    source = """
        import os, sys
        print(sys.argv[1:], os.environ["GIVEN"], os.getcwd())
        sys.exit("no more")
    """
    done = run_script(source, "--epochs", "3", env={"GIVEN": "1"}, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, f"['--epochs', '3'] 1 {tmp_path}\n", "no more\n")


# Leaves a process behind that is in another session and whose parent has gone.
ORPHAN = """
    import os, subprocess, sys, time
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    subprocess.Popen(command, start_new_session=True, stdout=-3, stderr=-3)
    print("leaving")
"""


def test_an_orphan_of_a_script_is_found_and_killed() -> None:
    """Also one that has moved to another session and lost its parent."""
    with pytest.raises(ScriptFailed, match=r"(?s)still there 5.0 s.*threading.Event.*leaving"):
        run_script(ORPHAN)
    assert not [process for process in marked(os.environ["TEST_HARNESS_MARK"]) if "Event" in str(process.cmdline())]


LAUNCHER = """
    import os, subprocess, sys, threading
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if "LOCAL_RANK" not in os.environ:
        other = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "LOCAL_RANK": "1"})
    print("started as rank", rank, flush=True)
    if rank == 1:
        threading.Event().wait()
    sys.exit(128 - other.wait())
"""


def test_a_rank_of_a_script_can_be_killed() -> None:
    """A script that starts its own ranks: they are told apart by their variables, the script itself is rank 0."""
    with start_script(LAUNCHER) as script:
        assert script.wait_for_line(r"rank (0)")[1] == "0"
        script.wait_for_line("as rank 1")
        assert script.rank_pids() == {0: script.pid, 1: psutil.Process(script.pid).children()[0].pid}
        script.kill(rank=1)
        assert script.wait().returncode == 128 + signal.SIGKILL
        with pytest.raises(ScriptFailed, match="started as rank 1"):  # what can no longer come is not waited for
            script.wait_for_line("something else", timeout=60.0)


def test_a_script_that_hangs_ends_with_the_stacks_of_its_processes() -> None:
    """Of the one that was started and of those that it has started."""
    with pytest.raises(ScriptHung, match="had not ended after 1") as caught:
        run_script(LAUNCHER, time_limit=1.0)
    assert str(caught.value).count("Current thread") == 2


def talk(rank: int, world_size: int, address: str) -> tuple[str, str] | str | None:
    """Rank 1 sends a word before the cable is cut and one after, and returns what comes once it is mended."""
    if rank == 0:
        with socket.create_server(
            (address, 29500), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        ) as server:
            announce("listening")
            connection, _ = server.accept()
            while data := connection.recv(64):
                connection.sendall(data)
            connection.close()
            return socket.gethostname(), socket.gethostbyname("host-b")
    with socket.create_connection((address, 29500), timeout=5.0) as connection:
        connection.sendall(b"one")
        hold("before", answer(connection, 5.0))
        connection.sendall(b"two")
        hold("while cut", answer(connection, 0.5))
        return answer(connection, 15.0)


def answer(connection: socket.socket, seconds: float) -> str | None:
    connection.settimeout(seconds)
    try:
        return connection.recv(64).decode()
    except TimeoutError:
        return None


@pytest.mark.netns
@pytest.mark.parametrize("family", [4, 6])
def test_two_hosts_talk_until_the_cable_is_cut(two_hosts: Network, family: int) -> None:
    """Packets vanish, but the connection is neither closed nor reset, and works on once the cable is mended."""
    with RankProcesses(talk, 2, two_hosts.address(0, family=family), namespaces=list(two_hosts), start=[0]) as ranks:
        ranks.wait_for("listening", 0)
        ranks.start(1)
        assert ranks.wait_for("before", 1) == "one"
        two_hosts.cut()
        ranks.release(1)
        assert ranks.wait_for("while cut", 1) is None
        two_hosts.mend()
        ranks.release(1)
        assert [outcome.result for outcome in ranks.wait()] == [("host-a", "10.77.0.2"), "two"]


@pytest.mark.netns
def test_hosts_vanish_with_their_context(two_hosts: Network) -> None:
    """Namespaces and files in /etc are gone, those of other networks stay, and the test's own host is untouched."""
    theirs, name = leftovers(), socket.gethostname()
    with network("host-a", "host-b", "host-c") as hosts:
        names = set(leftovers()) - set(theirs)
        assert len(names) == 4
        assert hosts[2].address == "10.77.0.3"
    assert leftovers() == theirs
    assert not [path for path in Path("/etc/netns").iterdir() if path.name in names]
    assert socket.gethostname() == name


@pytest.mark.parametrize(("ci", "status", "word"), [("", 0, "SKIPPED"), ("true", 1, "CI must run this test")])
def test_without_ip_tests_skip_but_never_in_ci(tmp_path: Path, ci: str, status: int, word: str) -> None:
    """Nobody notices a test that is skipped in CI."""
    done = run_pytest(tmp_path, "def test_hosts(two_hosts): pass\n", PATH=str(tmp_path), CI=ci)
    assert done.returncode == status, done.stdout
    assert word in done.stdout
    assert "need the programs ip, unshare, sh" in done.stdout


def test_leaks_in_the_process_are_named_and_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables, threads, files, the working directory and the process group."""
    here, temporary, release = tmp_path / "here", tmp_path / "temporary", threading.Event()
    here.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))  # tests beside this one look into the true one
    monkeypatch.setenv("HARNESS_A", "a")
    before = Snapshot.take()
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
    assert (dict(os.environ), Path.cwd(), dist.is_initialized()) == (before.environment, here, False)


def test_leaked_processes_are_named_and_killed() -> None:
    """A child, and one that has lost its parent."""
    before = Snapshot.take()
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    child = subprocess.Popen(command, env={})  # without the mark of this test run
    subprocess.run([sys.executable, "-c", f"import subprocess; subprocess.Popen({command!r})"], check=True)
    leaks = before.leaks(seconds=0.5)
    assert ["threading.Event" in line for line in leaks] == [True, True]
    assert child.wait() == -signal.SIGKILL


def test_leaks_fail_a_test(tmp_path: Path) -> None:
    """The fixture is on for every test without being asked for."""
    done = run_pytest(tmp_path, "import os\ndef test_leak(): os.environ['LEAKED'] = 'yes'\n")
    assert done.returncode == 1
    assert "environment variable LEAKED='yes' (was None)" in done.stdout


def test_the_shared_directory_is_no_temporary_one(shared_dir: Path) -> None:
    """It is empty, and not below what the system calls temporary."""
    assert not shared_dir.is_relative_to(tempfile.gettempdir())
    assert list(shared_dir.iterdir()) == []


def run_pytest(directory: Path, tests: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run tests under the harness's own conftest, in a process of their own."""
    (directory / "conftest.py").write_text("from tests.conftest import *\n")
    (directory / "test_inner.py").write_text(textwrap.dedent(tests))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *options, "."],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"} | env,
        capture_output=True,
        text=True,
    )
