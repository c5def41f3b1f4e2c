"""Determine whether every rank raised an exception, so that all may continue.

If every rank raised, no rank is waiting for another. Rank 0 collects the ranks that
raise, from the first one on, and then decides:

========  ==========================================  =======================================
Decision  Condition                                   A rank that raises
========  ==========================================  =======================================
common    all ranks have raised                       keeps the groups and announces nothing
own       three checks have found a rank waiting for  announces its exception
          others, or a rank is late
========  ==========================================  =======================================
"""

from __future__ import annotations

from collections import Counter

from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.remote_calls import RemoteCalls
from lightning_ddp_ext.supervision.stacks import main_frame, may_be_waiting_for_ranks
from lightning_ddp_ext.threads import start_thread

_SECONDS_BETWEEN = 0.1
# Checks in a row, since a waiting rank may just be returning from a collective.
_CHECKS = 3


class CommonException:
    """Determines whether every rank is raising."""

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._peers = context.peers
        self._is_raising = False
        self._is_common: bool | None = None
        self._raised: set[int] = set()
        self._remote = RemoteCalls(
            self._peers,
            "exception",
            record=self._record,
            is_waiting=self._is_waiting,
            decide=self._accept_decision,
        )

    def is_common(self) -> bool:
        """Whether every rank is raising; called on the main thread.

        ``False`` if a rank is waiting for others, or is late.
        """
        self._is_raising = True
        self._is_common = None
        self._remote.call([0], "record", self._peers.rank)
        seconds = 2 * self._peers.timeouts.first_cause  # rank 0 may not reply
        self._peers.wait_for(lambda: self._is_common is not None, seconds)
        self._is_raising = False
        return bool(self._is_common)

    # On rank 0.

    def _record(self, rank: int) -> None:
        self._raised.add(rank)
        if len(self._raised) == 1:
            start_thread("ddpx-exception", self._decide)

    def _decide(self) -> None:
        """Wait until all ranks have raised, or one of them cannot, and inform them."""
        waiting = Counter[int]()  # the checks in a row that have found a rank waiting
        for _ in range(round(self._peers.timeouts.first_cause / _SECONDS_BETWEEN)):
            replies = self._remote.call(self._peers.everyone, "is_waiting")
            self._peers.wait_for(self._have_all_raised, _SECONDS_BETWEEN)
            waiting = Counter(
                {
                    rank: waiting[rank] + 1
                    for rank, is_waiting in list(replies.items())
                    if is_waiting
                }
            )
            has_event = self._peers.cause_or_departure is not None
            if has_event or self._have_all_raised() or _CHECKS in waiting.values():
                break
        with self._peers.arrived:
            is_common = self._have_all_raised()
            self._raised.clear()
            self._remote.call(self._peers.everyone, "decide", is_common)

    def _have_all_raised(self) -> bool:
        return len(self._raised) == len(self._peers.everyone)

    # On every rank.

    def _is_waiting(self) -> bool:
        return not self._is_raising and may_be_waiting_for_ranks(main_frame())

    def _accept_decision(self, is_common: bool) -> None:
        self._is_common = is_common
        if is_common:
            self._context.barriers.reset_counts()  # the ranks may have raised after different calls
