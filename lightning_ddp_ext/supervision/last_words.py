"""What the ranks print at the end: the first failure's traceback, once and last, and one line from each other rank.

Without this, every rank prints a traceback of its own, and the one that matters is somewhere in between.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import torch.distributed as dist
from torch.distributed import Store

from lightning_ddp_ext.errors import RankDiedError, RankFailedError, RankHungError, RendezvousError
from lightning_ddp_ext.rendezvous.deadline import Deadline, answer_within
from lightning_ddp_ext.rendezvous.membership import Membership
from lightning_ddp_ext.rendezvous.news import reason_of
from lightning_ddp_ext.rendezvous.process_group import current
from lightning_ddp_ext.rendezvous.store import wait_for
from lightning_ddp_ext.supervision.failure import chain_of, explain

# How long ranks wait for one another before they print regardless; seconds.
_ANNOUNCED_WITHIN = 1.5
_PRINTED_WITHIN = 2.0
_PRINTER = "last words/printer"
_PRINTED = "last words/printed"

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
# The hooks that ours has been put in front of, the latest last, and how many of them are printing right now.
_behind: list[Hook] = []
_depth = 0


def install_last_words() -> None:
    """Put our ``sys.excepthook`` in front of the one that is there; to be called after each forming of a group.

    torch puts a hook of its own in front at that time, which holds back what is printed until everything is.
    """
    hook = sys.excepthook
    if hook is _excepthook:
        return
    if not (hook.__module__ == dist.distributed_c10d.__name__ and _calls_ours(hook)):
        _behind.append(hook)
    sys.excepthook = _excepthook


def _calls_ours(hook: Hook) -> bool:
    return any(cell.cell_contents is _excepthook for cell in getattr(hook, "__closure__", None) or ())


def _excepthook(kind: type[BaseException], exception: BaseException, trace: TracebackType | None) -> None:
    membership = current()
    if membership is None or _depth > 0 or isinstance(exception, RendezvousError):
        _print_as_before(kind, exception, trace)
        return
    if not _is_known_to_others(membership, exception):
        # Raised outside of any Trainer call; it ends this rank all the same, and others may be waiting for it.
        explanation: BaseException = explain(exception)
        if explanation is not exception:
            explanation.__cause__ = exception
            kind, exception, trace = type(explanation), explanation, None
    # The store's host may be gone or stopped, so it is asked from a thread that nobody has to wait for.
    may_print_all = answer_within(_ANNOUNCED_WITHIN + _PRINTED_WITHIN, lambda: _take_turns(membership, exception))
    if may_print_all is False:
        return
    if may_print_all is None and isinstance(exception, RankFailedError):
        print_line(exception)
        return
    _print_as_before(kind, exception, trace)
    answer_within(_PRINTED_WITHIN, lambda: membership.store.set(_PRINTED, "1"))


def _is_known_to_others(membership: Membership, exception: BaseException) -> bool:
    """Whether it comes from a failure that has been announced, as what a callback raises because of one does."""
    return any(link is membership.failure or isinstance(link, RankFailedError) for link in chain_of(exception))


def _take_turns(membership: Membership, exception: BaseException) -> bool:
    """Whether this rank is the one that prints the traceback; returns when it is this rank's turn."""
    if isinstance(exception, (RankDiedError, RankHungError)):
        print_line(exception)  # nobody has a traceback of that
        return False
    if membership.failure is not None:
        return _speak_as_one_who_failed(membership, exception)
    if not isinstance(exception, RankFailedError):
        _print_as_before(type(exception), exception, exception.__traceback__)
        return _wait_for_the_printer(membership)
    store = membership.store
    if wait_for(store, _PRINTER, Deadline(_ANNOUNCED_WITHIN)) is None and _is_printer(membership, store):
        # The rank that failed has caught its exception and prints nothing: one of the others does.
        _wait_for_the_others(membership, but=exception.rank)
        return True
    print_line(exception)
    return _wait_for_the_printer(membership)


def _speak_as_one_who_failed(membership: Membership, exception: BaseException) -> bool:
    first = membership.first_cause
    if first is None or first.rank == membership.world.rank:
        if not _is_printer(membership, membership.store):
            print_line(exception, " (another rank has printed the traceback)")
            return False
        _wait_for_the_others(membership)
        return True
    if first.reason == reason_of(exception):
        print_line(exception)
    else:
        _print_as_before(type(exception), exception, exception.__traceback__)
    return _wait_for_the_printer(membership)


def _is_printer(membership: Membership, store: Store) -> bool:
    """Whether this rank is the first that wants to print the traceback."""
    mine = str(membership.world.rank)
    return bytes(store.compare_set(_PRINTER, "", mine)).decode() == mine


def _wait_for_the_printer(membership: Membership) -> bool:
    with suppress(Exception):  # this rank has printed what it has to say, and must not be made to say it again
        membership.store.set(f"last words/{membership.world.rank}", "1")
        wait_for(membership.store, _PRINTED, Deadline(_PRINTED_WITHIN))
    return False


def _wait_for_the_others(membership: Membership, but: int | None = None) -> None:
    deadline = Deadline(_ANNOUNCED_WITHIN)
    for claim in membership.table.claims:
        if claim.rank not in (membership.world.rank, but):
            wait_for(membership.store, f"last words/{claim.rank}", deadline)


def print_line(exception: BaseException, remark: str = "") -> None:
    """Print type and the first line of the text of an exception as one line that says which rank this is."""
    membership = current()
    who = "" if membership is None else f"[rank {membership.world.rank}] "
    line = reason_of(exception).partition("\n")[0]
    sys.stderr.write(f"{who}{line}{remark}\n")
    sys.stderr.flush()


def _print_as_before(kind: type[BaseException], exception: BaseException, trace: TracebackType | None) -> None:
    """Call the hook that ours has been put in front of; if that one calls ours again, the one before it."""
    global _depth
    _depth += 1
    try:
        hook = _behind[-_depth] if _depth <= len(_behind) else sys.__excepthook__
        hook(kind, exception, trace)
    finally:
        _depth -= 1
    sys.stderr.flush()
