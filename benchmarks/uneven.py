"""What it costs a training step that ranks agree on having one more batch: `uneven_inputs="stop_at_shortest"`.

    python benchmarks/uneven.py    # about 2 minutes on 2 cores

Two ranks train the same model on streams of the same length, with the option and without. Where others use the
machine, too, rank 0's processor time, of all its threads, says more than the clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import Effort, Figures, Table, main, on_ranks, ratio, spread, take_turns
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from training import WARMING_UP, Net, make_trainer

from lightning_ddp_ext import DDPExtStrategy


class Stream(IterableDataset[Tensor]):
    def __init__(self, length: int, width: int) -> None:
        self.batch, self.length = torch.ones(16, width), length

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.length):
            yield self.batch


def step(uneven_inputs: Any, width: int, steps: int) -> Figures:
    """Milliseconds of rank 0."""

    def work(rank: int, directory: Path) -> Figures:
        model = Net(width)
        trainer = make_trainer(DDPExtStrategy(uneven_inputs=uneven_inputs), 2, max_epochs=1)
        trainer.fit(model, DataLoader(Stream(steps + WARMING_UP, width), batch_size=None))
        return model.milliseconds_a_step(steps)

    figures: Figures = on_ranks(work, 2)[0]
    return figures


def measure(effort: Effort) -> Table:
    width, steps = 64, effort.choose(150, quick=20)
    kinds = {"without": None, "with": "stop_at_shortest"}
    results = take_turns({name: partial(step, kind, width, steps) for name, kind in kinds.items()}, effort.repeats(15))
    rows = []
    for label, figure in (("by the clock", "clock"), ("processor time of rank 0", "processor")):
        without, agreeing = (results[name][figure] for name in kinds)
        rows.append([label, spread(without), spread(agreeing), ratio(agreeing, without)])
    return Table("uneven", ["milliseconds a step", *kinds, "×"], rows)


if __name__ == "__main__":
    main(__doc__, {"uneven": measure})
