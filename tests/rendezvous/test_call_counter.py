"""What can be said of ranks that make different calls, or none."""

from __future__ import annotations

from lightning_ddp_ext.rendezvous.call_counter import Call, CallCounter


def call(rank: int, number: int, name: str = "save", steps: int = 0) -> Call:
    return Call(rank, number, steps, name, name, f"train.py:{rank}")


def test_a_call_is_complete_when_all_have_begun_it() -> None:
    """Each call has its ordinal, and ranks may be ahead."""
    counter = CallCounter(rank=0)
    for early in (call(0, 1), call(1, 1), call(1, 2)):
        counter.hear(early)
        assert not counter.is_complete(early, 3)
    counter.hear(call(2, 1))
    assert counter.is_complete(call(2, 1), 3)
    assert not counter.is_complete(call(2, 2), 3)


def test_the_rarest_name_is_the_odd_one() -> None:
    """Calls are compared by ordinal, even if some rank is ahead."""
    counter = CallCounter(rank=0)
    for heard in (call(0, 1), call(1, 1), call(1, 2, "test")):
        counter.hear(heard)
        assert not counter.contradicts(heard)
    counter.hear(call(2, 1, "load"))
    assert counter.contradicts(call(2, 1, "load"))
    assert [each.rank for each in counter.contradiction(call(2, 1, "load"))] == [2, 0, 1]


def test_a_rank_that_has_gone_on_without_a_call_has_missed_it() -> None:
    """Not before it has gone on, and not if it has made the call."""
    counter = CallCounter(rank=1)
    counter.hear(call(0, 1, steps=2))
    counter.steps = 2
    assert counter.missed() is None
    counter.steps = 3
    assert counter.missed() == call(0, 1, steps=2)
    counter.begin("save", "save", "")
    assert counter.missed() is None


def test_ranks_that_have_not_come_are_known() -> None:
    """A later call stands for those before it."""
    counter = CallCounter(rank=0)
    counter.hear(call(1, 1))
    counter.hear(call(1, 2))
    assert counter.absent(3, 2) == [0, 2]


def test_what_is_complete_can_be_forgotten() -> None:
    """A long run does not gather calls."""
    counter = CallCounter(rank=0)
    for number in range(1, 100):
        for rank in range(2):
            counter.hear(call(rank, number))
        counter.forget(number)
    assert not counter._begun
    assert not counter._earliest


def test_a_call_names_its_place() -> None:
    """If it is known."""
    assert str(call(1, 1)) == "save (train.py:1)"
    assert str(Call(0, 1, 0, "save", "saving", "")) == "saving"
