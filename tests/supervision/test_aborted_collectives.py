"""A rank in an aborted collective names the rank that died. With NCCL, the collective
returns arbitrary values, and the abort may never return; gloo plays NCCL's part.
"""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext.errors import RankDiedError
from lightning_ddp_ext.rendezvous.process_group import ProcessGroups
from tests.harness.ranks import Outcome, RankProcesses, error_of, hold
from tests.harness.training import At, Net, fit


class LikeNCCL:
    """Makes collectives of this process wait for their abort, and then return zeros, as
    NCCL's do. It replaces torch's functions, because no option has this effect.
    """

    def __init__(self, *, abort_returns: bool) -> None:
        self.abort_returns = abort_returns
        self.is_aborted = threading.Event()

    def install(self) -> None:
        ProcessGroups.uses_nccl = property(lambda self: True)
        dist.distributed_c10d._abort_process_group = self.abort
        dist.broadcast = partial(self.call, dist.broadcast)
        dist.all_reduce = partial(self.call, dist.all_reduce)

    def abort(self) -> None:
        self.is_aborted.set()
        if not self.abort_returns:
            threading.Event().wait()

    def call(self, collective: Any, received: torch.Tensor, *args: Any, **options: Any) -> None:
        try:
            collective(received, *args, **options)
        except RuntimeError:
            self.is_aborted.wait()
            received.zero_()


def exchange(trainer: Any) -> None:
    """Wait for work of rank 0, which dies in it."""
    trainer.strategy.on_rank_zero(lambda: hold("working"), what="work")


def compare(trainer: Any) -> None:
    """Use a reduced value in a way that fails if it is arbitrary."""
    if trainer.global_rank == 0:
        hold("working")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == trainer.world_size


def train(rank: int, world_size: int, directory: Path, work: Any, *, abort_returns: bool) -> None:
    """On a rank: do some work after each step; rank 1 behaves as if it used NCCL."""
    stand_in = LikeNCCL(abort_returns=abort_returns)
    install = At("on_fit_start", lambda trainer: stand_in.install(), ranks=[1])
    fit("ours", directory, Net(), install, At("on_train_batch_end", work))


def kill_rank_zero_in(work: Any, directory: Path, *, abort_returns: bool) -> list[Outcome]:
    """Kill rank 0 in its work, for which rank 1 waits; return how both ended."""
    with RankProcesses(train, 2, directory, work, abort_returns=abort_returns) as ranks:
        ranks.wait_for("working", 0)
        ranks.kill(0)
        return ranks.wait()


@pytest.mark.parametrize("work", [exchange, compare])
def test_arbitrary_values_after_a_death_name_the_dead_rank(work: Any, tmp_path: Path) -> None:
    """A survivor raises the same error as with gloo, in the place of one that follows
    from arbitrary values.
    """
    died, survivor = kill_rank_zero_in(work, tmp_path, abort_returns=True)
    error_of(survivor, RankDiedError, 0, died.pid)


def test_an_abort_that_never_returns_does_not_keep_the_process(tmp_path: Path) -> None:
    """The survivor raises the error, and exits."""
    _, survivor = kill_rank_zero_in(exchange, tmp_path, abort_returns=False)
    assert survivor.exit_code == 1, survivor.story()
    assert "RankDiedError: rank 0" in survivor.output, survivor.story()
