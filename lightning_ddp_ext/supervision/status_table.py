"""On rank 0: keep the last status of each rank, and report the rank that others wait for.

Each rank pushes its ``status`` while it waits (``supervision.pusher``). The table reports a
rank to all ranks (``rendezvous.peers``), which then raise:

- in a deadlock that the last two statuses of its ranks show: a rank in the rarest call;
- for any question, if a rank pushes no status: that rank;
- for a question about a named barrier: a rank that has not entered it;
- for a question about a collective: a rank in another collective, or, if a rank has waited
  for the timeout, a rank that is not waiting.
"""

from __future__ import annotations

import time

from lightning_ddp_ext.rendezvous.channel import Message
from lightning_ddp_ext.rendezvous.peers import Peers
from lightning_ddp_ext.supervision.status import Status, answer_to, deadlock_in

_RETURNING = 1.0  # seconds from the first rank that returns from a collective to the last


class StatusTable:
    """The last status of each rank, and the questions that have no answer yet.

    From the first question until the answer, all ranks are watched: each pushes its
    status at short intervals.

    The channel's thread records the statuses of other ranks, and the thread of
    ``StatusPusher`` rank 0's own, and decides; both hold the lock of ``peers.arrived``.

    Args:
        peers: the other ranks.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._last = {info.rank: Status(info) for info in peers.table}
        self._received_at: dict[int, float] = {}  # by rank, also if the status was the same
        self._asked_at: float | None = None  # the first question without an answer
        peers.channel.on_message("status", self._record_status)

    def _record_status(self, body: Message) -> None:
        rank = body["from"]
        self._received_at[rank] = time.monotonic()
        if body["status"] is not None:  # else it is the same as the rank's last one
            self._last[rank] = Status.from_dict(body["status"])
        if self._last[rank].question and self._asked_at is None:
            self._asked_at = self._received_at[rank]
            self._peers.tell(self._peers.everyone, "look", {"is_watched": True, "answered": []})

    def decide(self, now: float) -> None:
        """Report a deadlock, and answer questions; called at short intervals."""
        with self._peers.arrived:
            if deadlock := deadlock_in(self._since(now - self._peers.timeouts.answer)):
                self._peers.report(deadlock)
            if self._asked_at is not None:
                self._answer(now, self._counting_from(self._asked_at))

    def _since(self, moment: float) -> list[Status]:
        """Return the statuses that ranks have pushed since a ``time.monotonic()``."""
        return [
            status
            for rank, status in self._last.items()
            if self._received_at.get(rank, moment) > moment
        ]

    def _counting_from(self, asked_at: float) -> float:
        """Return the moment after which a status counts for the answer.

        That is usually the first question. But if all ranks have pushed a status since,
        and one is not waiting, the collective may just have ended, and this rank returned
        before the others. Then only statuses count by which all have returned.
        """
        statuses = self._since(asked_at)
        is_complete = len(statuses) == len(self._last)
        may_return = is_complete and not all(status.may_wait for status in statuses)
        return asked_at + _RETURNING if may_return else asked_at

    def _answer(self, now: float, counting_from: float) -> None:
        """Answer all questions by the statuses since a moment.

        Each rank has some seconds to push one; then it counts as silent.
        """
        statuses = self._since(counting_from)
        present = [status.who for status in statuses]
        silent = [who for who in self._peers.table if who not in present]
        if silent and now < counting_from + self._peers.timeouts.answer:
            return
        # A status without a question has crossed an earlier answer.
        asking = [status for status in statuses if status.question]
        for status in asking:
            event = answer_to(status, statuses, silent)
            if event is not None and self._peers.cause_or_departure is None:
                self._peers.report(event)
        self._asked_at = None
        self._peers.tell(
            self._peers.everyone,
            "look",
            {"is_watched": False, "answered": [status.question for status in asking]},
        )
