"""Measure the cost of `uneven_inputs=`, with which ranks agree in each step whether
they have one more batch.

    python benchmarks/uneven.py    # about 2 minutes on 2 cores

Two ranks train the same model on streams of the same length, with it and without it. On
a busy machine rank 0's processor time, of all its threads, says more than the clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import Effort, Figures, Table, main, on_rank_zero, ratio, spread, take_turns
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from training import WARMING_UP, Net, make_trainer

from lightning_ddp_ext import DDPExtStrategy


class Stream(IterableDataset[Tensor]):
    def __init__(self, length: int, width: int) -> None:
        self.batch = torch.ones(16, width)
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.length):
            yield self.batch


def step(uneven_inputs: Any, width: int, steps: int) -> Figures:
    """Return milliseconds of rank 0."""

    def work(rank: int, directory: Path) -> Figures:
        model = Net(width)
        trainer = make_trainer(DDPExtStrategy(uneven_inputs=uneven_inputs), 2, max_epochs=1)
        trainer.fit(model, DataLoader(Stream(steps + WARMING_UP, width), batch_size=None))
        return model.milliseconds_a_step()

    return on_rank_zero(work)


def measure(effort: Effort) -> Table:
    width = 64
    steps = effort.choose(150, quick=20)
    kinds = (None, "stop_at_shortest")
    results = take_turns(
        {str(kind): partial(step, kind, width, steps) for kind in kinds}, effort.repeats(15)
    )
    without = results["None"]
    rows = []
    for kind in kinds:
        own = results[str(kind)]
        cells = [
            (spread(own[each]), ratio(own[each], without[each])) for each in ("clock", "processor")
        ]
        rows.append([f'`"{kind}"`' if kind else "without it", *cells[0], *cells[1]])
    return Table(
        "uneven",
        [
            "a step with `uneven_inputs=`",
            "ms by the clock",
            "× without",
            "ms of processor time of rank 0",
            "× without",
        ],
        rows,
    )


if __name__ == "__main__":
    main(__doc__, {"uneven": measure})
