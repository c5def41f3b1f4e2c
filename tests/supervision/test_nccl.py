"""With NCCL, an aborted collective returns arbitrary values, and an abort may never
return; gloo plays its part.
"""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext.errors import RankDiedError
from lightning_ddp_ext.integration.strategy_ranks import ranks_of
from lightning_ddp_ext.rendezvous.process_group import ProcessGroups
from tests.harness.ranks import RankProcesses, error_of, hold
from tests.harness.training import At, Net, fit


class LikeNCCL:
    """Makes collectives of this process wait for their abort, and then return zeros, as
    NCCL's do.
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
    ranks_of(trainer.strategy).on_rank_zero(lambda: hold("working"), "work")


def compare(trainer: Any) -> None:
    """Use a reduced value in a way that fails if it is arbitrary."""
    if trainer.global_rank == 0:
        hold("working")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == trainer.world_size


def train(
    rank: int, world_size: int, directory: Path, work: Any, *, abort_returns: bool = True
) -> None:
    """Do some work after each step; rank 1 behaves as if it used NCCL."""
    stand_in = LikeNCCL(abort_returns=abort_returns)
    install = At("on_fit_start", lambda trainer: stand_in.install(), ranks=[1])
    fit("ours", directory, Net(), install, At("on_train_batch_end", work))


@pytest.mark.parametrize("work", [exchange, compare])
def test_arbitrary_values_after_a_death_name_the_dead_rank(work: Any, tmp_path: Path) -> None:
    """A survivor raises the same error as with gloo, in the place of one that follows
    from arbitrary values.
    """
    with RankProcesses(train, 2, tmp_path, work) as ranks:
        ranks.wait_for("working", 0)
        ranks.kill(0)
        died, survivor = ranks.wait()
    error_of(survivor, RankDiedError, 0, died.pid)


def test_an_abort_that_never_returns_does_not_keep_the_process(tmp_path: Path) -> None:
    """The survivor raises the error, and exits."""
    with RankProcesses(train, 2, tmp_path, exchange, abort_returns=False) as ranks:
        ranks.wait_for("working", 0)
        ranks.kill(0)
        _, survivor = ranks.wait()
    assert survivor.exit_code == 1, survivor.story()
    assert "RankDiedError: rank 0" in survivor.output, survivor.story()
