"""Work that rank 0 does for all ranks has the same result or error on every rank."""

import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ddp_ext.checksum import raise_if_different
from lightning_ddp_ext.errors import RankFailedError
from lightning_ddp_ext.ranks import Ranks
from tests.harness.ranks import launch_ranks, run_ranks
from tests.harness.training import Net, boom, fit, raised, stock_group

OPERATION = "a test"
LOCK_ERROR = "TypeError: cannot pickle '_thread.lock' object"


class LayerError(Exception):
    """An error whose text changes in pickle, which passes the text as the layer."""

    def __init__(self, layer: str) -> None:
        super().__init__(f"no layer {layer}")


def raise_layer_error() -> None:
    raise LayerError("layer3")


def work_on_rank_zero(rank: int, world_size: int, directory: Path, work: Callable[[], Any]) -> Any:
    trainer = fit("ours", directory, Net(), max_epochs=1)
    return trainer.strategy.on_rank_zero(work, what=OPERATION)


def error_and_cause(
    rank: int, world_size: int, directory: Path, work: Callable[[], Any]
) -> tuple[str, str]:
    """Return the error that the work raises, with its notes, and the text of its cause."""
    error = raised(Exception, work_on_rank_zero, rank, world_size, directory, work)
    return "".join(traceback.format_exception_only(error)), str(error.__cause__)


def test_every_rank_has_the_result(tmp_path: Path) -> None:
    """Only rank 0 calls the function."""
    outcomes = launch_ranks(work_on_rank_zero, 2, tmp_path, os.getpid)
    assert [outcome.result for outcome in outcomes] == [outcomes[0].pid] * 2


@pytest.mark.parametrize(
    ("work", "error_on_rank_0", "error_on_others"),
    [
        pytest.param(
            boom,
            "tests.harness.training.BoomError: no such layer",
            "tests.harness.training.BoomError: no such layer",
            id="an error",
        ),
        pytest.param(
            raise_layer_error,
            "tests.test_ranks.LayerError: no layer layer3",
            "RuntimeError: LayerError: no layer layer3",
            id="an error that pickle changes",
        ),
        # Rank 0 does not continue alone with a result that the others cannot have.
        pytest.param(threading.Lock, LOCK_ERROR, LOCK_ERROR, id="a result without pickle"),
    ],
)
def test_every_rank_raises_the_error(
    work: Callable[[], Any], error_on_rank_0: str, error_on_others: str, tmp_path: Path
) -> None:
    """On other ranks, a note names rank 0, and the cause is rank 0's traceback."""
    (on_rank_0, _), (on_rank_1, cause) = run_ranks(error_and_cause, 2, tmp_path, work)
    assert on_rank_0 == f"{error_on_rank_0}\n"
    note = f"raised on rank 0 (operation: {OPERATION})"
    assert on_rank_1 == f"{error_on_others}\n{note}\n"
    assert "Traceback (most recent call last):" in cause
    assert error_on_rank_0 in cause


def raise_rank_failure() -> None:
    raise RankFailedError("rank 1 failed")


EXCHANGES: dict[str, Callable[[Ranks], Any]] = {
    "gather": lambda ranks: ranks.gather(1),
    "to_rank_zero": lambda ranks: ranks.to_rank_zero(1),
    "from_rank_zero": lambda ranks: ranks.from_rank_zero(1),
    "broadcast": lambda ranks: ranks.broadcast(torch.zeros(1, dtype=torch.uint8)),
}


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
def test_no_collective_starts_after_a_rank_failed(exchange: Callable[[Ranks], Any]) -> None:
    """A collective that starts during an abort might wait until its timeout.

    This test has no process group, so a collective that starts raises another error.
    """
    with pytest.raises(RankFailedError, match="rank 1 failed"):
        exchange(Ranks(0, 2, check=raise_rank_failure))


def test_a_comparison_that_an_abort_ends_raises_the_failure(tmp_path: Path) -> None:
    """An aborted collective of NCCL may leave the values of this rank unchanged.

    So does the collective of a single rank in this test.
    """
    ranks = Ranks(0, 2, check_received=raise_rank_failure)
    with stock_group(0, 1, tmp_path), pytest.raises(RankFailedError, match="rank 1 failed"):
        raise_if_different({"weight": torch.ones(1)}, ranks, when="in a test")
