"""Find out whether every rank raised an exception, so that no rank waits for another, and all can go on together."""

from __future__ import annotations

import threading

from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.remote_calls import RemoteCalls
from lightning_ddp_ext.supervision.call_site import main_frame
from lightning_ddp_ext.supervision.stacks import may_be_waiting_for_ranks

_SECONDS_BETWEEN = 0.1
_LOOKS = 3  # at a rank that waits for others: it may be about to come out of a collective that is over


class CommonEnd:
    """This rank's part in that. All ranks must have made theirs before one of them raises."""

    def __init__(self, context: ProcessContext) -> None:
        self._context, self._peers = context, context.peers
        self._everyone = frozenset(range(len(context.table)))
        self._raised: set[int] = set()  # known to rank 0
        self._is_raising = False
        self._is_common: bool | None = None
        self._remote = RemoteCalls(
            self._peers, "end", raised=self._record, is_waiting=self._is_waiting, settle=self._settle
        )

    def is_reached(self) -> bool:
        """Whether every rank raises; ``False`` once one of them waits for this one, or is late. For the main thread."""
        self._is_raising, self._is_common = True, None
        self._remote.call([0], "raised", self._peers.rank)
        self._peers.wait_for(lambda: self._is_common is not None, 3 * self._peers.timeouts.first_cause)
        self._is_raising = False
        return bool(self._is_common)

    def _record(self, rank: int) -> None:
        """On rank 0: decide with the last rank; from the first one on, look whether one waits for the others."""
        self._raised.add(rank)
        if self._raised == self._everyone:
            self._decide(is_common=True)
        elif len(self._raised) == 1:
            threading.Thread(target=self._look, name="ddpx-end", daemon=True).start()

    def _look(self) -> None:
        seen = [0] * len(self._everyone)
        for _ in range(round(self._peers.timeouts.first_cause / _SECONDS_BETWEEN)):
            replies = self._remote.call(self._everyone, "is_waiting")
            if self._peers.wait_for(lambda: not self._raised, _SECONDS_BETWEEN):
                return
            seen = [times + 1 if replies.get(rank) else 0 for rank, times in enumerate(seen)]
            if max(seen) == _LOOKS:
                break
        with self._peers.arrived:
            if self._raised:
                self._decide(is_common=False)

    def _decide(self, *, is_common: bool) -> None:
        self._raised.clear()
        self._remote.call(self._everyone, "settle", is_common)

    def _is_waiting(self) -> bool:
        return not self._is_raising and may_be_waiting_for_ranks(main_frame())

    def _settle(self, is_common: bool) -> None:
        self._is_common = is_common
        if is_common:
            self._context.barriers.forget()  # the ranks may have raised after different calls
