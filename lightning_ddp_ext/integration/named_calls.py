"""Report the calls that every rank must make, so that a rank that skips one is named."""

from __future__ import annotations

from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.supervision.call_site import call_site


def report_call(what: str) -> None:
    """Report that this rank makes a call that every rank must make; for calls that are rare enough for a message."""
    context = current()
    if context is not None:
        context.barriers.begin(what, call_site())


def report_step() -> None:
    """Advance this rank's step counter: a call of the other ranks before that step was skipped here."""
    context = current()
    if context is not None:
        context.barriers.advance()


def wait_at_barrier(name: str | None) -> bool:
    """Wait for all ranks at a barrier with this name; return whether the ranks are connected, so that they waited."""
    context = current()
    if context is None:
        return False
    context.barriers.wait(context.barriers.begin(f"barrier {name!r}" if name else "a barrier", call_site()))
    return True
