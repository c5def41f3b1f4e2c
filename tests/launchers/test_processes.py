"""Spawn, fork and forkserver: the script stays as it is, and its ranks are processes that run a function."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import lightning.pytorch as pl
import pytest

import lightning_ddp_ext as ddpx
from lightning_ddp_ext.errors import RankDiedError
from tests.harness.ranks import run_ranks
from tests.harness.scripts import run_script
from tests.launchers.runs import (
    METHODS,
    SCRIPT,
    Reference,
    Run,
    argv_of,
    output_of,
    results_of_tests,
    run_by_hand,
    runs_by,
)
from tests.launchers.train import Regression


def test_a_script_by_forkserver(tmp_path: Path, reference: Reference) -> None:
    """What the ranks have learned comes home, and a second call starts ranks with it; other Trainers meet elsewhere."""
    env, tcp, file = runs = runs_by(METHODS, tmp_path)
    output = output_of(run_script(SCRIPT, *argv_of(runs), "--start-method", "forkserver", "--calls", "fit", "test"))
    for run, launches in ((env, 2), (tcp, 1), (file, 1)):
        run.expect_trained(reference(2), output, returns=3, launches=launches)
    assert results_of_tests(output) == [reference(2).test_results]


@pytest.mark.parametrize(("start_method", "method"), [("spawn", "env"), *(("fork", method) for method in METHODS)])
def test_ranks_meet_where_they_are_told_to(
    start_method: str, method: str, tmp_path: Path, reference: Reference
) -> None:
    """Ranks can be started from any process, also from one that runs no script, and the init method is theirs."""
    run = Run(tmp_path, method)
    output = run_by_hand([*run.argv, "--start-method", start_method], {}, world_size=1, time_limit=90.0)
    run.expect_trained(reference(2), output, returns=1)


def test_ranks_meet_over_ipv6(ipv6: None, tmp_path: Path, reference: Reference) -> None:
    """The process that starts the ranks listens there."""
    run = Run(tmp_path, "ipv6")
    run.expect_trained(reference(2), run_by_hand([*run.argv, "--start-method", "fork"], {}, world_size=1), returns=1)


def test_ranks_meet_in_a_directory(tmp_path: Path, reference: Reference) -> None:
    """The process that starts the ranks names the file, anew for each start."""
    run = Run(tmp_path, "directory")
    output = run_by_hand([*run.argv, "--start-method", "fork", "--calls", "fit", "test"], {}, world_size=1)
    run.expect_trained(reference(2), output, returns=1, launches=2)
    assert results_of_tests(output) == [reference(2).test_results]


class KillRank1(pl.Callback):
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.strategy.barrier()


def start_in_vain(rank: int, world_size: int, directory: str) -> None:
    strategy = ddpx.DDPExtStrategy(f"file://{directory}/", start_method="fork")
    trainer = pl.Trainer(strategy=strategy, devices=2, accelerator="cpu", callbacks=[KillRank1()], logger=False)
    with pytest.raises(RankDiedError):
        trainer.fit(Regression())


def test_killed_ranks_leave_nothing_in_a_directory(tmp_path: Path) -> None:
    """Their file has a name of its own, so that no later run would take it away."""
    run_ranks(start_in_vain, 1, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
