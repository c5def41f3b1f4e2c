"""Determine whether every rank raised an exception; if so, all may continue, as no rank is waiting for another."""

from __future__ import annotations

from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.remote_calls import RemoteCalls, Replies
from lightning_ddp_ext.supervision.call_site import main_frame
from lightning_ddp_ext.supervision.stacks import may_be_waiting_for_ranks

_SECONDS_BETWEEN = 0.1
_LOOKS = 3  # a rank must be found waiting in this many checks, since it may just be returning from a collective


class CommonException:
    """Determines whether every rank is raising. Every rank must create its instance before any rank raises."""

    def __init__(self, context: ProcessContext) -> None:
        self._context, self._peers = context, context.peers
        self._most_looks = round(self._peers.timeouts.first_cause / _SECONDS_BETWEEN)
        self._is_raising = False
        self._is_common: bool | None = None
        # On rank 0: the raising ranks, in order; the number of checks; and how often each rank was found waiting.
        self._raised: list[int] = []
        self._looks, self._seen, self._replies = 0, dict[int, int](), Replies()
        self._remote = RemoteCalls(
            self._peers, "end", record=self._record, look=self._look, is_waiting=self._is_waiting, settle=self._settle
        )

    def is_reached(self) -> bool:
        """Whether every rank is raising; ``False`` if one is waiting for others, or is late. For the main thread."""
        self._is_raising, self._is_common = True, None
        self._remote.call([0], "record", self._peers.rank)
        for _ in range(2 * self._most_looks):  # rank 0 may not reply
            self._remote.call([0], "look", self._peers.rank)
            self._peers.wait_for(lambda: self._is_common is not None, _SECONDS_BETWEEN)
            if self._is_common is not None or self._peers.cause_or_departure is not None:
                break
        self._is_raising = False
        return bool(self._is_common)

    def _record(self, rank: int) -> None:
        self._raised.append(rank)
        if len(self._raised) == len(self._peers.table):
            self._decide(is_common=True)

    def _look(self, rank: int) -> None:
        """Check on rank 0 whether a rank is waiting for the others or is late; only for the first rank that raised."""
        if self._raised[:1] != [rank]:
            return
        self._looks += 1
        self._seen = {each: self._seen.get(each, 0) + 1 for each, waits in self._replies.items() if waits}
        if self._looks > self._most_looks or _LOOKS in self._seen.values():
            self._decide(is_common=False)
        else:
            self._replies = self._remote.call(range(len(self._peers.table)), "is_waiting")

    def _decide(self, *, is_common: bool) -> None:
        self._raised, self._looks, self._seen, self._replies = [], 0, {}, Replies()
        self._remote.call(range(len(self._peers.table)), "settle", is_common)

    def _is_waiting(self) -> bool:
        return not self._is_raising and may_be_waiting_for_ranks(main_frame())

    def _settle(self, is_common: bool) -> None:
        self._is_common = is_common
        if is_common:
            self._context.barriers.reset_counts()  # the ranks may have raised after different calls
