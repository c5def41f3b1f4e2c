"""How runs end that a launcher has started: after a failure, after the kill of any process, and well.

Scripts here are run as a user runs them. What is so whichever way functions are started is in ``test_fork``, where
nothing is imported anew; what torchrun makes of a killed rank is in ``tests.launchers.test_torchrun``.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.scripts import Script, start_script

SCRIPT = Path(__file__).with_name("script.py")


@dataclass(frozen=True)
class Launcher:
    """How a script is started: ``words`` go before it."""

    strategy: str
    words: tuple[str, ...] = ("python",)

    def __str__(self) -> str:
        return self.words[0] if self.words != ("python",) else self.strategy


POPEN = Launcher("ddp_ext")
SPAWN = Launcher("ddp_ext_spawn")
TORCHRUN = Launcher("ddp_ext", ("torchrun", "--standalone", "--nproc-per-node=2"))


@contextlib.contextmanager
def train(launcher: Launcher, *argv: str, ends_within: float = 15.0) -> Iterator[Script]:
    """The training script under way; fails unless all of its processes end so many seconds after the first."""
    arguments = ("--strategy", launcher.strategy, *argv)
    with start_script(SCRIPT, *arguments, launcher=launcher.words, time_limit=100.0) as script:
        yield script
        script.wait()
        script.expect_no_survivors(ends_within)


def wait_for_ranks(script: Script) -> dict[int, int]:
    """Wait until both ranks are in the third step; their process ids by rank."""
    for rank in range(2):
        script.wait_for_line(rf"^rank {rank} in step 3$", timeout=80.0)
    return script.rank_pids()


def lines_of(stderr: str) -> list[str]:
    """The lines without what torch puts before those of a traceback, without warnings and addresses of errors."""
    text = re.sub(r"^\[rank\d+\]: ?", "", stderr, flags=re.MULTILINE)
    return [
        line for line in text.splitlines() if line.strip() and "LeafSpec" not in line and not line.startswith("See ")
    ]


def who(rank: int, pids: dict[int, int]) -> str:
    return f"rank {rank} (host {socket.gethostname()}, pid {pids[rank]})"


def told(culprit: int, pids: dict[int, int]) -> str:
    """The line of the rank that did not fail."""
    failed = f"{who(culprit, pids)} failed, so this rank stops: BoomError: no such layer"
    return f"[rank {1 - culprit}] RankFailedError: {failed}"


@pytest.mark.parametrize("launcher", [POPEN, TORCHRUN], ids=str)
def test_the_traceback_is_printed_once(launcher: Launcher) -> None:
    """The run fails, the other rank prints one line, and the rank that failed its traceback."""
    with train(launcher, "--fault", "training_step:boom:1") as script:
        done = script.wait()
    lines = lines_of(done.stderr)
    assert done.returncode == 1
    assert [line for line in lines if line.startswith("[rank")] == [told(1, script.rank_pids())], done.output
    assert lines.count('    raise BoomError("no such layer")') == 1, done.output
    assert lines.count("tests.supervision.model.BoomError: no such layer") == 1, done.output


@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_of_a_rank_ends_all_and_is_named(victim: int) -> None:
    """The other rank ends, with its workers, names the one that died, and the script ends."""
    with train(POPEN, "--endless", "--num-workers", "1") as script:
        pids = wait_for_ranks(script)
        os.kill(pids[victim], signal.SIGKILL)
        death = f"{who(victim, pids)} died: its process ended unexpectedly; every rank stops."
        script.wait_for_line(re.escape(f"[rank {1 - victim}] RankDiedError: {death}"))
        done = script.wait()
    assert done.returncode == (-signal.SIGKILL if pids[victim] == script.pid else 1), done.output


def test_a_kill_of_the_launching_process_ends_all() -> None:
    """Ranks that are left alone say why they end."""
    with train(TORCHRUN, "--endless") as script:
        wait_for_ranks(script)
        os.kill(script.pid, signal.SIGKILL)
        line = rf"the process that launched this one \(pid {script.pid}\) is gone, so this one ends, too$"
        script.wait_for_line(line, timeout=60.0)


@pytest.mark.parametrize(
    ("launcher", "verdict"),
    [(POPEN, "ended by SIGKILL before all ranks had connected"), (SPAWN, "died: it was ended by SIGKILL")],
    ids=str,
)
def test_a_kill_during_start_up_is_known_to_the_launcher(launcher: Launcher, verdict: str) -> None:
    """A rank that is killed while it has not imported anything yet is named, long before ``init_timeout``."""
    with train(launcher, "--stay=1") as script:
        script.wait_for_line("^rank 1 begins$", timeout=60.0)
        pids = script.rank_pids()
        script.kill(1)
        done = script.wait()
    assert done.returncode == 1
    assert f"local {who(1, pids)} {verdict}" in lines_of(done.stderr)[-1], done.output


@pytest.mark.parametrize("launcher", [POPEN, SPAWN], ids=str)
def test_ranks_that_are_orphaned_while_they_start_end(launcher: Launcher) -> None:
    """A rank whose launcher is killed while it imports ends when it has imported this package."""
    with train(launcher, ends_within=60.0) as script:
        script.wait_for_line("^rank 1 begins$", timeout=60.0)
        os.kill(script.pid, signal.SIGKILL)


def test_an_interrupt_from_the_terminal_leaves_nobody() -> None:
    """Ctrl-C reaches all processes of a run at once; they stop together, and none takes that for a death."""
    with train(POPEN, "--endless") as script:
        wait_for_ranks(script)
        os.killpg(script.pid, signal.SIGINT)
        done = script.wait()
    assert done.returncode == 130
    assert done.output.count("all ranks stop after step") == 1
    assert "Error" not in done.output


def test_torchruns_sigterm_stops_all_ranks_saved() -> None:
    """The agent passes SIGTERM on to its ranks; they stop together, save, and none is taken for dead."""
    with train(TORCHRUN, "--endless") as script:
        wait_for_ranks(script)
        os.kill(script.pid, signal.SIGTERM)
        done = script.wait()
    assert done.returncode != 0
    assert done.output.count("saved to") == 1
    assert "RankDiedError" not in done.output


def test_the_launching_rank_waits_for_those_that_still_work() -> None:
    """Rank 0 has started the others and ends after them; one that works on after ``fit`` is no orphan."""
    with train(POPEN, "--fault", "after fit:wait_for_another_ranks_end:1") as script:
        done = script.wait()
        assert script.survivors() == []
    assert done.returncode == 0, done.output
    assert "rank 1 is at the end" in done.output.splitlines(), done.output
