"""Determine whether every rank raised an exception; if so, all may continue, as no rank
is waiting for another.

Rank 0 collects the ranks that raise. Its state decides what each of them does:

==========  ===================================  ======================================
State       Condition on rank 0                  A rank that raises
==========  ===================================  ======================================
collecting  some ranks have raised               waits; the first one requests checks
common      all ranks have raised                keeps the groups and announces nothing
own         another rank waits in three checks,  announces its exception
            or raises too late
==========  ===================================  ======================================

After a decision, rank 0 starts again without any rank.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.remote_calls import RemoteCalls, Replies
from lightning_ddp_ext.supervision.call_site import main_frame
from lightning_ddp_ext.supervision.stacks import may_be_waiting_for_ranks

_SECONDS_BETWEEN = 0.1
# a rank must be found waiting in this many checks, since it may just be returning from
# a collective
_CHECKS = 3


@dataclass
class _Collecting:
    """The messages that rank 0 has received since its last decision."""

    raised: list[int] = field(default_factory=list)
    """The ranks that have raised, in order."""
    checks: int = 0
    """The number of checks."""
    waiting: Counter[int] = field(default_factory=Counter)
    """How many checks have found each rank waiting."""
    replies: Replies = field(default_factory=Replies)
    """The replies to the last check."""


class CommonException:
    """Determines whether every rank is raising."""

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._peers = context.peers
        self._everyone = range(len(context.table))
        self._most_checks = round(self._peers.timeouts.first_cause / _SECONDS_BETWEEN)
        self._is_raising = False
        self._is_common: bool | None = None
        self._collecting = _Collecting()
        self._remote = RemoteCalls(
            self._peers,
            "exception",
            record=self._record,
            check=self._check,
            is_waiting=self._is_waiting,
            decide=self._accept_decision,
        )

    def is_common(self) -> bool:
        """Whether every rank is raising; ``False`` if one is waiting for others, or is
        late.

        For the main thread.
        """
        self._is_raising = True
        self._is_common = None
        self._remote.call([0], "record", self._peers.rank)
        for _ in range(2 * self._most_checks):  # rank 0 may not reply
            self._remote.call([0], "check", self._peers.rank)
            self._peers.wait_for(lambda: self._is_common is not None, _SECONDS_BETWEEN)
            if self._is_common is not None or self._peers.cause_or_departure is not None:
                break
        self._is_raising = False
        return bool(self._is_common)

    # On rank 0.

    def _record(self, rank: int) -> None:
        self._collecting.raised.append(rank)
        if len(self._collecting.raised) == len(self._everyone):
            self._decide(is_common=True)

    def _check(self, rank: int) -> None:
        """Check whether a rank is waiting for the others or is late; only for the first
        rank that raised.
        """
        state = self._collecting
        if state.raised[:1] != [rank]:
            return
        state.checks += 1
        state.waiting = Counter(
            {each: state.waiting[each] + 1 for each, waits in state.replies.items() if waits}
        )
        if state.checks > self._most_checks or _CHECKS in state.waiting.values():
            self._decide(is_common=False)
        else:
            state.replies = self._remote.call(self._everyone, "is_waiting")

    def _decide(self, *, is_common: bool) -> None:
        self._collecting = _Collecting()
        self._remote.call(self._everyone, "decide", is_common)

    # On every rank.

    def _is_waiting(self) -> bool:
        return not self._is_raising and may_be_waiting_for_ranks(main_frame())

    def _accept_decision(self, is_common: bool) -> None:
        self._is_common = is_common
        if is_common:
            self._context.barriers.reset_counts()  # the ranks may have raised after different calls
