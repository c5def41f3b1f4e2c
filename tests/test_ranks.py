"""Work of rank 0 for all ranks has the same result, or the same error, on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness.ranks import run_ranks
from tests.harness.training import At, Net
from tests.supervision.model import boom, by_hand, make_trainer, throw


class Growing(Exception):
    """Pickle rebuilds it with its text as the layer."""

    def __init__(self, layer: str) -> None:
        super().__init__(f"no layer {layer}")


LOCK = "TypeError: cannot pickle '_thread.lock' object"


class Failing(NamedTuple):
    """Work of rank 0 that fails, and the errors that it and others raise."""

    work: Callable[[], Any]
    on_rank_zero: str
    on_others: str


WORKS = [
    Failing(boom, "BoomError: no such layer", "BoomError: no such layer"),
    # An error that pickle spoils is sent as text.
    Failing(
        lambda: throw(Growing("layer3")),
        "Growing: no layer layer3",
        "RuntimeError: Growing: no layer layer3",
    ),
    # Rank 0 does not continue alone with a result that the others cannot have.
    Failing(threading.Lock, LOCK, LOCK),
]


@dataclass(frozen=True)
class Caught:
    """An error that ``on_rank_zero`` raised."""

    text: str
    cause: str
    notes: list[str]

    @classmethod
    def of(cls, error: Exception) -> Caught:
        notes = getattr(error, "__notes__", [])
        return cls(f"{type(error).__name__}: {error}", str(error.__cause__), notes)


@dataclass
class Worked:
    """What a rank got from ``on_rank_zero`` in the second step."""

    calls: int = 0  # of the work that succeeds, on this rank
    result: Any = None
    errors: list[Caught] = field(default_factory=list)


def work_and_catch(rank: int, world_size: int, directory: Path) -> Worked:
    found = Worked()

    def count() -> list[int]:
        found.calls += 1
        return [1, 2]

    def work_all(trainer: Any) -> None:
        found.result = trainer.strategy.on_rank_zero(count, what="a test")
        for each in WORKS:
            try:
                trainer.strategy.on_rank_zero(each.work, what="a test")
            except Exception as error:
                found.errors.append(Caught.of(error))

    at = At("on_train_batch_start", work_all, earlier=1)
    make_trainer(world_size, by_hand(rank, world_size, f"file://{directory}/store"), at).fit(Net())
    return found


def test_every_rank_has_the_result_or_raises_the_error(tmp_path: Path) -> None:
    """Rank 0 works once, and every rank has its result or its error.

    On other ranks the error has a note with its origin, and rank 0's traceback.
    """
    first, other = run_ranks(work_and_catch, 2, tmp_path)
    assert first.calls == 1
    assert other.calls == 0
    assert first.result == other.result == [1, 2]
    assert [error.text for error in first.errors] == [each.on_rank_zero for each in WORKS]
    assert [error.text for error in other.errors] == [each.on_others for each in WORKS]
    for error in first.errors:
        assert error.notes == []
    for error in other.errors:
        assert error.notes == ["raised on rank 0 (operation: a test)"]
    assert "in boom\n" in other.errors[0].cause
