"""How runs end that a launcher has started: after a failure, after the kill of any process, and well.

Scripts here are run as a user runs them. What is so whichever way functions are started is in ``test_fork``, where
nothing is imported anew; what torchrun makes of a killed rank is in ``tests.launchers.test_launchers``.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_ddp_ext.supervision.rank_processes import ChildScripts
from tests.harness.scripts import Script, start_script
from tests.supervision.model import who

SCRIPT = Path(__file__).with_name("script.py")


TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node=2")
STRATEGIES = ("ddp_ext", "ddp_ext_spawn")


@contextlib.contextmanager
def train(*what: str, strategy: str = "ddp_ext", ends_within: float = 15.0, **options: Any) -> Iterator[Script]:
    """The training script under way; fails unless all of its processes end so many seconds after the first."""
    with start_script(SCRIPT, strategy, *what, time_limit=100.0, **options) as script:
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


def told(culprit: int, pids: dict[int, int]) -> str:
    """The line of the rank that did not fail."""
    failed = f"{who(culprit, pids[culprit])} failed, so this rank stops: BoomError: no such layer"
    return f"[rank {1 - culprit}] RankFailedError: {failed}"


def test_the_traceback_is_printed_once() -> None:
    """The run fails, the other rank prints one line, and the rank that failed its traceback."""
    with train("fails") as script:
        done = script.wait()
    lines = lines_of(done.stderr)
    assert done.returncode == 1
    assert [line for line in lines if line.startswith("[rank")] == [told(1, script.rank_pids())], done.output
    assert lines.count('    raise BoomError("no such layer")') == 1, done.output
    assert lines.count("tests.supervision.model.BoomError: no such layer") == 1, done.output


@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_of_a_rank_ends_all_and_is_named(victim: int) -> None:
    """The other rank ends, with its workers, names the one that died, and the script ends."""
    with train("endless", "with-workers") as script:
        pids = wait_for_ranks(script)
        os.kill(pids[victim], signal.SIGKILL)
        death = f"{who(victim, pids[victim])} died: its process ended unexpectedly; every rank stops."
        script.wait_for_line(re.escape(f"[rank {1 - victim}] RankDiedError: {death}"))
        done = script.wait()
    assert done.returncode == (-signal.SIGKILL if pids[victim] == script.pid else 1), done.output


def test_a_kill_of_the_launching_process_ends_all() -> None:
    """Ranks that are left alone say why they end."""
    with train("endless", launcher=TORCHRUN) as script:
        wait_for_ranks(script)
        os.kill(script.pid, signal.SIGKILL)
        line = rf"the process that launched this one \(pid {script.pid}\) is gone, so this one ends, too$"
        script.wait_for_line(line, timeout=60.0)


@pytest.mark.parametrize(
    ("strategy", "verdict"),
    [
        ("ddp_ext", "ended by SIGKILL before all ranks had connected"),
        ("ddp_ext_spawn", "died: it was ended by SIGKILL"),
    ],
)
def test_a_kill_during_start_up_is_known_to_the_launcher(strategy: str, verdict: str) -> None:
    """A rank that is killed while it has not imported anything yet is named, long before ``init_timeout``."""
    with train("stays", strategy=strategy) as script:
        script.wait_for_line("^rank 1 begins$", timeout=60.0)
        pids = script.rank_pids()
        script.kill(1)
        done = script.wait()
    assert done.returncode == 1
    assert f"local {who(1, pids[1])} {verdict}" in lines_of(done.stderr)[-1], done.output


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_are_orphaned_while_they_start_end(strategy: str) -> None:
    """A rank whose launcher is killed while it imports ends when it has imported this package."""
    with train(strategy=strategy, ends_within=60.0) as script:
        script.wait_for_line("^rank 1 begins$", timeout=60.0)
        os.kill(script.pid, signal.SIGKILL)


def test_an_interrupt_from_the_terminal_leaves_nobody() -> None:
    """Ctrl-C reaches all processes of a run at once; they stop together, and none takes that for a death."""
    with train("endless") as script:
        wait_for_ranks(script)
        os.killpg(script.pid, signal.SIGINT)
        done = script.wait()
    assert done.returncode == 130
    assert done.output.count("all ranks stop after step") == 1
    assert "Error" not in done.output


def test_torchruns_sigterm_stops_all_ranks_saved() -> None:
    """The agent passes SIGTERM on to its ranks; they stop together, save, and none is taken for dead."""
    with train("endless", launcher=TORCHRUN) as script:
        wait_for_ranks(script)
        os.kill(script.pid, signal.SIGTERM)
        done = script.wait()
    assert done.returncode != 0
    assert done.output.count("saved to") == 1
    assert "RankDiedError" not in done.output


def test_the_launching_rank_waits_for_those_that_still_work(tmp_path: Path) -> None:
    """Rank 0 has started the others and ends after them; one that works on after ``fit`` is no orphan."""
    with train("lingers", env={"DDPX_INIT_METHOD": f"file://{tmp_path}/store"}) as script:
        done = script.wait()
        assert script.survivors() == []
    assert done.returncode == 0, done.output
    assert "rank 1 is at the end" in done.output.splitlines(), done.output
    assert f"process group: gloo, 2 ranks, file://{tmp_path}/store" in done.output


@pytest.mark.slow
def test_a_child_that_is_stuck_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that has ended says for which rank it waits, and kills it when it has waited long enough."""
    monkeypatch.delattr(sys, "last_value", raising=False)  # of another test that has failed
    with subprocess.Popen(["sleep", "99"]) as child:
        ChildScripts([child], at_most=0.1).wait()
    assert child.returncode == -signal.SIGKILL
    assert f"waiting for local rank 1 (pid {child.pid}) to end, too" in capsys.readouterr().err
