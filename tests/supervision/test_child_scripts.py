"""A script that starts its ranks ends with them, and reports those that fail.

Its process is one of the harness, which has imported everything. Every test fails if one of
its processes is left.

``tests.launchers.test_launchers`` has torchrun, and ``tests.faults`` kills in the middle of
training.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_ddp_ext.supervision.started_ranks import ChildScripts
from tests.harness.environment import MARK, marked, wait_until_exited
from tests.harness.ranks import RankProcesses, free_port, rank_name
from tests.harness.scripts import be_the_script, run_script

# Trains with the strategy of the first argument. The second one is what rank 1 does:
# ``stays`` before it imports anything; or ``lingers``, ``raises`` or ``dies`` after the
# training; or none of these. Rank 1 prints that it begins, and each rank that it ends.
TRAINS = """
import atexit
import multiprocessing
import os
import sys
import threading


def print_line(text):
    sys.stdout.write(f"{text}\\n")
    sys.stdout.flush()


def is_rank_one():
    # Known before any import: by the variable of a script, or the name of a spawned process,
    # the second one of its parent, such as SpawnProcess-7:2.
    name = multiprocessing.current_process().name
    is_second = name.startswith("SpawnProcess") and name.endswith(("-2", ":2"))
    return is_second or os.environ.get("LOCAL_RANK") == "1"


if is_rank_one():
    print_line(f"rank 1 begins as process {os.getpid()}")
    if "stays" in sys.argv:
        threading.Event().wait()

import lightning_ddp_ext
from tests.harness import training

AFTER_FIT = {
    "lingers": training.wait_for_another_ranks_end,
    "raises": training.boom,
    "dies": training.die,
}


def main(strategy, action):
    trainer = training.make_trainer(strategy, max_epochs=1, limit_val_batches=0)
    if action in AFTER_FIT:
        atexit.register(print, "exit handlers ran")  # buffered, and registered before ours
    trainer.fit(training.Net())
    if trainer.global_rank == 1 and action in AFTER_FIT:
        AFTER_FIT[action]()
    print_line(f"rank {trainer.global_rank} is at the end")


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def training_script(
    directory: Path, strategy: str, action: str = "none", **env: str
) -> RankProcesses:
    """Return the only process of the harness that runs the script; it starts the ranks."""
    path = directory / "script.py"
    path.write_text(TRAINS)
    return RankProcesses(
        be_the_script,
        1,
        path,
        (strategy, action),
        directory,
        env={**env, MARK: mark_of_script()},
    )


def mark_of_script() -> str:
    """Return the mark of the script and all processes that it starts."""
    return f"{os.environ[MARK]}/script"


def wait_for_rank_one(script: RankProcesses) -> int:
    """Wait until rank 1 has started, before it imports anything; return its process id."""
    begins = "rank 1 begins as process "
    return int(script.wait_for_output(begins, 0).partition(begins)[2].split()[0])


@pytest.mark.parametrize(
    ("strategy", "verdict"),
    [
        ("ddp_ext", "was killed by SIGKILL before all ranks had connected"),
        pytest.param("ddp_ext_spawn", "died: it was killed by SIGKILL", marks=pytest.mark.nightly),
    ],
)
def test_a_kill_during_start_up_is_reported_by_the_launcher(
    strategy: str, verdict: str, tmp_path: Path
) -> None:
    """The error names a rank that was killed before it imported anything, long before
    ``init_timeout``.
    """
    with training_script(tmp_path, strategy, "stays") as script:
        pid = wait_for_rank_one(script)
        os.kill(pid, signal.SIGKILL)
        (done,) = script.wait()
    assert done.exit_code == 1
    assert f"local {rank_name(1, pid)} {verdict}" in done.output, done.output


@pytest.mark.nightly
def test_a_rank_that_is_orphaned_while_it_starts_ends(tmp_path: Path) -> None:
    """If its launcher is killed during the imports, the rank exits once it looks for it."""
    url = f"tcp://127.0.0.1:{free_port()}"
    with training_script(tmp_path, "ddp_ext", DDPX_INIT_METHOD=url) as script:
        wait_for_rank_one(script)
        script.kill(0)
        script.wait()
        assert not wait_until_exited(lambda: marked(mark_of_script()), 60.0)


@pytest.mark.nightly
def test_the_launching_rank_waits_for_those_that_still_work(tmp_path: Path) -> None:
    """Rank 0 started the others and exits after them; a rank that still works after
    ``fit`` is not an orphan.
    """
    url = f"file://{tmp_path}/store"
    with training_script(tmp_path, "ddp_ext", "lingers", DDPX_INIT_METHOD=url) as script:
        (done,) = script.wait()
        assert not marked(mark_of_script())
    assert done.exit_code == 0, done.output
    assert "rank 1 is at the end" in done.output.splitlines(), done.output
    assert f"process group: gloo, 2 ranks, {url}" in done.output


@pytest.mark.parametrize(
    ("action", "verdict", "exit_handlers"),
    [
        # Those of rank 0 and of rank 1.
        pytest.param("raises", "exited with status 1", 2, marks=pytest.mark.nightly),
        ("dies", "was killed by SIGKILL", 1),
    ],
)
def test_a_script_reports_a_rank_that_failed_after_fit(
    action: str, verdict: str, exit_handlers: int
) -> None:
    """It started this rank, and exits with its own status."""
    output = run_script(TRAINS, "ddp_ext", action)
    # Not at the beginning of a line: a library's report at exit may lack a final line break.
    assert re.search(rf"local rank 1 \(pid \d+\) {verdict}$", output, re.MULTILINE), output
    assert output.count("exit handlers ran\n") == exit_handlers, output


def join_at_exit(
    child: subprocess.Popen[bytes], save_within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit as a rank that waits 0.1 s for its child, and then ``save_within`` seconds between
    SIGTERM and SIGKILL.
    """
    monkeypatch.delattr(sys, "last_value", raising=False)  # of another test that has failed
    ChildScripts([child], {}, exit_within=0.1, save_within=save_within).join_at_exit()


def test_a_stuck_child_is_stopped_after_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that has finished stops a rank that it started, and names it."""
    with subprocess.Popen(["sleep", "99"]) as child:
        join_at_exit(child, 60.0, monkeypatch)
        assert child.returncode == -signal.SIGTERM
    assert capsys.readouterr().err == (
        f"local rank 1 (pid {child.pid}) did not exit within 0.1 s and was stopped\n"
    )


class InTheKernel(subprocess.Popen[bytes]):
    """A process that no signal ends, as one that waits for a broken device."""

    def send_signal(self, sig: int) -> None:
        pass


def test_a_child_that_no_signal_ends_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script exits, although the rank does not."""
    with InTheKernel(["sleep", "99"]) as child:
        join_at_exit(child, 0.1, monkeypatch)
        assert child.returncode is None
        subprocess.Popen.send_signal(child, signal.SIGKILL)
    assert capsys.readouterr().err == (
        f"local rank 1 (pid {child.pid}) is still running although it was killed\n"
    )
