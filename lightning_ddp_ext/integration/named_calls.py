"""Use the ranks' connections in Lightning's hooks.

Calls that every rank must make have names. If a rank skips one, the error of all ranks
names the call and this rank. If other code has connected the ranks, as with a stock
strategy, nothing is checked.
"""

from __future__ import annotations

from typing import NoReturn

import torch.distributed as dist

from lightning_ddp_ext.ranks import Ranks
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.supervision.stacks import call_site

from .private.lightning_tree import pl


def enter_call(what: str, *, remedy: str = "") -> bool:
    """Wait until every rank makes this call, and return true.

    Return false without a wait if this package has not connected the ranks, since they
    need not make the same calls then.
    """
    context = current()
    if context is None or not context.groups.owns_default:
        return False
    context.barriers.enter(what, call_site(), remedy=remedy)
    return True


def enter_broadcast(src: int, caller: object, *, is_training: bool) -> None:
    """Wait until every rank begins this broadcast.

    Otherwise gloo would abort a process that is in a collective of another size. A
    callback may broadcast in every batch, for example for ``max_time``, and does not
    wait.
    """
    if is_training and isinstance(caller, pl.Callback):
        return
    remedy = "read properties that broadcast, such as trainer.log_dir, on every rank"
    enter_call(f"a broadcast from rank {src}", remedy=remedy)


def enter_decision(caller: object) -> None:
    """Wait until every rank begins the decision of the callback ``caller``, or another."""
    what = "a decision of all ranks (reduce_boolean_decision)"
    if isinstance(caller, pl.Callback):
        what = f"a decision of {type(caller).__name__}"
    monitor = getattr(caller, "monitor", None)
    remedy = f"log {monitor!r} on every rank, in the same steps" if monitor else ""
    enter_call(what, remedy=remedy)


def report_step() -> None:
    """Advance this rank's step counter.

    A call that the rank did not make before then counts as skipped.
    """
    context = current()
    if context is not None:
        context.barriers.advance()


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

    A strategy of one rank may run in a process that is one of several ranks elsewhere.
    """
    world_size = getattr(strategy, "world_size", 1) if dist.is_initialized() else 1
    rank = dist.get_rank() if world_size > 1 else 0
    context = current()
    if context is None or world_size == 1:
        return Ranks(rank, world_size, strategy.root_device)
    return Ranks(rank, world_size, strategy.root_device, check=context.peers.check)


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
