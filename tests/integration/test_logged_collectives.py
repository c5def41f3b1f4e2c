"""`self.log(..., sync_dist=True)` costs one collective in a step, and no barrier."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.harness.training import Batch, Kind, Net, fit, on_both

STEPS = 4  # in an epoch of ``Net`` on two ranks
VALUES = 10


class Logs(Net):
    """Logs a number of values in each training step, and nothing else."""

    def __init__(self, values: int, **options: Any) -> None:
        super().__init__()
        self.values = values
        self.options = {"sync_dist": True, **options}

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = self.loss(batch)
        for number in range(self.values):
            op = ("mean", "max")[number % 2]
            self.log(f"{number}", loss, reduce_fx=op, **self.options)
        return loss


def count_collectives(kind: Kind, directory: Path) -> dict[str, Counter[str]]:
    """Return the numbers of collectives, by kind: those of two steps without values, and
    the additional ones of an epoch with values.
    """

    def count(model: Net, **options: Any) -> Counter[str]:
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            fit(kind, directory, model, max_epochs=1, limit_val_batches=0, **options)
        names = [event.name for event in recorded.events()]
        return Counter(name.removeprefix("gloo:") for name in names if "gloo:" in name)

    count(Logs(1))  # opens groups
    nothing = count(Logs(0))
    return {
        "two steps": nothing - count(Logs(0), limit_train_batches=STEPS - 2),
        "values": count(Logs(VALUES)) - nothing,
        "four times as many": count(Logs(4 * VALUES)) - nothing,
        "values of epoch": count(Logs(VALUES, on_step=False, on_epoch=True)) - nothing,
    }


@pytest.mark.nightly
def test_a_step_makes_one_collective(tmp_path: Path) -> None:
    """A step with up to 127 values makes one collective; an epoch's end makes one for each
    number, of which a mean has two.

    Stock makes a barrier and an all-reduce for each number in both.

    A step without values makes stock's exchanges, but for the broadcast of whether
    there was a signal.
    """
    (ours, _), (stock, _) = on_both(count_collectives, tmp_path)
    assert stock["two steps"] - ours["two steps"] == {"broadcast": 2}
    assert ours["values"] == ours["four times as many"] == {"all_gather": STEPS}
    assert stock["values"] == {"barrier": STEPS * VALUES, "all_reduce": STEPS * VALUES}
    numbers = VALUES + VALUES // 2  # of a mean also the batch size
    assert ours["values of epoch"] == {"all_gather": numbers}
    assert stock["values of epoch"] == {"barrier": numbers, "all_reduce": numbers}
