"""The harness itself: a test of ranks, scripts or hosts that goes wrong says what went wrong, and leaves nothing."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.harness.leaks import Snapshot
from tests.harness.network import Network, leftovers, network
from tests.harness.ranks import (
    RankProcesses,
    RanksFailed,
    RanksHung,
    announce,
    by_hand_env,
    free_port,
    hold,
    launch_ranks,
    run_ranks,
)
from tests.harness.scripts import ScriptFailed, ScriptHung, marked, run_script, start_script

ROOT = Path(__file__).resolve().parent.parent


def forever() -> None:
    threading.Event().wait()


# --- ranks ----------------------------------------------------------------------------------------


def sum_of_ranks(rank: int, world_size: int, directory: Path) -> torch.Tensor:
    store = dist.FileStore(str(directory / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    total = torch.tensor([rank + 1.0], requires_grad=True)
    with torch.no_grad():
        dist.all_reduce(total)
    dist.destroy_process_group()
    return total


def test_two_ranks_reduce_a_tensor_and_return_it(tmp_path: Path) -> None:
    """Results come back by rank, tensors included, and no rank computes alone."""
    assert run_ranks(sum_of_ranks, 2, tmp_path) == [torch.tensor([3.0]), torch.tensor([3.0])]


def what_a_rank_sees(rank: int, world_size: int, *, word: str) -> dict[str, object]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "GIVEN", "TAKEN", "PYTEST_CURRENT_TEST")
    return {
        "arguments": (rank, world_size, word),
        "variables": {name: os.environ[name] for name in names if name in os.environ},
        "cwd": Path.cwd(),
    }


def test_ranks_get_arguments_variables_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables come from the test's environment of this moment and from ``env``, by rank where it is a function."""
    monkeypatch.setenv("GIVEN", "by the test")
    monkeypatch.setenv("TAKEN", "by the test")
    env = {**by_hand_env(2, port=29500), "TAKEN": None}
    seen = run_ranks(what_a_rank_sees, 2, word="hello", env=env, cwd=tmp_path)
    for rank in range(2):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_PORT": "29500",
            "GIVEN": "by the test",
        }
        assert seen[rank] == {"arguments": (rank, 2, "hello"), "variables": variables, "cwd": tmp_path}


def test_ranks_have_no_rank_variables_by_themselves() -> None:
    """What is not asked for is not set."""
    assert [seen["variables"] for seen in run_ranks(what_a_rank_sees, 2, word="")] == [{}, {}]


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
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail_on_rank_one)
    message = str(caught.value)
    assert message.startswith("rank 1 (pid ")
    assert "LayerError: no such layer, exit status 1" in message
    assert "in fail_on_rank_one" in message
    assert message.count("Traceback") == 2, "its own and its cause's, each once"
    assert "rank 1 was here" in message
    assert isinstance(caught.value.__cause__, LayerError)
    assert isinstance(caught.value.__cause__.__cause__, KeyError)
    ended = caught.value.outcomes[0]
    assert ended.exit_code == -signal.SIGKILL
    assert not psutil.pid_exists(ended.pid)


def fail_one_after_the_other(rank: int, world_size: int) -> None:
    hold("ready")
    raise LayerError(f"rank {rank}")


def test_of_two_failures_the_earlier_one_is_reported() -> None:
    """What counts is when an exception was raised, not when a process ended or in which order ranks are looked at."""
    with RankProcesses(fail_one_after_the_other) as ranks:
        for rank in (1, 0):
            ranks.wait_for("ready", rank)
            ranks.release(rank)
            ranks.wait(rank)
        assert ranks.wait_for_failure({0: 0, 1: 0}) == 1


def die_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    forever()


def test_a_killed_rank_is_a_failure() -> None:
    """A death without an exception is reported by the signal's name."""
    with pytest.raises(RanksFailed, match=r"rank 1 \(pid \d+\): ended by SIGKILL"):
        run_ranks(die_on_rank_one)


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
        os._exit(9)


def test_exit_statuses_are_those_of_the_interpreter() -> None:
    """``sys.exit`` keeps its status, an interrupt is SIGINT, an exception is what ``sys.excepthook`` makes of it."""
    outcomes = launch_ranks(leave_in_many_ways, 6)
    assert [outcome.exit_code for outcome in outcomes] == [7, 1, -signal.SIGINT, 1, 9, 0]
    assert outcomes[1].output == "a message\n"
    assert "KeyboardInterrupt" in outcomes[2].output
    assert outcomes[3].output == "hooked no such layer\n"


def test_expected_exit_statuses_are_no_failure() -> None:
    """``expect_exit`` makes any other status one, for each rank."""
    expected = {0: 7, 1: 1, 2: -signal.SIGINT, 3: 1, 4: 9}
    assert run_ranks(leave_in_many_ways, 6, expect_exit=expected) == [None] * 6
    with pytest.raises(RanksFailed, match=r"rank 0 \(pid \d+\): SystemExit: 7, exit status 7"):
        run_ranks(leave_in_many_ways, 6, expect_exit=expected | {0: 8})


def hang_on_rank_one(rank: int, world_size: int) -> str:
    if rank == 1:
        threading.Thread(target=forever, name="helper", daemon=True).start()
        forever()
    return "done"


@pytest.mark.parametrize("run", [run_ranks, launch_ranks])
def test_a_hang_ends_at_the_time_limit_with_stacks(run: Callable[..., object]) -> None:
    """The stacks of all threads of the ranks that are still there; the others tell how they ended."""
    with pytest.raises(RanksHung) as caught:
        run(hang_on_rank_one, time_limit=1.0)
    done, hung = caught.value.outcomes
    assert (done.exit_code, done.result, done.stacks) == (0, "done", "")
    assert "in hang_on_rank_one" in hung.stacks
    assert hung.stacks.count("in forever") == 2, "main thread and helper"
    assert hung.stacks in str(caught.value)


def stop(rank: int, world_size: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_rank_shows_its_stack() -> None:
    """SIGSTOP is a hang like any other."""
    with pytest.raises(RanksHung, match="in stop"):
        run_ranks(stop, 1, time_limit=1.0)


def note_the_end(rank: int, world_size: int, file: Path) -> None:
    def note(line: str) -> None:
        with file.open("a") as notes:
            notes.write(line)

    atexit.register(note, "first registered\n")
    atexit.register(note, "second registered\n")

    def note_late() -> None:
        threading.main_thread().join()
        note("thread\n")

    threading.Thread(target=note_late).start()
    if rank == 1:
        raise LayerError


@pytest.mark.parametrize("rank", [0, 1])
def test_exit_handlers_run_once_and_after_threads(tmp_path: Path, rank: int) -> None:
    """As at the end of a script: first non-daemon threads end, then handlers run, the last one first."""
    file = tmp_path / "notes"
    with RankProcesses(note_the_end, 2, file, start=[rank]) as ranks:
        ranks.wait()
    assert file.read_text() == "thread\nsecond registered\nfirst registered\n"


def walk(rank: int, world_size: int) -> str:
    for step in range(3):
        announce("step", step)
    hold("in the middle")
    return "arrived"


def test_ranks_under_control() -> None:
    """Ranks start one by one, say where they are, wait to be released, and can be killed."""
    with RankProcesses(walk, 3, start=[0]) as ranks:
        assert [ranks.wait_for("step", 0) for _ in range(3)] == [0, 1, 2]
        ranks.start(2)
        assert list(ranks.pids) == [0, 2]
        ranks.wait_for("in the middle", 2)
        ranks.kill(2)
        assert ranks.wait(2)[0].exit_code == -signal.SIGKILL
        ranks.release(0)
        assert [outcome.result for outcome in ranks.wait()] == ["arrived", None]


def test_waiting_for_a_point_ends_with_the_rank() -> None:
    """A rank that ends instead is news at once."""
    with RankProcesses(fail_one_after_the_other, 1) as ranks:
        ranks.release(0)
        with pytest.raises(AssertionError, match=r"(?s)no 'elsewhere' before the end.*LayerError: rank 0"):
            ranks.wait_for("elsewhere", 0, timeout=60.0)


def test_ranks_end_with_their_context() -> None:
    """Whatever a test forgets, or a failing assertion skips, no rank survives."""
    with RankProcesses(walk) as ranks:
        for rank in range(2):
            ranks.wait_for("in the middle", rank)
        pids = list(ranks.pids.values())
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_free_port_can_be_bound() -> None:
    """Also for IPv6."""
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as listener:
            listener.bind((host, free_port(host)))


# --- coverage -------------------------------------------------------------------------------------

TOY_PACKAGE = """\
AT_IMPORT = True
def in_rank():
    return True
def in_thread():
    return True
def at_exit():
    return True
def before_failure():
    return True
"""

TOY_TESTS = """\
import atexit, threading
from tests.harness.ranks import run_ranks

def work(rank, world_size):
    import toy
    atexit.register(toy.at_exit)
    toy.in_rank()
    thread = threading.Thread(target=toy.in_thread)
    thread.start()
    thread.join()
    if rank == 1:
        toy.before_failure()
        raise ValueError

def test_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_ranks(work, 2, expect_exit={1: 1})
"""


def test_coverage_counts_lines_of_ranks(tmp_path: Path) -> None:
    """Those run on import, in threads, in exit handlers and before a failure, in whatever directory a rank starts."""
    (tmp_path / "toy.py").write_text(TOY_PACKAGE)
    (tmp_path / "test_toy.py").write_text(TOY_TESTS)
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\nfrom tests.conftest import no_leaks\n")
    (tmp_path / ".coveragerc").write_text(
        "[run]\nbranch = true\nparallel = true\nsource = toy\n"
        "concurrency = multiprocessing,thread\npatch = subprocess\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTEST"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--cov", "--cov-report=term-missing", "--cov-config=.coveragerc", "."],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    toy = next(line for line in done.stdout.splitlines() if line.startswith("toy.py"))
    assert toy.split()[-1] == "100%", done.stdout
    assert not list(tmp_path.rglob(".coverage.*")), "all data must have been combined"


# --- scripts --------------------------------------------------------------------------------------


def test_a_script_runs_as_a_user_would_run_it(tmp_path: Path) -> None:
    """Its text or its path, with arguments, variables and a directory."""
    source = """
        import os, sys
        print(sys.argv[1:], os.environ["RANK"], os.getcwd())
        sys.exit("no more")
    """
    path = tmp_path / "train.py"
    path.write_text("import sys; print('from a file', file=sys.stderr)")
    done = run_script(source, "--epochs", "3", env=by_hand_env(2), rank=1, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, f"['--epochs', '3'] 1 {tmp_path}\n", "no more\n")
    assert run_script(path).output == "from a file\n"


# Leaves a process behind that is in another session and whose parent has gone.
ORPHAN = """
    import os, subprocess, sys, time
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    subprocess.Popen(command, start_new_session=True, stdout=-3, stderr=-3)
    print("leaving")
"""


def test_an_orphan_of_a_script_is_found_and_killed() -> None:
    """Also one that has moved to another session and lost its parent."""
    with pytest.raises(ScriptFailed, match=r"(?s)still there 0.5 s.*threading.Event.*leaving"):
        run_script(ORPHAN, seconds_to_vanish=0.5)
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
        pids = script.rank_pids()
        assert pids == {0: script.pid, 1: psutil.Process(script.pid).children()[0].pid}
        script.kill(rank=1)
        assert script.wait().returncode == 128 + signal.SIGKILL
        assert script.survivors(5.0) == []


def test_a_rank_of_torchrun_can_be_killed() -> None:
    """A launcher's processes are told apart by ``RANK``."""
    source = """
        import os, sys, threading
        sys.stdout.write(f"started as rank {os.environ['RANK']}\\n")
        threading.Event().wait()
    """
    with start_script(source, launcher=("torchrun", "--standalone", "--nproc-per-node=2")) as script:
        script.wait_for_line("as rank 0")
        script.wait_for_line("as rank 1")
        script.kill(rank=1)
        done = script.wait()
    assert done.returncode == 1
    assert "Signal 9 (SIGKILL) received by PID" in done.output


def test_a_rank_can_print_which_process_it_is() -> None:
    """For ranks that have no variables to tell them apart, because they were forked."""
    source = """
        import os, threading
        for rank in range(2):
            if os.fork() == 0:
                print("harness: rank", rank, "is process", os.getpid(), flush=True)
                threading.Event().wait()
        for _ in range(2):
            print("signal", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    """
    with start_script(source) as script:
        for rank in range(2):
            script.wait_for_line(f"rank {rank} is process")
        script.kill(1)
        script.wait_for_line("signal -9")
        script.kill(0, signal.SIGTERM)
        script.wait_for_line("signal -15")
        assert script.wait().returncode == 0


def test_a_script_that_hangs_ends_with_the_stacks_of_its_processes() -> None:
    """Of the one that was started and of those that it has started."""
    with pytest.raises(ScriptHung, match="had not ended after 1") as caught:
        run_script(LAUNCHER, time_limit=1.0)
    assert str(caught.value).count("Current thread") == 2


def test_waiting_for_a_line_ends_with_the_script() -> None:
    """A line that can no longer come is news at once."""
    with start_script("print('only this')\n") as script, pytest.raises(ScriptFailed, match="only this"):
        script.wait_for_line("something else", timeout=60.0)


def test_the_status_of_a_script_is_kept_when_its_processes_are_looked_at_first() -> None:
    """Looking for survivors must not take away the exit status."""
    with start_script("import sys; sys.exit(3)\n") as script:
        assert script.survivors(10.0) == []
        assert script.wait().returncode == 3


# --- hosts ----------------------------------------------------------------------------------------


def echo(rank: int, world_size: int, address: str, port: int) -> str:
    """Listen on this host, send back what comes, and return who it came from."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family) as server:
        announce("listening")
        connection, peer = server.accept()
        with connection:
            while data := connection.recv(64):
                connection.sendall(data)
    return str(peer[0])


def talk(rank: int, world_size: int, address: str, port: int) -> str | None:
    """Send a word before the cable is cut and one after, and return what comes once it is mended."""
    if rank == 0:
        return echo(rank, world_size, address, port)
    with socket.create_connection((address, port), timeout=5.0) as connection:
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
    address, peer = (two_hosts.address(index, family=family) for index in range(2))
    with RankProcesses(talk, 2, address, 29500, namespaces=list(two_hosts), start=[0]) as ranks:
        ranks.wait_for("listening", 0)
        ranks.start(1)
        assert ranks.wait_for("before", 1) == "one"
        two_hosts.cut()
        ranks.release(1)
        assert ranks.wait_for("while cut", 1) is None
        two_hosts.mend()
        ranks.release(1)
        assert [outcome.result for outcome in ranks.wait()] == [peer, "two"]


def where(rank: int, world_size: int) -> tuple[str, str, Path]:
    return socket.gethostname(), socket.gethostbyname(f"host-{'ab'[rank % 2]}"), Path.cwd()


@pytest.mark.netns
def test_ranks_on_hosts_know_their_names(two_hosts: Network, tmp_path: Path) -> None:
    """Each host has its own name, both names resolve on both, files are shared, the test's own host is untouched."""
    before = socket.gethostname()
    seen = run_ranks(where, 4, namespaces=[*two_hosts, *two_hosts], cwd=tmp_path)
    assert seen == 2 * [("host-a", "10.77.0.1", tmp_path), ("host-b", "10.77.0.2", tmp_path)]
    assert socket.gethostname() == before


@pytest.mark.netns
def test_scripts_run_on_hosts(two_hosts: Network) -> None:
    """A host's prefix keeps the process id, so the script can be signalled."""
    source = """
        import os, socket
        print(os.getpid(), socket.gethostname(), socket.gethostbyname("host-a"))
    """
    with start_script(source, launcher=(*two_hosts[1].prefix, "python")) as script:
        assert script.wait().stdout == f"{script.pid} host-b 10.77.0.1\n"


@pytest.mark.netns
def test_hosts_vanish_with_their_context(two_hosts: Network) -> None:
    """Namespaces and files in /etc are gone, those of other networks stay."""
    theirs = leftovers()
    with network("host-a", "host-b", "host-c") as hosts:
        names = set(leftovers()) - set(theirs)
        assert len(names) == 4
        assert hosts[2].address == "10.77.0.3"
    assert leftovers() == theirs
    assert not [path for path in Path("/etc/netns").iterdir() if path.name in names]


@pytest.mark.parametrize(("ci", "status", "word"), [("", 0, "SKIPPED"), ("true", 1, "CI must run this test")])
def test_without_ip_tests_skip_but_never_in_ci(tmp_path: Path, ci: str, status: int, word: str) -> None:
    """Nobody notices a test that is skipped in CI."""
    done = run_pytest(tmp_path, "def test_hosts(two_hosts): pass\n", PATH=str(tmp_path), CI=ci)
    assert done.returncode == status, done.stdout
    assert word in done.stdout
    assert "need the programs ip, unshare, sh" in done.stdout


# --- leaks ----------------------------------------------------------------------------------------


def test_nothing_is_no_leak() -> None:
    """A test that does nothing, or tidies up, has no leaks."""
    assert Snapshot.take().leaks() == []


def test_leaked_variables_are_named_and_undone() -> None:
    """Added, changed and removed ones."""
    os.environ["HARNESS_A"], os.environ["HARNESS_B"] = "a", "b"
    before = Snapshot.take()
    os.environ["HARNESS_A"], os.environ["HARNESS_C"] = "changed", "c"
    del os.environ["HARNESS_B"]
    leaks = before.leaks()
    assert leaks == [
        "environment variable HARNESS_A='changed' (was 'a')",
        "environment variable HARNESS_B=None (was 'b')",
        "environment variable HARNESS_C='c' (was None)",
    ]
    assert dict(os.environ) == before.environment
    del os.environ["HARNESS_A"], os.environ["HARNESS_B"]


def test_leaked_processes_are_named_and_killed() -> None:
    """A child, and one that has lost its parent."""
    before = Snapshot.take()
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    orphan_maker = f"import subprocess; subprocess.Popen({command!r})"
    child = subprocess.Popen(command, env={})  # without the mark of this test run
    subprocess.run([sys.executable, "-c", orphan_maker], check=True)
    leaks = before.leaks(seconds=0.5)
    assert len(leaks) == 2
    assert all("threading.Event" in line for line in leaks)
    assert child.wait() == -signal.SIGKILL


def test_leaked_threads_are_named() -> None:
    """Those that are no daemons, and ours even if they are."""
    release = threading.Event()
    before = Snapshot.take()
    threads = [
        threading.Thread(target=release.wait, name="user", daemon=False),
        threading.Thread(target=release.wait, name="ddpx-beat", daemon=True),
        threading.Thread(target=release.wait, name="harmless", daemon=True),
    ]
    for thread in threads:
        thread.start()
    leaks = before.leaks(seconds=0.1)
    release.set()
    assert sorted(leaks) == ["thread ddpx-beat", "thread user"]
    for thread in threads:
        thread.join()


def test_leaked_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the working directory, and ours in the system's directory for temporary files."""
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))  # tests beside this one look into the true one
    before = Snapshot.take()
    (temporary / "ddpx-leftover").touch()
    (temporary / "somebody-elses").touch()
    (here / "lightning_logs").mkdir()
    (here / ".coverage.host.1").touch()
    assert set(before.leaks()) == {f"file {temporary / 'ddpx-leftover'}", f"file {here / 'lightning_logs'}"}


def test_a_leaked_directory_change_is_named_and_undone(tmp_path: Path) -> None:
    """The next test starts where it should."""
    before = Snapshot.take()
    os.chdir(tmp_path)
    assert before.leaks() == [f"working directory {tmp_path} (was {before.directory})"]
    assert Path.cwd() == before.directory


def test_a_leaked_process_group_is_named_and_destroyed() -> None:
    """The next test can have its own."""
    before = Snapshot.take()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert before.leaks() == ["process group gloo of 1 ranks"]
    assert not dist.is_initialized()


def test_leaks_fail_a_test(tmp_path: Path) -> None:
    """The fixture is on for every test without being asked for."""
    done = run_pytest(tmp_path, "import os\ndef test_leak(): os.environ['LEAKED'] = 'yes'\n")
    assert done.returncode == 1
    assert "environment variable LEAKED='yes' (was None)" in done.stdout


def run_pytest(directory: Path, tests: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run tests under the harness's own conftest, in a process of their own."""
    (directory / "conftest.py").write_text("from tests.conftest import *\n")
    (directory / "test_inner.py").write_text(tests)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "."],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
    )


def test_the_shared_directory_is_no_temporary_one(shared_dir: Path) -> None:
    """It is empty, and not below what the system calls temporary."""
    assert not shared_dir.is_relative_to(tempfile.gettempdir())
    assert list(shared_dir.iterdir()) == []
