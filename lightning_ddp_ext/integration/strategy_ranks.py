"""Make calls on all ranks of a strategy together, and name them in errors.

Before a **named call**, each rank waits until all ranks make it. If one skips it or makes
another call, the error on every rank names the call and that rank. In the call, the ranks
exchange values by :func:`ranks_of` or by Lightning's own collectives. As NCCL's return when
they are aborted, the functions of the last section check what they have left.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist

from lightning_ddp_ext.errors import RankFailedError
from lightning_ddp_ext.ranks import Ranks
from lightning_ddp_ext.rendezvous.process_context import ProcessContext, current
from lightning_ddp_ext.supervision.stacks import call_site

from .private.lightning_tree import pl

# Named calls.


def enter_call(what: str, *, remedy: str = "") -> bool:
    """Wait until every rank makes this call, and return true.

    Return false without a wait if other code has created the default group, as with a
    stock strategy, since the ranks need not make the same calls then. Collective otherwise.

    Args:
        what: the name of the call, the same on every rank.
        remedy: how to make every rank call it, for the error.

    Raises:
        RankAbsentError: a rank made another call, skipped this one, or did not make it in
            time.
    """
    context = current()
    if context is None or not context.groups.owns_default:
        return False
    context.barriers.enter(what, call_site(), remedy=remedy)
    return True


def enter_broadcast(src: int, caller: object, *, is_training: bool) -> None:
    """Wait until every rank begins this broadcast.

    Otherwise gloo would abort a process that is in a collective of another size. A
    callback in training does not wait, because it may broadcast in every batch, for
    example for ``max_time``.

    Args:
        src: the rank that sends.
        caller: the object whose method broadcasts, if it is known.
        is_training: whether the Trainer is in a training loop.
    """
    if is_training and isinstance(caller, pl.Callback):
        return
    enter_call(
        f"a broadcast from rank {src}",
        remedy="read properties that broadcast, such as trainer.log_dir, on every rank",
    )


def enter_decision(caller: object) -> None:
    """Wait until every rank begins a decision of all ranks.

    If a callback requests the decision, it is named after the callback's class, so ranks
    that begin decisions of different callbacks fail.

    Args:
        caller: the object whose method requests it, if it is known.
    """
    is_callbacks = isinstance(caller, pl.Callback)
    requester = type(caller).__name__ if is_callbacks else "all ranks (reduce_boolean_decision)"
    # Callbacks that stop or save by a logged value have its name.
    monitor = getattr(caller, "monitor", None)
    remedy = f"log {monitor!r} on every rank, in the same steps" if monitor else ""
    enter_call(f"a decision of {requester}", remedy=remedy)


def enter_work(what: str) -> None:
    """Wait until every rank begins this work. Collective.

    Args:
        what: a description, such as "saving last.ckpt". Its first word must be the same on
            every rank; a path, which may differ, may follow.
    """
    context = current()
    if context is not None:
        context.barriers.enter(what, call_site(), name=_kind_of(what))


def _end_failed_work(context: ProcessContext, what: str) -> None:
    """Wait until all ranks have the error of the work, or until another rank fails.

    The caller raises the error of the work even then.
    """
    with suppress(RankFailedError):
        context.barriers.enter(f"the end of {what}", name=f"the end of {_kind_of(what)}")


def _kind_of(work: str) -> str:
    """Return the first word of a description of work.

    >>> _kind_of("saving last.ckpt")
    'saving'
    """
    return work.partition(" ")[0]


def report_step() -> None:
    """Advance this rank's step counter.

    A call that the rank did not make before then counts as skipped.
    """
    context = current()
    if context is not None:
        context.barriers.advance()


# Exchanges of values.


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
        settle=partial(_end_failed_work, context),
    )


def group_of_small_collectives() -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks, or ``None`` if they are connected by other code.

    ``None`` stands for the default group. Collective the first time.
    """
    context = current()
    if context is None:
        return None
    return context.new_group(backend="gloo", purpose="small collectives")


# Aborts of NCCL.


def check_received() -> None:
    """Raise the error of the rank that failed if received values may be arbitrary.

    NCCL's collectives return when they are aborted, so this must be called before a
    received value is used.
    """
    context = current()
    if context is not None and context.has_arbitrary_values:
        context.peers.check()


def wait_and_detect_abort(strategy: pl.strategies.Strategy) -> bool:
    """Wait for the devices, and return whether a step may have used partial sums.

    An abort of NCCL lets the steps run that are queued behind a collective. That may happen
    late, if the collective waits for a dead rank, so wait as copying the weights would.
    Without NCCL, return false immediately.
    """
    context = current()
    if context is None or not context.groups.uses_nccl:
        return False
    for device in getattr(strategy, "rank_devices", [strategy.root_device]):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return context.groups.has_aborted_nccl
