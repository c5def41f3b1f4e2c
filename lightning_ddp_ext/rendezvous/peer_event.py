"""What happened to a rank, as the others are told, and the error that they raise because of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_ddp_ext.errors import (
    RankAbsentError,
    RankDiedError,
    RankFailedError,
    RankHungError,
    RankLeftError,
    RankMismatchError,
)
from lightning_ddp_ext.rendezvous.rank_table import RankInfo

Kind = Literal["died", "failed", "left", "absent", "mismatched", "hung"]

_LONGEST_REASON = 2000
_LONGEST_TEXT = 1 << 15


class RemoteTraceback(Exception):
    """The traceback of another rank, as the cause of a :class:`~lightning_ddp_ext.errors.RankFailedError`."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@dataclass(frozen=True)
class PeerEvent:
    """What happened to a rank: it died, failed, left, hangs, or did not make a call that the others made."""

    kind: Kind
    rank: int
    host: str
    pid: int
    reason: str = ""
    traceback_text: str = ""

    def to_error(self) -> RankFailedError:
        """The exception that other ranks raise because of it; its cause is the traceback, if there is one."""
        who = f"rank {self.rank} (host {self.host}, pid {self.pid})"
        died = (
            f"{who} died: {self.reason}; every rank stops. Look for the reason in its own output, "
            "or in its host's log (out of memory?)"
        )
        left = (
            f"{who} has finished and gone, but this rank still needs it for a collective; "
            "let every rank make the same calls in the same order"
        )
        kind, sentence = {
            "died": (RankDiedError, died),
            "failed": (RankFailedError, f"{who} failed, so this rank stops: {self.reason}"),
            "left": (RankLeftError, left),
            "absent": (RankAbsentError, self.reason),
            "mismatched": (RankMismatchError, self.reason),
            "hung": (RankHungError, f"{self.reason}; every rank stops"),
        }[self.kind]
        error = kind(sentence, rank=self.rank, host=self.host, pid=self.pid, traceback_text=self.traceback_text)
        error.__cause__ = RemoteTraceback(self.traceback_text) if self.traceback_text else None
        return error


def event_of(kind: Kind, info: RankInfo, reason: str = "", traceback_text: str = "") -> PeerEvent:
    """The event for a rank of the table, short enough for one message."""
    return PeerEvent(
        kind, info.rank, info.host, info.pid, reason[:_LONGEST_TEXT], shortened(traceback_text, _LONGEST_TEXT)
    )


def shortened(text: str, longest: int) -> str:
    """The text, or its two ends with a note on what was left out between them."""
    left_out = len(text) - longest
    if left_out <= 0:
        return text
    half = longest // 2
    return f"{text[:half]}\n... ({left_out} characters left out) ...\n{text[-half:]}"


def reason_of(exception: BaseException) -> str:
    """Type and text of an exception as other ranks are told, however long the text, also where it cannot be made."""
    name = type(exception).__name__
    try:
        text = str(exception)
    except Exception:
        text = "<its __str__ fails>"
    return shortened(f"{name}: {text}" if text else name, _LONGEST_REASON)
