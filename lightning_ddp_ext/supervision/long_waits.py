"""Request a survey when this rank has waited in a call for long.

The calls are named barriers and, as far as torch records them, collectives. NCCL does
not raise when a collective exceeds its timeout, unlike gloo, so this module then ends
the wait.
"""

from __future__ import annotations

import time

from lightning_ddp_ext.rendezvous.peers import event_of
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.supervision.flight_recorder import groups_in_collectives, read_progress
from lightning_ddp_ext.supervision.survey import Survey
from lightning_ddp_ext.threads import start_thread

_LOOKS = 8  # at this rank's calls, within the shortest time limit


def watch_long_waits(context: ProcessContext, survey: Survey) -> None:
    """Start a thread that watches this rank's calls until the ranks disconnect.

    After a survey, it waits for the same time until the next one. A single rank needs
    no such thread.
    """
    if len(context.table) > 1:
        start_thread("ddpx-waits", _watch, context, survey)


def _watch(context: ProcessContext, survey: Survey) -> None:
    entered_at: dict[str, float] = {}  # for each call in which this rank waits
    surveyed_at = 0.0
    seconds_to_survey = context.peers.timeouts.deadlock
    while context.peers.cause is None:
        now = time.monotonic()
        entered_at = {call: entered_at.get(call, now) for call in survey.reporter.open_calls()}
        waiting_since = min(entered_at.values(), default=now)
        if _is_overdue(context, now - waiting_since):
            _end_overdue_collective(context, survey)
            entered_at.clear()
        elif now - max(waiting_since, surveyed_at) >= seconds_to_survey:
            survey.request("deadlock")
            surveyed_at = time.monotonic()
        shortest_limit = min(seconds_to_survey, context.groups.timeout.total_seconds())
        if context.has_closed.wait(shortest_limit / _LOOKS):
            return


def _is_overdue(context: ProcessContext, seconds: float) -> bool:
    """Whether NCCL has waited for its timeout, or too long for a rank that left."""
    has_departure = context.peers.cause_or_departure is not None
    timeout = context.groups.timeout.total_seconds()
    limit = context.peers.timeouts.answer if has_departure else timeout
    if not context.groups.uses_nccl or seconds < limit or not groups_in_collectives():
        return False
    return any(progress.pending for progress in read_progress())


def _end_overdue_collective(context: ProcessContext, survey: Survey) -> None:
    """Report the rank that the collective waits for, which aborts the collective."""
    peers = context.peers
    departure = peers.cause_or_departure
    event = survey.request("collective", survey.wait_in_words)
    if departure is not None and event is departure:
        # NCCL has no connection that closes with that rank.
        peers.report(event_of("absent", peers.table[departure.rank], str(departure.to_error())))
