"""Where ranks agree to stop."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_ddp_ext.supervision.stopping import Place, agree

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
