"""Determine whether every rank raised an exception, so that all may continue.

If every rank raised, no rank is waiting for another, so they keep their groups and
announce nothing. Rank 0 collects the ranks that raise within a second of the first one.
If some do not, each of the others announces its own exception.
"""

from __future__ import annotations

from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.wire import Message
from lightning_ddp_ext.threads import start_thread

_SECONDS_TO_RAISE = 1.0


class CommonException:
    """This rank's part in determining whether every rank raises, for each exception."""

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._peers = context.peers
        self._is_common: bool | None = None  # until rank 0 decides
        self._raised: set[int] = set()  # on rank 0: the ranks that have raised so far
        self._peers.on("raised", self._on_raised)
        self._peers.on("decided", self._on_decided)

    def is_common(self) -> bool:
        """Whether every rank raises within a second; called on the main thread.

        It is ``False`` if rank 0 does not answer.
        """
        self._is_common = None
        self._peers.tell([0], "raised", {})
        seconds = _SECONDS_TO_RAISE + self._peers.timeouts.first_cause
        self._peers.wait_for(lambda: self._is_common is not None, seconds)
        return bool(self._is_common)

    # On rank 0.

    def _on_raised(self, body: Message) -> None:
        self._raised.add(body["from"])
        if len(self._raised) == 1:
            start_thread("ddpx-exception", self._decide)

    def _decide(self) -> None:
        """Wait until all ranks have raised or the time is up, and inform them."""
        self._peers.wait_for(self._have_all_raised, _SECONDS_TO_RAISE)
        with self._peers.arrived:
            is_common = self._have_all_raised()
            self._raised.clear()
            self._peers.tell(self._peers.everyone, "decided", {"is_common": is_common})

    def _have_all_raised(self) -> bool:
        return len(self._raised) == len(self._peers.everyone)

    # On every rank.

    def _on_decided(self, body: Message) -> None:
        self._is_common = body["is_common"]
        if self._is_common:
            self._context.barriers.reset_counts()  # the ranks may have raised after different calls
