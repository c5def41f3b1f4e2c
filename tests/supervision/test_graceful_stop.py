"""Where ranks agree to stop."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from lightning_ddp_ext.rendezvous.process_context import join, leave
from lightning_ddp_ext.supervision.graceful_stop import GracefulStop, Place, Request, agree
from tests.ranks import run_ranks
from tests.rendezvous.rooms import request

EVALUATED = st.integers(1, 9).flatmap(
    lambda of_steps: st.builds(Place, st.integers(0, 3), st.integers(0, of_steps), st.just(of_steps))
)
PLACES = st.lists(st.one_of(st.builds(Place, st.integers(0, 3)), EVALUATED), min_size=1, max_size=5)


def order(place: Place) -> tuple[int, int]:
    return place.passed, place.steps


@given(PLACES)
def test_no_rank_has_passed_the_place_and_each_comes_to_it(places: list[Place]) -> None:
    """Within an evaluation only if it is everybody's, and for all of them long enough."""
    agreement = agree(places)
    target = agreement.target
    assert all(order(place) < order(target) for place in places)
    if target.steps:
        assert all(place.passed == target.passed and target.steps <= place.of_steps for place in places)


@given(PLACES)
def test_it_is_the_next_one(places: list[Place]) -> None:
    """After that of the rank which is furthest; and if an earlier one may come up, all are asked once more."""
    agreement = agree(places)
    furthest = max(places, key=order)
    next_places = [(furthest.passed + 1, 0), (furthest.passed, max(place.steps for place in places) + 1)]
    assert order(agreement.target) in next_places
    may_come = furthest.of_steps > 0 and not all(place.passed == furthest.passed and place.of_steps for place in places)
    assert agreement.is_final or may_come or any(place.of_steps for place in places)
    assert agree([Place(furthest.passed)] * 3).is_final


def late_to_the_end(rank: int, world_size: int, where: str) -> tuple[Request | None, bool]:
    """Rank 1 is at the end long before rank 0, and gets a signal there that rank 0 is not told of."""
    context = join(request(rank, world_size, where, timeout=0.2))
    assert context is not None
    stopping, barriers, store = context.component(GracefulStop), context.barriers, context.store
    stopping.begin(timedelta(seconds=60))

    def signal_at_the_end() -> None:
        store.wait(["is there"])
        stopping.expect(15)
        store.set("signalled", "")

    if rank == 1:
        threading.Thread(target=signal_at_the_end).start()
    else:
        while 1 in barriers._counter.absent(2, 1):
            time.sleep(0.01)
        time.sleep(2 * context.collective_timeout.total_seconds())
        store.set("is there", "")
        store.wait(["signalled"])
    found = stopping.at_last_place()
    stopping.end()
    stopping.ask(15)
    has_timer = stopping._timer is not None
    leave()
    return found, has_timer


def asked_after_the_end(rank: int, world_size: int, where: str) -> list[Request | None]:
    """Rank 1 is asked to stop when the first job is over, and again in the second."""
    context = join(request(rank, world_size, where))
    assert context is not None
    stopping, barriers = context.component(GracefulStop), context.barriers

    def ask() -> None:
        if rank == 1:
            stopping.ask(15)
        barriers.enter("the request is on its way before this")

    found = []
    for number in range(2):
        stopping.begin(timedelta(seconds=60))
        found.append(stopping.at_place())
        if number == 0:
            found.append(stopping.at_last_place())
            stopping.end()
        ask()
    found += [stopping.at_place(), stopping.at_place()]
    stopping.end()
    leave()
    return found


def test_who_is_asked_too_late_does_not_stop_the_next_job(tmp_path: Path) -> None:
    """A request between two Trainers is nobody's; one in the second stops all ranks at its next place."""
    for found in run_ranks(asked_after_the_end, 2, str(tmp_path / "store")):
        assert [request and request.job for request in found] == [None, None, None, 2, None]


def test_ranks_wait_at_the_end_as_long_as_it_takes_but_for_no_answer(tmp_path: Path) -> None:
    """Callbacks may take long there; and whoever is asked to stop after the end has no deadline."""
    assert run_ranks(late_to_the_end, 2, str(tmp_path / "store")) == [(None, False)] * 2
