"""Describe an event that concerns a rank, and the error that other ranks raise because of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_ddp_ext.errors import RankAbsentError, RankDiedError, RankFailedError, RankHungError
from lightning_ddp_ext.ranks import RemoteTraceback, shortened
from lightning_ddp_ext.rendezvous.rank_table import RankInfo

Kind = Literal["died", "failed", "left", "absent", "hung"]

_LONGEST_TEXT = 1 << 15


@dataclass(frozen=True)
class PeerEvent:
    """The event that a rank died, failed, left, hung, or did not make a call that other ranks made."""

    kind: Kind
    rank: int
    host: str
    pid: int
    reason: str = ""
    traceback_text: str = ""

    def to_error(self) -> RankFailedError:
        """Return the exception that other ranks raise because of this event; its traceback, if any, is the cause."""
        who = f"rank {self.rank} (host {self.host}, pid {self.pid})"
        died = (
            f"{who} died: {self.reason}; every rank stops. Look for the reason in its own output, "
            "or in its host's log (out of memory?)"
        )
        left = (
            f"{who} finished and exited, but this rank still needs it for a collective; "
            "make sure that every rank makes the same calls in the same order"
        )
        kind, sentence = {
            "died": (RankDiedError, died),
            "failed": (RankFailedError, f"{who} failed, so this rank stops: {self.reason}"),
            "left": (RankFailedError, left),
            "absent": (RankAbsentError, self.reason),
            "hung": (RankHungError, f"{self.reason}; every rank stops"),
        }[self.kind]
        error = kind(sentence, rank=self.rank, host=self.host, pid=self.pid, traceback_text=self.traceback_text)
        error.__cause__ = RemoteTraceback(self.traceback_text) if self.traceback_text else None
        return error


def event_of(kind: Kind, info: RankInfo, reason: str = "", traceback_text: str = "") -> PeerEvent:
    """Return the event of a rank in the table, short enough for one message."""
    return PeerEvent(
        kind, info.rank, info.host, info.pid, reason[:_LONGEST_TEXT], shortened(traceback_text, _LONGEST_TEXT)
    )
