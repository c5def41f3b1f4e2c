"""On rank 0: keep the last status of each rank, and find the rank that others wait for.

Each rank pushes its ``status`` while it waits (``supervision.pusher``). The table reports a
rank to all ranks (``rendezvous.peers``), which then raise:

=========================================================  =============================
The statuses show                                          Reported
=========================================================  =============================
ranks that wait for each other in different calls, twice,  one of them
without processor time in between
for a question: a rank pushes none                         that rank
for a question about a collective: a rank is in another    that rank
one, or elsewhere while ranks have waited for the timeout
for a question about a named barrier: a rank is late       that rank
=========================================================  =============================
"""

from __future__ import annotations

import time

from lightning_ddp_ext.rendezvous.channel import Message
from lightning_ddp_ext.rendezvous.peers import PeerEvent, Peers
from lightning_ddp_ext.supervision.status import (
    Status,
    deadlock_in,
    rank_outside_barrier,
    rank_outside_collective,
    silent_rank,
)

# Seconds; a rank may just be returning from the collective. Once one does, all do.
_RETURNING = 1.0


class StatusTable:
    """The last status of each rank, and the questions that have no answer yet.

    Args:
        peers: the other ranks.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._last = {info.rank: Status(info) for info in peers.table}
        self._received_at: dict[int, float] = {}  # by rank
        self._asked_at: float | None = None  # the first question without an answer
        peers.channel.on_message("status", self._record_status)

    def _record_status(self, body: Message) -> None:
        rank = body["from"]
        self._received_at[rank] = time.monotonic()
        if body["status"] is not None:
            self._last[rank] = Status.from_dict(body["status"])
        if self._last[rank].question and self._asked_at is None:
            self._asked_at = self._received_at[rank]
            self._peers.tell(self._peers.everyone, "look", {"is_watched": True, "answered": []})

    def decide(self, now: float) -> None:
        """Report a deadlock, and answer questions; called at short intervals."""
        with self._peers.arrived:
            deadlock = deadlock_in(self._since(now - self._peers.timeouts.answer))
            if deadlock is not None:
                self._peers.report(deadlock)
            if self._asked_at is not None:
                self._answer(now, self._asked_at)

    def _since(self, moment: float) -> list[Status]:
        """Return the statuses that ranks have pushed since a ``time.monotonic()``."""
        ranks = [rank for rank, received_at in self._received_at.items() if received_at > moment]
        return [self._last[rank] for rank in sorted(ranks)]

    def _answer(self, now: float, asked_at: float) -> None:
        """Answer all questions, unless later statuses may show more."""
        statuses = self._since(asked_at)
        if len(statuses) == len(self._peers.everyone) and not all(each.waits for each in statuses):
            asked_at += _RETURNING
            statuses = self._since(asked_at)
        present = [status.who for status in statuses]
        silent = [who for who in self._peers.table if who not in present]
        if silent and now < asked_at + self._peers.timeouts.answer:
            return
        # A status without a question has crossed an earlier answer.
        asking = [status for status in statuses if status.question]
        for status in asking:
            if silent:
                event: PeerEvent | None = silent_rank(silent, status.question)
            elif status.awaited is not None:
                event = rank_outside_barrier(statuses, status.awaited)
            else:
                event = rank_outside_collective(statuses, status.question)
            if event is not None and self._peers.cause_or_departure is None:
                self._peers.report(event)
        self._asked_at = None
        answered = [status.question for status in asking]
        self._peers.tell(self._peers.everyone, "look", {"is_watched": False, "answered": answered})
