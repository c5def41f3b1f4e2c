"""What it costs a training step that ranks agree on having one more batch; prints a Markdown table.

    python benchmarks/uneven.py                # about 2 minutes on 2 cores
    python benchmarks/uneven.py --steps 200 --repeats 2

Two ranks train the same model on streams of the same length, with ``uneven_inputs="stop_at_shortest"`` and without, by
turns within each repeat, in one pair of processes. Medians are followed by the lowest and highest value; the ratio is
the median of those within each repeat.
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
        self.began = 0.0

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == WARMING_UP:
            self.began = time.perf_counter()
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def milliseconds(rank: int, directory: Path, kind: str, width: int, steps: int) -> float:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = DDPExtStrategy(init_method=f"file://{directory}/store", uneven_inputs=KINDS[kind])
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=WORLD_SIZE, max_epochs=1, **quiet)
    model = Layers(width)
    trainer.fit(model, DataLoader(Stream(rank, steps + WARMING_UP, width), batch_size=None))
    return (time.perf_counter() - model.began) / steps * 1000


def measure(width: int, steps: int, repeats: int) -> dict[str, list[float]]:
    with scratch_directory() as name:
        directory = Path(name)

        def work(rank: int) -> None:
            warnings.simplefilter("ignore")
            torch.set_num_threads(1)
            found: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for repeat in range(repeats + 1):
                for kind in list(KINDS)[:: 1 if repeat % 2 else -1]:
                    value = milliseconds(rank, directory, kind, width, steps)
                    if repeat:  # the first one warms up
                        found[kind].append(value)
            (directory / f"{rank}.json").write_text(json.dumps(found))

        ended = statuses(fork_ranks(WORLD_SIZE, work), seconds=900)
        assert not any(ended), f"exit statuses {ended}"
        found: dict[str, list[float]] = json.loads((directory / "0.json").read_text())
        return found


def row(width: int, found: dict[str, list[float]]) -> list[str]:
    without, with_it = found["without"], found["stop_at_shortest"]
    pairs = list(zip(with_it, without, strict=True))
    extra = statistics.median(1000 * (mine - theirs) for mine, theirs in pairs)
    ratio = spread([mine / theirs for mine, theirs in pairs])
    return [f"4 × {width}", spread(without), spread(with_it), f"{extra:.0f}", ratio]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=9)
    chosen = parser.parse_args()
    rows = [row(width, measure(width, chosen.steps, chosen.repeats)) for width in chosen.widths]
    columns = ["linear layers", "without (ms a step)", "with (ms a step)", "extra (µs a step)", "ratio"]
    print_table("Agreeing on one more batch, 2 ranks, batch size 16", columns, rows)


if __name__ == "__main__":
    main()
