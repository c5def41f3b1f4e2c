"""What rank 0 does for all, and what all do side by side, ends alike on all: with a result, or with one error."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_ddp_ext.rendezvous.peer_event import RemoteTraceback, reason_of

T = TypeVar("T")


def rank_zero_for_all(
    work: Callable[[], T],
    *,
    is_rank_zero: bool,
    broadcast: Callable[[Any], Any],
    what: str = "work",
    settle: Callable[[], object] = lambda: None,
) -> T:
    """Run ``work`` on rank 0 and give every rank its result, or raise its error on every rank.

    Collective: every rank must call it. If rank 0 dies on the way, its peers are released by the control channel.

    Args:
        work: called on rank 0 alone. Its result must be picklable, or that is the error.
        is_rank_zero: whether this is rank 0.
        broadcast: sends rank 0's object to every rank and returns it there, such as ``strategy.broadcast``.
        what: names the work in the note that other ranks add to the error.
        settle: waits until every rank has the error. Without it the first rank that raises may release a slower one
            from the broadcast that brings it the same.

    Raises:
        Exception: whatever ``work`` raised; on other ranks of the same type and with the same text where pickle keeps
            both, else a ``RuntimeError`` that says them, and rank 0's traceback as its cause.

    >>> rank_zero_for_all(lambda: 6 * 7, is_rank_zero=True, broadcast=lambda obj: obj)
    42
    """
    if not is_rank_zero:
        message = broadcast(None)
        if isinstance(message, _Failure):
            settle()
            raise message.to_error(what, rank=0)
        return pickle.loads(message)  # type: ignore[no-any-return]
    try:
        result = work()
        pickled = pickle.dumps(result)
    except Exception as error:
        broadcast(_Failure.of(error))
        settle()
        raise
    broadcast(pickled)
    return result


def on_every_rank(work: Callable[[], T], *, rank: int, gather: Callable[[Any], list[Any]], what: str = "work") -> T:
    """Run ``work`` on every rank; if it raises on any, raise the error of the first such rank on all.

    Collective: every rank must call it, and ``work`` must have no collective in it.

    Args:
        work: this rank's part.
        rank: this rank.
        gather: gives every rank the objects of all, by rank, such as ``all_gather_object``.
        what: names the work in the note that other ranks add to the error.

    Raises:
        Exception: as for :func:`rank_zero_for_all`.

    >>> on_every_rank(lambda: 6 * 7, rank=0, gather=lambda obj: [obj])
    42
    """
    own: Exception | None = None
    try:
        result = work()
    except Exception as error:
        own = error
    failures = gather(None if own is None else _Failure.of(own))
    first = next((index for index, failure in enumerate(failures) if failure is not None), None)
    if first is None:
        return result
    if own is not None and first == rank:
        raise own
    raise failures[first].to_error(what, rank=first)


@dataclass(frozen=True)
class _Failure:
    """What travels instead of a result."""

    error: Exception
    traceback_text: str

    @staticmethod
    def of(error: Exception) -> _Failure:
        """With the error, or where pickle does not keep its type and text, a plain one that says both."""
        try:
            rebuilt = pickle.loads(pickle.dumps(error))
            survives = (type(rebuilt), str(rebuilt)) == (type(error), str(error))
        except Exception:
            survives = False
        portable = error if survives else RuntimeError(reason_of(error))
        return _Failure(portable, "".join(traceback.format_exception(error)))

    def to_error(self, what: str, *, rank: int) -> Exception:
        """The error for other ranks."""
        if hasattr(self.error, "add_note"):  # Python 3.11
            self.error.add_note(f"raised on rank {rank} during {what}")
        self.error.__cause__ = RemoteTraceback(self.traceback_text)
        return self.error
