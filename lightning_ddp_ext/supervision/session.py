"""Build and find the session, which supervises the ranks of one set of connections."""

from __future__ import annotations

from typing import cast

from lightning_ddp_ext.rendezvous.process_context import ProcessContext, current, join
from lightning_ddp_ext.rendezvous.request import Request
from lightning_ddp_ext.supervision.graceful_stop import GracefulStop
from lightning_ddp_ext.supervision.status_table import StatusTable


class Session:
    """This rank's part in statuses and stops.

    A session is built when the ranks have connected, and lasts until they disconnect.
    Messages of other ranks that arrive earlier are kept for it.

    Attributes:
        context: the connections and process groups.
        statuses: finds the rank that others wait for.
        stops: stops all ranks together after a signal.
    """

    def __init__(self, context: ProcessContext) -> None:
        self.context = context
        self.statuses = StatusTable(context)
        self.stops = GracefulStop(context, self.statuses.raise_if_a_rank_is_silent)


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
