"""Watch for calls in which this rank waits for a long time, and have rank 0 compare the
calls of all ranks.
"""

from __future__ import annotations

import time

from lightning_ddp_ext.rendezvous.peers import event_of
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.supervision.flight import unfinished
from lightning_ddp_ext.supervision.survey import Survey
from lightning_ddp_ext.threads import start_thread

_LOOKS = 8  # checks for calls that wait, within the time after which rank 0 compares the ranks


class LongWaits:
    """A daemon thread that looks at the calls of this rank until the ranks disconnect.

    Args:
        context: the connections to the other ranks.
        survey: this rank's part in surveys.
    """

    def __init__(self, context: ProcessContext, survey: Survey) -> None:
        self._context = context
        self._peers = context.peers
        self._survey = survey

    def watch(self) -> None:
        """Start the thread, if there are other ranks."""
        if len(self._peers.table) > 1:
            start_thread("ddpx-waits", self._watch)

    def _watch(self) -> None:
        since: dict[str, float] = {}
        surveyed_at = 0.0
        limit = self._peers.timeouts.deadlock
        while not self._context.is_closed and self._peers.cause is None:
            now = time.monotonic()
            since = {each: since.get(each, now) for each in self._survey.waits()}
            start = min(since.values(), default=now)
            if self._is_overdue(now - start):
                self._end_overdue_collective()
                since.clear()
            elif now - max(start, surveyed_at) >= limit:
                self._survey.request("deadlock", "")
                surveyed_at = time.monotonic()
            time.sleep(min(limit, self._context.groups.timeout.total_seconds()) / _LOOKS)

    def _is_overdue(self, seconds: float) -> bool:
        """Whether NCCL has waited for its timeout, or for a rank that left; unlike
        gloo, it does not raise then.
        """
        has_departure = self._peers.cause_or_departure is not None
        limit = (
            self._peers.timeouts.answer
            if has_departure
            else self._context.groups.timeout.total_seconds()
        )
        return self._context.groups.uses_nccl and bool(unfinished()) and seconds >= limit

    def _end_overdue_collective(self) -> None:
        left = self._peers.cause_or_departure
        event = self._survey.request("collective", self._survey.waited)
        if left is not None and event is left:  # NCCL keeps no connection that closes with the rank
            self._peers.report(
                event_of("absent", self._peers.table[left.rank], str(left.to_error()))
            )
