"""Measure saves in the foreground and in the background, and verification, beside stock
Lightning.

python benchmarks/save.py    # about 4 minutes on 2 cores; takes 4 GiB of disk
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from measuring import (
    Effort,
    Figures,
    Table,
    alone,
    main,
    ratio,
    scratch_directory,
    spread,
    take_turns,
)
from memory import MIB, Peak

import lightning_ddp_ext as ddpx
from lightning_ddp_ext.checkpoint.load import Archive

Content = dict[str, Any]


def content_of(mebibytes: float) -> Content:
    """Return that many MiB in tensors of 4 MiB, or of a sixteenth of the total."""
    each = min(4, max(mebibytes / 16, 0.25))
    count = round(mebibytes / each)
    return {
        "state_dict": {
            f"layer.{number}": torch.rand(int(each * MIB) // 4) for number in range(count)
        }
    }


def size_of(mebibytes: int) -> str:
    return f"{mebibytes} MiB" if mebibytes < 1024 else f"{mebibytes // 1024} GiB"


# In the foreground.


def save_raw(content: Content, path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in content["state_dict"].values():
            view = memoryview(tensor.numpy()).cast("B")
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def save_stock(content: Content, path: Path) -> None:
    TorchCheckpointIO().save_checkpoint(content, path)


def save_ours(content: Content, path: Path) -> None:
    ddpx.RankZeroCheckpointIO().save_checkpoint(content, path)


def timed_save(save: Callable[[Content, Path], None], mebibytes: int, path: Path) -> Figures:
    content = content_of(mebibytes)
    save(content_of(1), path)  # imports and first calls
    os.sync()
    with Peak() as peak:
        begin = time.perf_counter()
        save(content, path)
        seconds = time.perf_counter() - begin
    path.unlink()
    os.sync()
    return {"seconds": seconds, "peak": peak.mebibytes}


def measure_save(effort: Effort) -> Table:
    """Measure saves; ours are on the disk when they return, stock's are not."""
    saves = {"raw write, fsync": save_raw, "stock, no fsync": save_stock, "ours, fsync": save_ours}
    rows = []
    with scratch_directory() as directory:
        for size in effort.choose((10, 100, 1024), quick=(1,)):
            kinds = {
                name: alone(partial(timed_save, save, size, directory / "it.ckpt"))
                for name, save in saves.items()
            }
            results = take_turns(kinds, effort.repeats(5))
            raw, stock, ours = (results[name]["seconds"] for name in saves)
            memory = [f"{statistics.median(results[name]['peak']):.0f}" for name in list(saves)[1:]]
            ratios = ratio(ours, raw), ratio(ours, stock)
            rows.append(
                [
                    size_of(size),
                    *map(spread, (raw, stock, ours)),
                    *ratios,
                    f"{', '.join(memory)} MiB",
                ]
            )
    return Table(
        "save",
        ["seconds of a save in the foreground", *saves, "× raw", "× stock", "memory: stock, ours"],
        rows,
    )


# In the background.


def make_stock_io() -> Any:
    return AsyncCheckpointIO(TorchCheckpointIO())


def make_our_io() -> Any:
    return AsyncCheckpointIO(ddpx.RankZeroCheckpointIO())


def stalls(make_io: Callable[[], Any], mebibytes: int, saves: int, path: Path) -> Figures:
    """Measure each call that begins a save, beside a copy in memory, and its memory."""
    content = content_of(mebibytes)
    io = make_io()
    twin = {name: torch.zeros_like(tensor) for name, tensor in content["state_dict"].items()}
    seconds = []
    copies = []
    peaks = []
    for _ in range(saves):
        begin = time.perf_counter()
        for name, tensor in content["state_dict"].items():
            twin[name].copy_(tensor)
        copies.append(time.perf_counter() - begin)
        with Peak() as peak:
            begin = time.perf_counter()
            io.save_checkpoint(content, path)
            seconds.append(time.perf_counter() - begin)
            io.teardown()  # waits
        peaks.append((peak.before, peak.highest))
    io.teardown()
    path.unlink()
    first = seconds[0]
    later = statistics.median(seconds[1:])
    taken = (max(peak for _, peak in peaks) - peaks[0][0]) / MIB
    return {
        "first": first,
        "later": later,
        "own": later / statistics.median(copies[1:]),
        "memory": taken / mebibytes,
    }


def measure_background(effort: Effort) -> Table:
    """Measure the pause of training for a save, and its memory."""
    size, saves = effort.choose((1024, 6), quick=(1, 2))
    with scratch_directory() as directory:
        ios = {
            "stock `AsyncCheckpointIO`": make_stock_io,
            "`AsyncCheckpointIO(RankZeroCheckpointIO())`": make_our_io,
        }
        kinds = {
            name: alone(partial(stalls, io, size, saves, directory / "it.ckpt"))
            for name, io in ios.items()
        }
        results = take_turns(kinds, effort.repeats(5))
    rows = [[name, *map(spread, figures.values())] for name, figures in results.items()]
    title = f"seconds for which training waits to save {size_of(size)} in the background"
    return Table(
        "background", [title, "first", "later", "× a memory copy", "memory × payload"], rows
    )


# Verifying.


def gigabytes_a_second(mebibytes: int, path: Path) -> Figures:
    """Return the speed for a file in the page cache, as after a save."""
    torch.save(content_of(mebibytes), path)
    with path.open("rb") as file:
        archive = Archive(file, str(path))
        for _ in range(2):  # the first one reads from the disk
            begin = time.perf_counter()
            archive.check()
        seconds = time.perf_counter() - begin
    return {"speed": path.stat().st_size / 1e9 / seconds}


def measure_verify(effort: Effort) -> Table:
    size = effort.choose(1024, quick=1)
    with scratch_directory() as directory:
        verify = alone(partial(gigabytes_a_second, size, directory / "it.ckpt"))
        speeds = take_turns({"ours": verify}, effort.repeats(5))["ours"]["speed"]
    return Table(
        "verify",
        ["checksums of a checkpoint, verified by one rank", "GB/s"],
        [[size_of(size), spread(speeds)]],
    )


if __name__ == "__main__":
    main(
        __doc__, {"save": measure_save, "background": measure_background, "verify": measure_verify}
    )
