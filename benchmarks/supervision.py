"""What a step costs, with and without metrics of all ranks, and how ranks end when one of them gets SIGTERM.

    python benchmarks/supervision.py           # about 5 minutes on 2 cores
    python benchmarks/supervision.py --steps 50 --repeats 2

Two ranks train the same small model with stock ``ddp``, with ours, and with ours and the callbacks that supervise, by
turns within each repeat, in one pair of processes for the steps, and in new ones for each signal. Prints Markdown
tables. Medians are followed by the lowest and highest value; ratios are medians of those within each repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
import warnings
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from measuring import fork_ranks, print_table, scratch_directory, spread, statuses
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPExtStrategy, HangWatchdog, RankConsistency, RankLogging

WORLD_SIZE = 2
WARMING_UP = 20  # steps
SIGNALLED_AT = 50
STOCK_TIMEOUT = 20
KINDS = ("stock", "ours", "ours with callbacks")

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


def one_run(directory: Path, kind: str, metrics: int, steps: int, ranks: int, max_time: bool) -> float:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    # Stock takes the process group that ours has opened, so that both have the same one.
    strategy = DDPStrategy() if kind == "stock" else DDPExtStrategy(init_method=f"file://{directory}/store")
    callbacks = []
    if kind == "ours with callbacks":
        callbacks = [HangWatchdog(timeout=600), RankConsistency(), RankLogging(directory / "logs")]
    settings = {"accelerator": "cpu", "devices": ranks, "max_steps": steps + WARMING_UP}
    if max_time:  # Lightning broadcasts after each step whether it has passed
        settings["max_time"] = "00:01:00:00"
    trainer = L.Trainer(strategy=strategy, callbacks=callbacks, **settings, **quiet)
    model = Logging(metrics)
    trainer.fit(model)
    return (time.perf_counter() - model.began) / steps * 1000


def measure(numbers: list[int], steps: int, repeats: int, ranks: int, max_time: bool) -> Figures:
    with scratch_directory() as name:
        directory = Path(name)

        def work(rank: int) -> None:
            warnings.simplefilter("ignore")
            torch.set_num_threads(1)
            found: Figures = {f"{kind} {metrics}": [] for kind in KINDS for metrics in numbers}
            one_run(directory, "ours", 1, 5, ranks, max_time)  # opens the process group, and warms up
            for repeat in range(repeats):
                for metrics in numbers:
                    for kind in (*KINDS[repeat % 3 :], *KINDS[: repeat % 3]):
                        found[f"{kind} {metrics}"].append(one_run(directory, kind, metrics, steps, ranks, max_time))
            (directory / f"{rank}.json").write_text(json.dumps(found))

        ended = statuses(fork_ranks(ranks, work), seconds=900)
        assert not any(ended), f"exit statuses {ended}"
        found: Figures = json.loads((directory / "0.json").read_text())
        return found


class Signalled(L.Callback):
    """Sends rank 1 SIGTERM in the middle of training, and notes when."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: object, index: int) -> None:
        if index == SIGNALLED_AT and trainer.global_rank == 1:
            (self.directory / "began").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        (self.directory / f"stopped {trainer.global_rank}").write_text(str(trainer.global_step))


def signalled(kind: str) -> dict[str, object]:
    """What becomes of two ranks of which one gets SIGTERM."""
    with scratch_directory() as name:
        directory = Path(name)

        def work(rank: int) -> None:
            warnings.simplefilter("ignore")
            torch.set_num_threads(1)
            store = f"file://{directory}/store"
            strategy: DDPStrategy = DDPExtStrategy(init_method=store, timeout=STOCK_TIMEOUT)
            if kind == "stock":
                timeout = timedelta(seconds=STOCK_TIMEOUT)
                dist.init_process_group("gloo", store.replace("store", "stock"), timeout, WORLD_SIZE, rank)
                strategy = DDPStrategy()
            quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
            settings = {"accelerator": "cpu", "devices": WORLD_SIZE, "max_epochs": -1, "default_root_dir": directory}
            trainer = L.Trainer(strategy=strategy, callbacks=[Signalled(directory)], **settings, **quiet)
            trainer.fit(Logging(0))

        ended = statuses(fork_ranks(WORLD_SIZE, work), seconds=120)
        seconds = time.monotonic() - float((directory / "began").read_text())
        steps = sorted({path.read_text() for path in directory.glob("stopped *")})
        saved = [path.name for path in directory.rglob("*.ckpt")]
        return {"seconds": seconds, "statuses": ended, "steps": steps, "saved": saved}


def row_of_signals(kind: str, repeats: int) -> list[str]:
    found = [signalled(kind) for _ in range(repeats)]
    together = sum(len(each["steps"]) == 1 for each in found)  # type: ignore[arg-type]
    statuses_seen = sorted({str(each["statuses"]) for each in found})
    saved = sum(bool(each["saved"]) for each in found)
    seconds = spread([float(str(each["seconds"])) for each in found])
    return [kind, seconds, f"{together} of {repeats}", f"{saved} of {repeats}", ", ".join(statuses_seen)]


def row(metrics: int, found: Figures) -> list[str]:
    stock, *others = (found[f"{kind} {metrics}"] for kind in KINDS)
    ratios = [spread([mine / theirs for mine, theirs in zip(other, stock, strict=True)]) for other in others]
    columns = [cell for other, ratio in zip(others, ratios, strict=True) for cell in (spread(other), ratio)]
    return [str(metrics), spread(stock), *columns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metrics", type=int, nargs="+", default=[0, 1, 10, 20])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--signals", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=WORLD_SIZE)
    parser.add_argument("--max-time", action="store_true", help="with Trainer(max_time=...)")
    chosen = parser.parse_args()
    found = measure(chosen.metrics, chosen.steps, chosen.repeats, chosen.ranks, chosen.max_time)
    rows = [row(metrics, found) for metrics in chosen.metrics]
    columns = ["metrics with sync_dist", "stock", "ours", "ratio", "with all callbacks", "ratio"]
    print_table(
        f"Metrics of all ranks in each step, {chosen.ranks} ranks, 4 layers of width 64, batch size 16, ms a step"
        f"{', with max_time' if chosen.max_time else ''}",
        columns,
        rows,
    )
    if chosen.signals:
        print_table(
            f"SIGTERM to rank 1 of 2; timeout {STOCK_TIMEOUT} s",
            ["", "s until both are gone", "same step", "saved", "exit statuses"],
            [row_of_signals(kind, chosen.signals) for kind in KINDS[:2]],
        )


if __name__ == "__main__":
    main()
