"""What can be said of ranks that make different calls, or none."""

from __future__ import annotations

from lightning_ddp_ext.rendezvous.calls import Call, Calls


def call(rank: int, number: int, name: str = "save", steps: int = 0) -> Call:
    return Call(rank, number, steps, name, name, f"train.py:{rank}")


def test_a_call_is_complete_when_all_have_begun_it() -> None:
    """Each call has its number, and a later one stands for those before it."""
    calls = Calls(rank=0)
    calls.begin("save", "save", "")
    calls.hear(call(1, 1))
    assert calls.begun_by_all(3) == 0
    calls.hear(call(2, 1))
    assert calls.begun_by_all(3) == 1
    for rank in (1, 2):
        calls.hear(call(rank, 2))
        calls.hear(call(rank, 3))
    assert calls.begun_by_all(3) == 1


def test_the_rarest_name_is_the_odd_one() -> None:
    """Calls are compared by number, even if some rank is ahead."""
    calls = Calls(rank=0)
    calls.begin("save", "save", "")
    calls.hear(call(1, 1))
    calls.hear(call(1, 2, "test"))
    assert calls.contradiction() == []
    calls.hear(call(2, 1, "load"))
    assert [each.rank for each in calls.contradiction()] == [2, 0, 1]


def test_calls_that_contradict_each_other_never_become_complete() -> None:
    """Whoever looks first, and however often: nobody is let in."""
    calls = Calls(rank=0)
    calls.begin("save", "save", "")
    calls.hear(call(1, 1, "load"))
    for _ in range(2):
        assert calls.begun_by_all(2) == 0
        assert [each.name for each in calls.contradiction()] == ["load", "save"]


def test_a_rank_that_has_gone_on_without_a_call_has_missed_it() -> None:
    """Not before it has gone on, and not if it has made the call."""
    calls = Calls(rank=1)
    calls.hear(call(0, 1, steps=2))
    calls.steps = 2
    assert calls.missed() is None
    calls.steps = 3
    assert calls.missed() == call(0, 1, steps=2)
    calls.begin("save", "save", "")
    assert calls.missed() is None


def test_what_is_complete_is_forgotten() -> None:
    """A long run does not gather calls."""
    calls = Calls(rank=0)
    for number in range(1, 100):
        calls.begin("save", "save", "")
        calls.hear(call(1, number))
        assert calls.begun_by_all(2) == number
    assert not calls._incomplete


def test_a_call_names_its_place() -> None:
    """If it is known."""
    assert str(call(1, 1)) == "save (train.py:1)"
    assert str(Call(0, 1, 0, "save", "saving", "")) == "saving"
