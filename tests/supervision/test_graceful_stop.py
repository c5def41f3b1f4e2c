"""A request to stop that comes too late."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from lightning_ddp_ext.rendezvous.process_context import join, leave
from lightning_ddp_ext.supervision.graceful_stop import GracefulStop, StopRequest
from tests.harness.ranks import run_ranks
from tests.rendezvous.rooms import request


def asked_after_the_end(rank: int, world_size: int, where: str) -> list[StopRequest | None]:
    """Rank 1 gets a stop request after the first job, and again in the second."""
    context = join(request(rank, world_size, where))
    assert context is not None
    stopping, barriers = context.component(GracefulStop), context.barriers

    def ask() -> None:
        if rank == 1:
            stopping.ask(15)
        barriers.enter("the request is on its way before this")

    stopping.begin(timedelta(seconds=60))
    found = [stopping.at_point(), stopping.at_last_point()]
    stopping.end()
    ask()
    stopping.begin(timedelta(seconds=60))
    found.append(stopping.at_point())
    ask()
    found += [stopping.at_point(), stopping.at_point()]
    stopping.end()
    leave()
    return found


def test_a_request_that_comes_too_late_does_not_stop_the_next_job(tmp_path: Path) -> None:
    """A request between two Trainers is dropped; one in the second stops all ranks at its next stop point."""
    for found in run_ranks(asked_after_the_end, 2, str(tmp_path / "store")):
        assert [request and request.job for request in found] == [None, None, None, 2, None]
