"""Keep this rank's part in statuses and stops while the ranks are connected."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import cast

from lightning_ddp_ext.rendezvous.process_context import ProcessContext, current, join
from lightning_ddp_ext.rendezvous.request import Request
from lightning_ddp_ext.supervision.graceful_stop import GracefulStop, SaveDeadline, StopRequest
from lightning_ddp_ext.supervision.pusher import StatusPusher


class Session:
    """This rank's part in statuses and stops.

    A session is built when the ranks have connected, and lasts until they disconnect.
    Messages of other ranks that arrive earlier are kept for it.

    Attributes:
        context: the connections and process groups.
        statuses: finds the rank that others wait for.
        deadline: limits the time until this process exits after an exception; that of the
            last run with stop points. ``None``, so that there is no limit, before the
            first one.
    """

    def __init__(self, context: ProcessContext) -> None:
        self.context = context
        self.statuses = StatusPusher(context)
        self._runs = 0  # with stop points, which this rank has started
        self.deadline: SaveDeadline | None = None

    def start_stops(
        self, limit: timedelta, acknowledge: Callable[[StopRequest], object]
    ) -> GracefulStop:
        """Start a run with stop points; every rank must start the same ones.

        For the arguments, see :class:`GracefulStop`.
        """
        self._runs += 1
        stop = GracefulStop(
            self.context, self.statuses, run=self._runs, limit=limit, acknowledge=acknowledge
        )
        self.deadline = stop.deadline
        return stop


def start_session(request: Request) -> Session | None:
    """Connect the ranks with :func:`join`, and return the session of their connections.

    Connections that are used again keep their session. Collective: every rank must call
    it. Return ``None`` if other code opened the process group.
    """
    context = join(request)
    if context is not None and context.session is None:
        context.session = Session(context)
    return current_session()


def current_session() -> Session | None:
    """Return this process's session; ``None`` while it is not connected."""
    context = current()
    return None if context is None else cast(Session | None, context.session)
