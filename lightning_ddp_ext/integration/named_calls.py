"""Name the calls that every rank must make, and detect a rank that skips one.

The error on every rank then names the call and the rank that skipped it. If other code
has created the default group, as with a stock strategy, calls are not checked.
"""

from __future__ import annotations

from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.supervision.stacks import call_site

from .private.lightning_tree import pl


def enter_call(what: str, *, remedy: str = "") -> bool:
    """Wait until every rank makes this call, and return true.

    Return false without a wait if other code has created the default group, since the
    ranks need not make the same calls then. Collective otherwise.

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
    is_callback = isinstance(caller, pl.Callback)
    who = type(caller).__name__ if is_callback else "all ranks (reduce_boolean_decision)"
    # Callbacks that stop or save by a logged value have its name.
    monitor = getattr(caller, "monitor", None)
    remedy = f"log {monitor!r} on every rank, in the same steps" if monitor else ""
    enter_call(f"a decision of {who}", remedy=remedy)


def report_step() -> None:
    """Advance this rank's step counter.

    A call that the rank did not make before then counts as skipped.
    """
    context = current()
    if context is not None:
        context.barriers.advance()
