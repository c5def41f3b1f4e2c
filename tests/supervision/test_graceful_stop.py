"""Where ranks agree to stop."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from lightning_ddp_ext.rendezvous.process_context import join, leave
from lightning_ddp_ext.supervision.graceful_stop import GracefulStop, Position, StopRequest, next_common
from tests.harness.ranks import run_ranks
from tests.rendezvous.rooms import request

EVALUATED = st.integers(1, 9).flatmap(
    lambda of_steps: st.builds(Position, st.integers(0, 3), st.integers(0, of_steps), st.just(of_steps))
)


@given(st.lists(st.one_of(st.builds(Position, st.integers(0, 3)), EVALUATED), min_size=1, max_size=5))
def test_no_rank_has_passed_it_and_it_is_the_next_one(positions: list[Position]) -> None:
    """A step of an evaluation only where it is long enough on every rank that is in one."""
    target = next_common(positions)
    assert not any(position.has_reached(target) for position in positions)
    furthest = max(position.points for position in positions)
    assert target.points in (furthest, furthest + 1)
    if target.points == furthest:
        evaluated = [position for position in positions if position.points == furthest and position.of_steps]
        assert all(target.steps <= position.of_steps for position in evaluated)


def asked_after_the_end(rank: int, world_size: int, where: str) -> list[StopRequest | None]:
    """Rank 1 is asked to stop when the first job is over, and again in the second."""
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
