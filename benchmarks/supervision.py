"""What a step costs that logs metrics of all ranks, beside stock Lightning in the same run; prints a Markdown table.

    python benchmarks/supervision.py           # about 3 minutes on 2 cores
    python benchmarks/supervision.py --steps 50 --repeats 2

Two ranks train the same small model with stock ``ddp`` and with ours, by turns within each repeat, in one pair of
processes. Medians are followed by the lowest and highest value; ratios are medians of those within each repeat.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from measuring import fork_ranks, print_table, scratch_directory, spread, statuses
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPExtStrategy

WORLD_SIZE = 2
WARMING_UP = 20  # steps
KINDS = ("stock", "ours")

Figures = dict[str, list[float]]  # milliseconds a step, by kind and number of metrics


class Logging(L.LightningModule):
    """Four linear layers, and so many metrics in each step."""

    def __init__(self, metrics: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.names = [f"metric {number}" for number in range(metrics)]
        self.began = 0.0

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == WARMING_UP:
            self.began = time.perf_counter()
        loss: Tensor = self.layers(batch).square().mean()
        for name in self.names:
            self.log(name, loss, sync_dist=True)
        return loss

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.ones(100_000, 64), batch_size=16)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def one_run(directory: Path, kind: str, metrics: int, steps: int) -> float:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    # Stock takes the process group that ours has opened, so that both have the same one.
    strategy = DDPStrategy() if kind == "stock" else DDPExtStrategy(init_method=f"file://{directory}/store")
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=WORLD_SIZE, max_steps=steps + WARMING_UP, **quiet)
    model = Logging(metrics)
    trainer.fit(model)
    return (time.perf_counter() - model.began) / steps * 1000


def measure(numbers: list[int], steps: int, repeats: int) -> Figures:
    with scratch_directory() as name:
        directory = Path(name)

        def work(rank: int) -> None:
            warnings.simplefilter("ignore")
            torch.set_num_threads(1)
            found: Figures = {f"{kind} {metrics}": [] for kind in KINDS for metrics in numbers}
            one_run(directory, "ours", 1, steps=5)  # opens the process group, and warms up
            for repeat in range(repeats):
                for metrics in numbers:
                    for kind in KINDS[:: 1 if repeat % 2 else -1]:
                        found[f"{kind} {metrics}"].append(one_run(directory, kind, metrics, steps))
            (directory / f"{rank}.json").write_text(json.dumps(found))

        ended = statuses(fork_ranks(WORLD_SIZE, work), seconds=900)
        assert not any(ended), f"exit statuses {ended}"
        found: Figures = json.loads((directory / "0.json").read_text())
        return found


def row(metrics: int, found: Figures) -> list[str]:
    stock, ours = (found[f"{kind} {metrics}"] for kind in KINDS)
    ratio = spread([mine / theirs for mine, theirs in zip(ours, stock, strict=True)])
    return [str(metrics), spread(stock), spread(ours), ratio]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metrics", type=int, nargs="+", default=[0, 1, 10, 20])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=7)
    chosen = parser.parse_args()
    found = measure(chosen.metrics, chosen.steps, chosen.repeats)
    rows = [row(metrics, found) for metrics in chosen.metrics]
    columns = ["metrics with sync_dist", "stock", "ours", "ratio"]
    print_table(
        "Metrics of all ranks in each step, 2 ranks, 4 layers of width 64, batch size 16, ms a step", columns, rows
    )


if __name__ == "__main__":
    main()
