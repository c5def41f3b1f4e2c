"""Ranks that a process forks as functions end with it, and it names the rank that ends first.

The process that forks them is not a rank; it is one of the harness, which has imported
everything. The other start methods differ only in their imports. Every test fails if one of
its processes is left.
"""

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_ddp_ext import DDPExtStrategy
from tests.harness.ranks import RankProcesses, announce, rank_name
from tests.harness.training import At, Net, boom, die, in_step, make_trainer, wait_for_ever


def fork_ranks(
    rank: int, world_size: int, directory: Path, *callbacks: At, max_epochs: int, save_deadline: int
) -> None:
    """Train on two ranks that this process forks; the deadline is also that of a survivor in
    its step.
    """
    make_trainer(
        DDPExtStrategy(start_method="fork", save_deadline=save_deadline),
        callbacks=[*callbacks],
        max_epochs=max_epochs,
        limit_val_batches=0,
        default_root_dir=directory,
    ).fit(Net())


def announce_step(*_: object) -> None:
    announce("at work", (dist.get_rank(), os.getpid()))


def pids_of_ranks(launching: RankProcesses) -> dict[int, int]:
    """Wait until both ranks have announced a step; their process ids by rank."""
    return dict(launching.wait_for("at work", 0) for _ in range(2))


def leave(*_: object) -> None:
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("faults", "culprit", "sentences"),
    [
        pytest.param(
            [in_step(boom, 1)],
            1,
            [
                "[rank 0] RankFailedError: {} failed, so this rank stops: BoomError: no such layer",
                '    raise BoomError("no such layer")',  # in the traceback of rank 1
            ],
            id="raises",
        ),
        pytest.param(
            [in_step(wait_for_ever, 0), in_step(die, 1)],
            1,
            [
                "[rank 0] RankDiedError: {} died: its process ended unexpectedly; every rank"
                " stops.",
                "errors.RankDiedError: local {} died: it was killed by SIGKILL; the other ranks"
                " were",
            ],
            id="dies",
        ),
        pytest.param(
            [in_step(leave)],
            0,
            ["errors.RankFailedError: local {} exited with status 0 before it finished its work;"],
            id="exits with status 0",
        ),
    ],
)
def test_the_launching_process_names_a_rank_that_ends_early(
    faults: list[At], culprit: int, sentences: list[str], tmp_path: Path
) -> None:
    """It raises the exception of the rank, or an error with the reason; a rank in its step
    prints a line.
    """
    with RankProcesses(
        fork_ranks,
        1,
        tmp_path,
        At("setup", announce_step),
        *faults,
        max_epochs=1,
        save_deadline=5,
    ) as launching:
        pids = pids_of_ranks(launching)
        (outcome,) = launching.wait()
    assert outcome.exit_code == 1, outcome.story()
    for sentence in sentences:
        assert sentence.format(rank_name(culprit, pids[culprit])) in outcome.output, outcome.story()


@pytest.mark.parametrize(
    ("number", "status", "sentence"),
    [
        (signal.SIGTERM, 143, "all ranks stop after step"),
        (signal.SIGINT, 1, "Detected KeyboardInterrupt"),
    ],
)
def test_a_signal_to_the_launching_process_alone_ends_the_ranks(
    number: int, status: int, sentence: str, tmp_path: Path
) -> None:
    """The ranks save and stop; SIGTERM and Ctrl-C give different exit statuses.

    In a notebook, only the kernel gets Ctrl-C, not its children.
    """
    with RankProcesses(
        fork_ranks,
        1,
        tmp_path,
        At("on_train_batch_start", announce_step, earlier=2),
        max_epochs=-1,
        save_deadline=60,
    ) as launching:
        pids_of_ranks(launching)
        launching.kill(0, number)
        (outcome,) = launching.wait()
    assert outcome.exit_code == status, outcome.story()
    # Lightning would announce a default of `save_checkpoint`, which the user has not called.
    assert [t for t in (sentence, "weights_only") if t in outcome.output] == [sentence], (
        outcome.story()
    )
    assert list(tmp_path.rglob("last-preempted.ckpt"))
