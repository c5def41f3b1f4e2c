"""What rank 0 does for all ends alike on all: with its result, or with its error."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_ddp_ext.rendezvous.news import RemoteTraceback, reason_of

T = TypeVar("T")


def rank_zero_for_all(
    work: Callable[[], T], *, is_rank_zero: bool, broadcast: Callable[[Any], Any], what: str = "work"
) -> T:
    """Run ``work`` on rank 0 and give every rank its result, or raise its error on every rank.

    Collective: every rank must call it. If rank 0 dies on the way, its peers are released by the lifelines.

    Args:
        work: called on rank 0 alone. Its result must be picklable, or that is the error.
        is_rank_zero: whether this is rank 0.
        broadcast: sends rank 0's object to every rank and returns it there, such as ``strategy.broadcast``.
        what: names the work in the note that other ranks add to the error.

    Returns:
        What ``work`` returned on rank 0.

    Raises:
        Exception: whatever ``work`` raised; on other ranks of the same type and with the same text where pickle keeps
            both, else a ``RuntimeError`` that says them, and rank 0's traceback as its cause.

    >>> rank_zero_for_all(lambda: 6 * 7, is_rank_zero=True, broadcast=lambda obj: obj)
    42
    """
    if not is_rank_zero:
        return _outcome_of(broadcast(None), what)  # type: ignore[no-any-return]
    try:
        result = work()
        pickled = pickle.dumps(result)
    except Exception as error:
        broadcast(_Failure(_portable(error), "".join(traceback.format_exception(error))))
        raise
    broadcast(pickled)
    return result


@dataclass(frozen=True)
class _Failure:
    """What travels instead of a result."""

    error: Exception
    traceback_text: str


def _outcome_of(message: Any, what: str) -> Any:
    if not isinstance(message, _Failure):
        return pickle.loads(message)
    if hasattr(message.error, "add_note"):  # Python 3.11
        message.error.add_note(f"raised on rank 0 during {what}")
    raise message.error from RemoteTraceback(message.traceback_text)


def _portable(error: Exception) -> Exception:
    """The error, or where pickle does not keep its type and text, a plain one that says both."""
    try:
        rebuilt = pickle.loads(pickle.dumps(error))
        survives = (type(rebuilt), str(rebuilt)) == (type(error), str(error))
    except Exception:
        survives = False
    return error if survives else RuntimeError(reason_of(error))
