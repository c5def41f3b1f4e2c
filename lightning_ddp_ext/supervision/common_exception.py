"""Determine whether every rank raised an exception, so that all may continue.

If every rank raised, no rank is waiting for another, so they keep their groups and
announce nothing. Rank 0 collects the ranks that raise within a second of the first one.
If some do not, each of the others announces its own exception.
"""

from __future__ import annotations

from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.remote_calls import RemoteCalls
from lightning_ddp_ext.threads import start_thread

_SECONDS_TO_RAISE = 1.0


class CommonException:
    """Determines whether every rank is raising."""

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._peers = context.peers
        self._is_common: bool | None = None
        self._raised: set[int] = set()
        self._remote = RemoteCalls(
            self._peers,
            "exception",
            record=self._record,
            decide=self._accept_decision,
        )

    def is_common(self) -> bool:
        """Whether every rank is raising; called on the main thread."""
        self._is_common = None
        self._remote.call([0], "record", self._peers.rank)
        seconds = 2 * self._peers.timeouts.first_cause  # rank 0 may not reply
        self._peers.wait_for(lambda: self._is_common is not None, seconds)
        return bool(self._is_common)

    # On rank 0.

    def _record(self, rank: int) -> None:
        self._raised.add(rank)
        if len(self._raised) == 1:
            start_thread("ddpx-exception", self._decide)

    def _decide(self) -> None:
        """Wait until all ranks have raised or the time is up, and inform them."""
        self._peers.wait_for(self._have_all_raised, _SECONDS_TO_RAISE)
        with self._peers.arrived:
            is_common = self._have_all_raised()
            self._raised.clear()
            self._remote.call(self._peers.everyone, "decide", is_common)

    def _have_all_raised(self) -> bool:
        return len(self._raised) == len(self._peers.everyone)

    # On every rank.

    def _accept_decision(self, is_common: bool) -> None:
        self._is_common = is_common
        if is_common:
            self._context.barriers.reset_counts()  # the ranks may have raised after different calls
