"""How runs end whose ranks a process has started as functions: after a failure, after a kill, after a signal.

By fork, from a process that has imported everything already; every test fails if one of its processes is left.
"""

from __future__ import annotations

import signal
from pathlib import Path

import psutil

from tests.harness.outcomes import Outcome
from tests.harness.ranks import RankProcesses
from tests.harness.training import Net
from tests.supervision import model
from tests.supervision.model import IN_THIRD_STEP, Fault, announce_step, boom, die, in_step, make_trainer, who
from tests.supervision.test_launchers import lines_of, told


def train(rank: int, world_size: int, directory: Path, *faults: Fault, endless: bool = False) -> None:
    """Start two ranks from a process that is none."""
    options = {"max_epochs": -1 if endless else 1, "limit_val_batches": 0, "default_root_dir": directory}
    make_trainer(2, "ddp_ext_fork", *faults, **options).fit(Net())


def pids_of_ranks(launching: RankProcesses) -> dict[int, int]:
    """Wait until both ranks have announced a step; their process ids by rank."""
    return dict(launching.wait_for("at work", 0) for _ in range(2))


def run_with(directory: Path, *faults: Fault) -> tuple[Outcome, dict[int, int]]:
    """How the launching process has ended, and the process ids of the ranks."""
    with RankProcesses(train, 1, directory, Fault("setup", announce_step), *faults) as launching:
        pids = pids_of_ranks(launching)
        (outcome,) = launching.wait()
    assert outcome.exit_code == 1, outcome.story()
    return outcome, pids


def test_the_first_traceback_is_printed_last_and_once(tmp_path: Path) -> None:
    """The other rank prints one line, and the launching process the traceback of the rank that failed after it."""
    outcome, pids = run_with(tmp_path, in_step(boom, 1))
    lines = lines_of(outcome.output)
    assert [line for line in lines if line.startswith("[rank")] == [told(pids[1])], outcome.output
    assert lines.count('    raise BoomError("no such layer")') == 1, outcome.output
    assert lines[-1] == "tests.supervision.model.BoomError: no such layer", outcome.output


def test_the_launching_process_names_the_dead_rank_and_not_the_stuck_one(tmp_path: Path) -> None:
    """A rank that only fell because nothing could wake it is not what is reported."""
    outcome, pids = run_with(tmp_path, in_step(model.wait_for_ever, 0), in_step(die, 1))
    death = f"{who(1, pids[1])} died: its process ended unexpectedly; every rank stops."
    lines = lines_of(outcome.output)
    assert any(line.startswith(f"[rank 0] RankDiedError: {death}") for line in lines), outcome.output
    verdict = f"local {who(1, pids[1])} died: it was ended by SIGKILL; the other ranks were stopped"
    assert lines[-1] == f"lightning_ddp_ext.errors.RankDiedError: {verdict}", outcome.output


def leave() -> None:
    raise SystemExit(0)


def test_ranks_that_end_in_the_middle_with_status_0(tmp_path: Path) -> None:
    """The launching process does not wait for results that never come, and names the rank that brings none."""
    outcome, pids = run_with(tmp_path, in_step(leave))
    error = f"local {who(0, pids[0])} ended with status 0 in the middle of its work; look for what ends it"
    last = lines_of(outcome.output)[-1]
    assert last.startswith(f"lightning_ddp_ext.errors.RankFailedError: {error}"), outcome.output


def test_sigterm_to_the_launching_process_stops_all_ranks_saved(tmp_path: Path) -> None:
    """It ends with the same status as they."""
    with RankProcesses(train, 1, tmp_path, IN_THIRD_STEP, endless=True) as launching:
        pids_of_ranks(launching)
        launching.kill(0, signal.SIGTERM)
        (outcome,) = launching.wait()
    assert outcome.exit_code == 143, outcome.story()
    assert (tmp_path / "preempted.ckpt").exists()
    assert outcome.output.count("all ranks stop after step") == 1


def test_a_kill_of_the_launching_process_ends_the_ranks(tmp_path: Path) -> None:
    """Whatever their main threads are doing."""
    stuck = Fault("on_train_batch_start", model.wait_for_ever, earlier=2)
    with RankProcesses(train, 1, tmp_path, IN_THIRD_STEP, stuck) as launching:
        ranks = [psutil.Process(pid) for pid in pids_of_ranks(launching).values()]
        launching.kill(0)
        assert psutil.wait_procs(ranks, 15)[1] == []


def test_an_interrupt_of_the_launching_process_alone_ends_the_ranks(tmp_path: Path) -> None:
    """As in a notebook, whose kernel gets the signal and not what it has started."""
    with RankProcesses(train, 1, tmp_path, IN_THIRD_STEP, endless=True) as launching:
        pids_of_ranks(launching)
        launching.kill(0, signal.SIGINT)
        (outcome,) = launching.wait()
    assert outcome.exit_code == 1
    assert "Detected KeyboardInterrupt" in outcome.output
