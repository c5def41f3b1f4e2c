"""Keep this rank's part in statuses and stops while the ranks are connected."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from lightning_ddp_ext.rendezvous.process_context import ProcessContext, current, join
from lightning_ddp_ext.rendezvous.request import Request
from lightning_ddp_ext.supervision.pusher import StatusPusher


class Session:
    """This rank's part in statuses and stops.

    A session is built when the ranks have connected, and lasts until they disconnect.
    Messages of other ranks that arrive earlier are kept for it.

    Attributes:
        context: the connections and process groups.
        statuses: finds the rank that others wait for.
        runs: the number of runs with stop points that this rank has started.
        limit_exit: limits the time until this process exits after an exception; called
            with the reason, and a function that returns whether the exit is still
            needed. The last of these runs sets it; before the first, there is no limit.
    """

    def __init__(self, context: ProcessContext) -> None:
        self.context = context
        self.statuses = StatusPusher(context)
        self.runs = 0
        self.limit_exit: Callable[[str, Callable[[], bool]], None] = lambda reason, is_needed: None


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
