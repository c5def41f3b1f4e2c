"""Give access to a strategy's ranks: to call them together, and to judge what they hold.

``ranks_of`` is the way to all ranks; the other functions answer single questions about their
values, weights, optimisers and groups.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist

from lightning_ddp_ext.errors import RankFailedError
from lightning_ddp_ext.ranks import Ranks
from lightning_ddp_ext.rendezvous.process_context import ProcessContext, current

from .private.lightning_tree import pl


def check_received() -> None:
    """Raise the error of the rank that failed if received values may be arbitrary.

    NCCL's collectives return when they are aborted, so this must be called before a
    received value is used.
    """
    context = current()
    if context is not None and context.has_arbitrary_values:
        context.peers.check()


def ranks_of(strategy: pl.strategies.Strategy) -> Ranks:
    """Return the ranks of a strategy, as this rank sees them.

    A strategy of one rank may run in a process that is one of several ranks of another
    strategy.
    """
    # The base class of Lightning's strategies has no `world_size`.
    world_size = getattr(strategy, "world_size", 1) if dist.is_initialized() else 1
    rank = dist.get_rank() if world_size > 1 else 0
    context = current()
    if context is None or world_size == 1:
        return Ranks(rank, world_size, strategy.root_device)
    return Ranks(
        rank,
        world_size,
        strategy.root_device,
        check=context.peers.check,
        check_received=check_received,
        settle=partial(_wait_at_end, context),
    )


def _wait_at_end(context: ProcessContext, what: str) -> None:
    """Wait until all ranks have the error of the work, or until another rank fails.

    The caller raises the error of the work even then.
    """
    with suppress(RankFailedError):
        context.barriers.enter(f"the end of {what}", name=f"the end of {kind_of(what)}")


def kind_of(work: str) -> str:
    """Return the first word of a description of work, as the name of a barrier.

    The name must be the same on all ranks, but a path, which may differ by rank, may follow
    the word.

    >>> kind_of("saving last.ckpt")
    'saving'
    """
    return work.partition(" ")[0]


def may_have_partial_sums(strategy: pl.strategies.Strategy) -> bool:
    """Whether an abort of NCCL may have made an optimiser step use partial sums.

    With NCCL, first wait for the devices, as copying the weights would. Until then, an
    optimiser step may be queued behind a collective that a dead rank has left, and that is
    aborted only later.
    """
    context = current()
    if context is None or not context.groups.uses_nccl:
        return False
    for device in getattr(strategy, "rank_devices", [strategy.root_device]):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return context.groups.has_aborted_nccl


def is_sharded(optimizer: object) -> bool:
    """Whether each rank has only a shard of the optimiser's state."""
    classes = [base.__name__ for base in type(optimizer).__mro__]
    return "ZeroRedundancyOptimizer" in classes  # by name, because importing it is slow


def group_of_small_collectives() -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks, or ``None`` if they are connected by other code.

    ``None`` stands for the default group. Collective the first time.
    """
    context = current()
    if context is None:
        return None
    return context.new_group(backend="gloo", purpose="small collectives")


def refuse(strategy: pl.strategies.Strategy, error: Exception) -> NoReturn:
    """Raise an error that every rank has found, after a barrier.

    Without the barrier, slower ranks may report another failure. Collective: every rank
    must call it.
    """
    strategy.barrier("before an error")
    raise error
