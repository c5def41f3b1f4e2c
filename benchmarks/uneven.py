"""What it costs a training step that ranks agree on having one more batch; prints a Markdown table.

    python benchmarks/uneven.py                # about 2 minutes on 2 cores
    python benchmarks/uneven.py --steps 200 --repeats 2

Two ranks train the same model on streams of the same length, with ``uneven_inputs="stop_at_shortest"`` and without, by
turns within each repeat, in one pair of processes. Medians are followed by the lowest and highest value; differences
and ratios are medians of those within each repeat. Where others use the machine, too, rank 0's processor time, of all
its threads, says more than the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from measuring import fork_ranks, print_table, scratch_directory, spread, statuses
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_ext import DDPExtStrategy

WORLD_SIZE = 2
WARMING_UP = 20  # steps
KINDS: dict[str, Any] = {"without": None, "stop_at_shortest": "stop_at_shortest"}


class Stream(IterableDataset[Tensor]):
    def __init__(self, rank: int, length: int, width: int) -> None:
        self.batch, self.length = torch.full((16, width), float(rank)), length

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.length):
            yield self.batch


class Layers(L.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        self.began = self.began_cpu = 0.0

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == WARMING_UP:
            self.began, self.began_cpu = time.perf_counter(), time.process_time()
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


Figures = list[tuple[float, float]]  # milliseconds a step: by the clock, and of processor time


def one_run(rank: int, directory: Path, kind: str, width: int, steps: int) -> tuple[float, float]:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = DDPExtStrategy(init_method=f"file://{directory}/store", uneven_inputs=KINDS[kind])
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=WORLD_SIZE, max_epochs=1, **quiet)
    model = Layers(width)
    trainer.fit(model, DataLoader(Stream(rank, steps + WARMING_UP, width), batch_size=None))
    clock, cpu = time.perf_counter() - model.began, time.process_time() - model.began_cpu
    return clock / steps * 1000, cpu / steps * 1000


def measure(width: int, steps: int, repeats: int) -> dict[str, Figures]:
    with scratch_directory() as name:
        directory = Path(name)

        def work(rank: int) -> None:
            warnings.simplefilter("ignore")
            torch.set_num_threads(1)
            found: dict[str, Figures] = {kind: [] for kind in KINDS}
            for repeat in range(repeats + 1):
                for kind in list(KINDS)[:: 1 if repeat % 2 else -1]:
                    value = one_run(rank, directory, kind, width, steps)
                    if repeat:  # the first one warms up
                        found[kind].append(value)
            (directory / f"{rank}.json").write_text(json.dumps(found))

        ended = statuses(fork_ranks(WORLD_SIZE, work), seconds=900)
        assert not any(ended), f"exit statuses {ended}"
        found: dict[str, Figures] = json.loads((directory / "0.json").read_text())
        return found


def row(width: int, found: dict[str, Figures]) -> list[str]:
    cells = [f"4 × {width}"]
    for figure in range(2):
        without, agreeing = ([run[figure] for run in found[kind]] for kind in KINDS)
        pairs = list(zip(agreeing, without, strict=True))
        extra = statistics.median(1000 * (mine - theirs) for mine, theirs in pairs)
        ratio = spread([mine / theirs for mine, theirs in pairs])
        cells += [spread(without), spread(agreeing), f"{extra:+.0f}", ratio]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=15)
    chosen = parser.parse_args()
    rows = [row(width, measure(width, chosen.steps, chosen.repeats)) for width in chosen.widths]
    columns = ["without", "with", "extra, µs", "ratio"]
    headings = ["linear layers", *columns, *(f"processor: {name}" for name in columns)]
    print_table("Agreeing on one more batch, 2 ranks, batch size 16, ms a step", headings, rows)


if __name__ == "__main__":
    main()
