"""Work of rank 0 for all ranks has the same result, or the same error, on every rank."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from lightning_ddp_ext.ranks import Ranks
from tests.harness.ranks import run_ranks
from tests.harness.training import At, Kind, Net, on_ranks
from tests.supervision.model import boom, by_hand, make_trainer, throw


class Growing(Exception):
    """Pickle rebuilds it with its text as the layer."""

    def __init__(self, layer: str) -> None:
        super().__init__(f"no layer {layer}")


LOCK = "TypeError: cannot pickle '_thread.lock' object"
# Work of rank 0, and type and text of what it and others raise; an error that pickle
# spoils is sent as text.
WORKS: list[tuple[Callable[[], Any], str, str]] = [
    (boom, "BoomError: no such layer", "BoomError: no such layer"),
    (
        lambda: throw(Growing("layer3")),
        "Growing: no layer layer3",
        "RuntimeError: Growing: no layer layer3",
    ),
    (
        threading.Lock,
        LOCK,
        LOCK,
    ),  # rank 0 does not continue alone with a result that the others cannot have
]


LENGTHS = {10: 2, 600: 3, 2000: 4}  # of texts; collectives for two exchanges


def fit_and_catch(rank: int, world_size: int, directory: Path) -> list[tuple[str, str, list[str]]]:
    """Return results and errors of the strategy's ``on_rank_zero`` in the second step."""
    outcomes = []
    results = iter([[1, 2]])

    def work_all(trainer: Any) -> None:
        for work in (lambda: next(results), *(work for work, *_ in WORKS)):
            try:
                outcomes.append((repr(trainer.strategy.on_rank_zero(work, what="a test")), "", []))
            except Exception as error:
                notes = getattr(error, "__notes__", [])
                outcomes.append((f"{type(error).__name__}: {error}", str(error.__cause__), notes))

    at = At("on_train_batch_start", work_all, earlier=1)
    make_trainer(world_size, by_hand(rank, world_size, f"file://{directory}/store"), at).fit(Net())
    return outcomes


def test_every_rank_has_the_result_or_raises_the_error(tmp_path: Path) -> None:
    """The work runs once; on other ranks an error has a note with its origin, and rank
    0's traceback.
    """
    first, other = run_ranks(fit_and_catch, 2, tmp_path)
    assert first[0] == other[0] == ("[1, 2]", "", [])
    assert [said for said, *_ in first[1:]] == [said for _, said, _ in WORKS]
    assert [said for said, *_ in other[1:]] == [said for *_, said in WORKS]
    assert all(notes == ["raised on rank 0 (operation: a test)"] for *_, notes in other[1:])
    assert all(not notes for *_, notes in first[1:])
    assert "in boom\n" in other[1][1]


def exchange(kind: Kind, directory: Path) -> list[tuple[list[str], str, int]]:
    """Return what the ranks have exchanged, texts of which rank 1's is twice as long,
    and the number of collectives.
    """
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    found = []
    for length in LENGTHS:
        own = str(ranks.rank) * length * (ranks.rank + 1)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            values = ranks.gather(own)
            first = ranks.from_rank_zero(own)
        found.append(
            (
                values,
                first,
                Counter(event.name.partition(":")[0] for event in recorded.events())["gloo"],
            )
        )
    return found


def test_a_small_value_takes_one_collective(tmp_path: Path) -> None:
    """A longer value takes two collectives, even if it is long on one rank only."""
    expected = [
        (["0" * n, "1" * n * 2], "0" * n, collectives) for n, collectives in LENGTHS.items()
    ]
    assert on_ranks("stock", exchange, tmp_path) == [expected] * 2
