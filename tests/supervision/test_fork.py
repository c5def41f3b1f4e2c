"""How runs end whose ranks a process has started as functions: after a failure, after a kill, after an interrupt.

By fork, from a process that has imported everything already; every test fails if one of its processes is left.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.harness.outcomes import Outcome
from tests.harness.ranks import RankProcesses, announce
from tests.supervision.model import (
    Fault,
    Model,
    announce_third_step,
    boom,
    die,
    leave_at_once,
    make_trainer,
    wait_for_ever,
)
from tests.supervision.test_launchers import lines_of, told, who


def train(rank: int, world_size: int, *faults: Fault, endless: bool = False, directory: Path | None = None) -> None:
    """Start two ranks from a process that is none."""
    faults = Fault("setup", announce_place), Fault("third_step", announce_third_step), *faults
    options = {"max_epochs": -1 if endless else 1, "limit_val_batches": 0, "default_root_dir": directory}
    trainer = make_trainer(2, strategy="ddp_ext_fork", **options)
    trainer.fit(Model(faults))


def announce_place() -> None:
    announce("at work", (dist.get_rank(), os.getpid()))


def pids_of_ranks(launching: RankProcesses, point: str) -> dict[int, int]:
    """Wait until both ranks have come to that point; their process ids by rank."""
    return dict(launching.wait_for(point, 0) for _ in range(2))


def run_with(*faults: Fault) -> tuple[Outcome, dict[int, int]]:
    """How the launching process has ended, and the process ids of the ranks."""
    with RankProcesses(train, 1, *faults) as launching:
        pids = pids_of_ranks(launching, "at work")
        (outcome,) = launching.wait()
    assert outcome.exit_code == 1, outcome.story()
    return outcome, pids


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_first_traceback_is_printed_last_and_once(culprit: int) -> None:
    """The other rank prints one line, and the launching process the traceback of the rank that failed after it."""
    outcome, pids = run_with(Fault("training_step", boom).on(culprit))
    lines = lines_of(outcome.output)
    assert [line for line in lines if line.startswith("[rank")] == [told(culprit, pids)], outcome.output
    assert lines.count('    raise BoomError("no such layer")') == 1, outcome.output
    assert lines[-1] == "tests.supervision.model.BoomError: no such layer", outcome.output


@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_of_a_rank_ends_all_and_is_named(victim: int) -> None:
    """The other rank ends, and so does the launching process; both name the one that died."""
    with RankProcesses(train, 1, endless=True) as launching:
        pids = pids_of_ranks(launching, "in step 3")
        os.kill(pids[victim], signal.SIGKILL)
        (outcome,) = launching.wait()
    assert outcome.exit_code == 1
    lines = lines_of(outcome.output)
    death = f"{who(victim, pids)} died: its process ended unexpectedly; every rank stops."
    assert any(line.startswith(f"[rank {1 - victim}] RankDiedError: {death}") for line in lines), outcome.output
    verdict = f"local {who(victim, pids)} died: it was ended by SIGKILL; the other ranks were stopped"
    assert lines[-1] == f"lightning_ddp_ext.errors.RankDiedError: {verdict}", outcome.output


def test_the_launching_process_names_the_dead_rank_and_not_the_stuck_one() -> None:
    """A rank that only fell because nothing could wake it is not what is reported."""
    outcome, pids = run_with(Fault("training_step", wait_for_ever).on(0), Fault("training_step", die).on(1))
    assert f"[rank 0] RankDiedError: {who(1, pids)} died" in outcome.output, outcome.output
    verdict = f"RankDiedError: local {who(1, pids)} died: it was ended by SIGKILL"
    assert verdict in lines_of(outcome.output)[-1], outcome.output


def test_ranks_that_end_in_the_middle_with_status_0() -> None:
    """The launching process does not wait for results that never come, and names the rank that brings none."""
    outcome, pids = run_with(Fault("on_train_batch_end", leave_at_once))
    error = f"local {who(0, pids)} ended with status 0 in the middle of its work; look for what ends it"
    last = lines_of(outcome.output)[-1]
    assert last.startswith(f"lightning_ddp_ext.errors.RankFailedError: {error}"), outcome.output


def test_a_kill_of_the_launching_process_ends_all(tmp_path: Path) -> None:
    """Ranks that are left alone say why they end; torch interrupts them, too, so they may come to save."""
    with RankProcesses(train, 1, endless=True, directory=tmp_path) as launching:
        pids = pids_of_ranks(launching, "in step 3")
        ranks = [psutil.Process(pid) for pid in pids.values()]
        launching.kill(0)
        (outcome,) = launching.wait()
        assert psutil.wait_procs(ranks, timeout=15.0)[1] == []
        output = launching.output(0)
    line = f"the process that launched this one (pid {outcome.pid}) is gone, so this one ends, too"
    assert any(said.endswith(line) for said in output.splitlines()), output


@pytest.mark.parametrize("to", ["the launching process", "rank 0", "rank 1"])
def test_sigterm_stops_all_ranks_saved(to: str, tmp_path: Path) -> None:
    """Whichever process gets it; the launching one ends with the same status."""
    with RankProcesses(train, 1, endless=True, directory=tmp_path) as launching:
        pids = pids_of_ranks(launching, "in step 3")
        os.kill(launching.pids[0] if to == "the launching process" else pids[int(to[-1])], signal.SIGTERM)
        (outcome,) = launching.wait()
    assert outcome.exit_code == 143, outcome.story()
    assert (tmp_path / "preempted.ckpt").exists()
    assert outcome.output.count("all ranks stop after step") == 1


def test_an_interrupt_of_the_launching_process_alone_ends_the_ranks(tmp_path: Path) -> None:
    """As in a notebook, whose kernel gets the signal and not what it has started."""
    with RankProcesses(train, 1, endless=True, directory=tmp_path) as launching:
        pids_of_ranks(launching, "in step 3")
        launching.kill(0, signal.SIGINT)
        (outcome,) = launching.wait()
    assert outcome.exit_code == 1
    assert "Detected KeyboardInterrupt" in outcome.output
