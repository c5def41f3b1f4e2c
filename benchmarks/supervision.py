"""Measure a step with and without values logged over all ranks, and the exit of all
ranks after SIGTERM to one.

    python benchmarks/supervision.py    # about 4 minutes on 2 cores

The same small model with stock ``ddp``, with ours, and with ours and the callbacks that
supervise; each fit in separate processes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.strategies import DDPStrategy
from measuring import (
    Effort,
    Figures,
    Table,
    fork_ranks,
    main,
    on_rank_zero,
    ratio,
    scratch_directory,
    spread,
    statuses,
    take_turns,
)
from torch import Tensor
from training import WARMING_UP, Net, make_trainer

from lightning_ddp_ext import (
    DDPExtStrategy,
    RankConsistency,
    RankZeroCheckpoint,
    SamplerEpochSeeding,
    SlowRanks,
    SyncBatchNormConversion,
)

STOCK_TIMEOUT = 20  # seconds
SIGNALLED_AT = 50


def step(kind: str, logged: int, steps: int, ranks: int = 2, **options: Any) -> Figures:
    """Return milliseconds of rank 0."""

    def work(rank: int, directory: Path) -> Figures:
        strategy = "ddp" if kind == "stock" else "ddp_ext"
        more = dict(options)
        if kind == "with all callbacks":
            saving = RankZeroCheckpoint(directory, save_last=True)
            callbacks = [
                RankConsistency(),
                SyncBatchNormConversion(),
                SamplerEpochSeeding(),
                saving,
            ]
            more |= {"callbacks": callbacks, "enable_checkpointing": True}
        if kind == "with SlowRanks":
            more |= {"callbacks": [SlowRanks()]}
        model = Net(logged=logged)
        make_trainer(strategy, ranks, max_steps=steps + WARMING_UP, **more).fit(model)
        return model.milliseconds_a_step()

    return on_rank_zero(work, ranks)


def measure_step(effort: Effort) -> Table:
    steps = effort.choose(150, quick=20)
    kinds = effort.choose(
        ("stock", "ours", "with all callbacks"), quick=("stock", "with all callbacks")
    )
    rows = []
    for ranks, logged in effort.choose(((2, 0), (2, 1), (2, 10), (2, 20), (4, 0)), quick=((2, 1),)):
        turns: dict[str, Callable[[], Figures]] = {
            kind: partial(step, kind, logged, steps, ranks) for kind in kinds
        }
        results = take_turns(turns, effort.repeats(7))
        clocks = [results[kind]["clock"] for kind in kinds]
        ratios = [
            cell for before, own in pairwise(clocks) for cell in (spread(own), ratio(own, before))
        ]
        rows.append([f"{ranks} ranks, {logged or 'none'}", spread(clocks[0]), *ratios])
    columns = [
        "stock `ddp`, ms a step",
        "`ddp_ext`",
        "× stock",
        "with all callbacks",
        "× `ddp_ext`",
    ]
    return Table("step", ["values logged in each step", *columns[: 2 * len(kinds) - 1]], rows)


def measure_slow_ranks(effort: Effort) -> Table:
    """Measure steps with `SlowRanks` at its defaults, which compares every 100 steps."""
    steps = effort.choose(600, quick=120)
    turns: dict[str, Callable[[], Figures]] = {
        kind: partial(step, kind, 0, steps) for kind in ("ours", "with SlowRanks")
    }
    results = take_turns(turns, effort.repeats(7))
    without, with_callback = (results[kind]["clock"] for kind in turns)
    title = "a step with `SlowRanks()`, nothing logged"
    columns = [title, "without, ms", "with", "× without"]
    cells = [spread(without), spread(with_callback), ratio(with_callback, without)]
    return Table("slow_ranks", columns, [["2 ranks", *cells]])


class LogsAnEpoch(Net):
    """Logs values of an epoch, and times how long they are reduced at its end."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.log_dict(
            {f"{number}": loss for number in range(50)},
            on_step=False,
            on_epoch=True,
            sync_dist=True,
        )
        return loss

    def on_train_epoch_end(self) -> None:
        self.trainer.strategy.barrier("the end of the epoch")
        self.began = time.perf_counter()

    def on_train_end(self) -> None:
        self.seconds = time.perf_counter() - self.began


def epoch_end(kind: str, ranks: int) -> Figures:
    def work(rank: int, directory: Path) -> Figures:
        model = LogsAnEpoch()
        make_trainer(
            "ddp" if kind == "stock" else "ddp_ext", ranks, max_epochs=1, limit_train_batches=1
        ).fit(model)
        return {"ms": 1000 * model.seconds}

    return on_rank_zero(work, ranks)


def measure_epoch_end(effort: Effort) -> Table:
    rows = []
    for ranks in effort.choose((2, 16), quick=(2,)):
        results = take_turns(
            {kind: partial(epoch_end, kind, ranks) for kind in ("stock", "ours")}, effort.repeats(3)
        )
        stock, ours = (results[kind]["ms"] for kind in ("stock", "ours"))
        rows.append([f"{ranks} ranks", spread(stock), spread(ours), ratio(ours, stock)])
    title = "50 values with `on_epoch=True, sync_dist=True` at the end of an epoch"
    return Table("epoch_end", [title, "stock `ddp`, ms", "`ddp_ext`", "× stock"], rows)


def measure_max_time(effort: Effort) -> Table:
    """Measure steps with `max_time`, for which Lightning broadcasts after each step
    whether the time has passed.
    """
    steps, ranks = effort.choose((150, 4), quick=(20, 2))
    turns: dict[str, Callable[[], Figures]] = {
        kind: partial(step, kind, 0, steps, ranks, max_time="00:01:00:00")
        for kind in ("stock", "ours")
    }
    results = take_turns(turns, effort.repeats(5))
    cell = ratio(results["ours"]["clock"], results["stock"]["clock"])
    title = "a step with `Trainer(max_time=...)`, nothing logged"
    return Table("max_time", [title, "`ddp_ext` × stock"], [[f"{ranks} ranks", cell]])


class Signalled(L.Callback):
    """Sends rank 1 SIGTERM in the middle of training; notes when, and at which step
    each rank stops.
    """

    def __init__(self, directory: Path, step: int) -> None:
        self.directory = directory
        self.step = step

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: object, index: int
    ) -> None:
        if index == self.step and trainer.global_rank == 1:
            (self.directory / "began").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(
        self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException
    ) -> None:
        (self.directory / f"stopped {trainer.global_rank}").write_text(str(trainer.global_step))


def stop(kind: str, step: int, seen: set[str]) -> Figures:
    """Run two ranks of which one gets SIGTERM; exit statuses are added to ``seen``."""
    with scratch_directory() as directory:

        def work(rank: int) -> None:
            stock = DDPStrategy(timeout=timedelta(seconds=STOCK_TIMEOUT))
            strategy = stock if kind.startswith("stock") else DDPExtStrategy(timeout=STOCK_TIMEOUT)
            options = {
                "max_epochs": -1,
                "default_root_dir": directory,
                "enable_checkpointing": True,
            }
            make_trainer(strategy, 2, callbacks=[Signalled(directory, step)], **options).fit(Net())

        ended = statuses(fork_ranks(2, work), seconds=120)
        seconds = time.monotonic() - float((directory / "began").read_text())
        seen.add(", ".join(map(str, ended)))
        steps = {path.read_text() for path in directory.glob("stopped *")}
        return {
            "seconds": seconds,
            "same": len(steps) == 1,
            "saved": any(directory.rglob("*.ckpt")),
        }


def measure_signals(effort: Effort) -> Table:
    kinds = effort.choose(
        (f"stock `ddp`, group timeout {STOCK_TIMEOUT} s", "`ddp_ext`"), quick=("`ddp_ext`",)
    )
    seen: dict[str, set[str]] = {kind: set() for kind in kinds}
    step = effort.choose(SIGNALLED_AT, quick=5)
    repeats = effort.repeats(3)
    results = take_turns({kind: partial(stop, kind, step, seen[kind]) for kind in kinds}, repeats)
    rows = []
    for kind, figures in results.items():
        counts = [f"{sum(figures[figure]):.0f} of {repeats}" for figure in ("same", "saved")]
        rows.append([kind, spread(figures["seconds"]), *counts, "; ".join(sorted(seen[kind]))])
    title = f"SIGTERM to rank 1 of 2 in its {step}th step"
    return Table(
        "signals", [title, "seconds until both exited", "same step", "saved", "exit statuses"], rows
    )


if __name__ == "__main__":
    main(
        __doc__,
        {
            "step": measure_step,
            "slow_ranks": measure_slow_ranks,
            "epoch_end": measure_epoch_end,
            "max_time": measure_max_time,
            "signals": measure_signals,
        },
    )
