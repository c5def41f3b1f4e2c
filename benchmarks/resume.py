"""Measure the time that resuming adds before the first batch, and its memory, beside
stock Lightning and bare loops.

    python benchmarks/resume.py    # about 5 minutes on 2 cores

"Bare" is a loop that does only the reads, copies, broadcasts and the one CRC pass that
are needed. Memory is what a process has for itself (anonymous and shared memory, no
mapped files), sampled every 2 ms.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from measuring import (
    Effort,
    Figures,
    Results,
    Table,
    main,
    on_ranks,
    open_group,
    ratio,
    scratch_directory,
    spread,
    take_turns,
)
from memory import Peak
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training import make_trainer

import lightning_ddp_ext as ddpx

WIDTH = 1024  # a layer's weight has 4 MiB, and as much again in each of Adam's two moments
MIB_A_LAYER = 12


class Layers(L.LightningModule):
    """Layers whose weights and Adam's state for them are what the file holds."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return sum(layer.weight[0, 0] for layer in self.layers) * batch[0].sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(64, 1)), batch_size=1)


class FirstBatch(L.Callback):
    """Notes when the first batch begins, and what memory there has been until then;
    ends training there.
    """

    def __init__(self) -> None:
        self.at = 0.0
        self.peak = Peak()

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> int:
        self.at = time.perf_counter()
        self.peak.__exit__()
        trainer.should_stop = True
        return -1


def worst(figures: list[Figures]) -> Figures:
    return {name: max(each[name] for each in figures) for name in figures[0]}


def resume(
    strategy: Callable[[], Any],
    path: Path | None,
    world_size: int,
    layers: int,
    *,
    is_sent: bool = False,
) -> Figures:
    """Fit until the first batch; without a path there is nothing to resume.

    With ``is_sent``, only rank 0 finds the file, so it sends the content.
    """

    def work(rank: int, directory: Path) -> Figures:
        # The group is open before: what is measured is the restore, and not the
        # rendezvous.
        open_group(rank, world_size, directory)
        ckpt_path = path
        if path is not None and is_sent:
            os.chdir(path.parent if rank == 0 else directory)
            ckpt_path = Path(path.name)
        model = Layers(layers)
        first = FirstBatch()
        trainer = make_trainer(strategy(), world_size, max_epochs=-1, callbacks=[first])
        dist.barrier()
        first.peak.__enter__()
        begin = time.perf_counter()
        trainer.fit(model, ckpt_path=ckpt_path)
        return {"seconds": first.at - begin, "peak": first.peak.mebibytes}

    return worst(on_ranks(work, world_size))


# Without DDP's first synchronisation, whose buffer would hide what restoring takes, and
# which is the same for all.
def stock() -> DDPStrategy:
    return DDPStrategy(process_group_backend="gloo", init_sync=False)


def ours() -> DDPStrategy:
    return ddpx.DDPExtStrategy(init_sync=False)


def resume_bare(mapped: bool, path: Path, world_size: int, layers: int) -> Figures:
    """Measure the least work of a resume: the same reads, copies and checks, and
    nothing else.
    """

    def work(rank: int, directory: Path) -> Figures:
        open_group(rank, world_size, directory)
        model = Layers(layers)
        dist.barrier()
        begin = time.perf_counter()
        checking = threading.Thread(target=check, args=(path,))
        if rank == 0:
            checking.start()
        _kept = read_mapped(model, path, checking) if mapped else send(model, path, rank, checking)
        dist.barrier()
        return {"seconds": time.perf_counter() - begin}

    return worst(on_ranks(work, world_size))


def check(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        zlib.crc32(content)


def moments(content: dict[str, Any]) -> list[Tensor]:
    state = content["optimizer_states"][0]["state"]
    return [state[key][name] for key in state for name in ("exp_avg", "exp_avg_sq")]


def read_mapped(model: Layers, path: Path, checking: threading.Thread) -> list[Tensor]:
    content = torch.load(path, mmap=True, weights_only=True)
    if checking.ident:
        checking.join()
    dist.barrier()
    model.load_state_dict(content["state_dict"])
    return [moment.clone() for moment in moments(content)]


def send(model: Layers, path: Path, rank: int, checking: threading.Thread) -> list[Tensor]:
    weights = [layer.weight.data for layer in model.layers]
    if rank > 0:
        kept = [torch.empty(WIDTH, WIDTH) for _ in range(2 * len(weights))]
        for tensor in (*weights, *kept):
            dist.broadcast(tensor, 0)
        return kept
    content = torch.load(path, mmap=True, weights_only=True)
    model.load_state_dict(content["state_dict"])
    for tensor in (*content["state_dict"].values(), *moments(content)):
        dist.broadcast(tensor, 0)
    kept = [moment.clone() for moment in moments(content)]
    checking.join()
    return kept


def write_file(path: Path, layers: int) -> None:
    """Save a checkpoint of a Trainer after one step; runs in a separate process."""

    def work(rank: int, directory: Path) -> None:
        trainer = make_trainer("auto", 1, max_steps=1)
        trainer.fit(Layers(layers))
        trainer.save_checkpoint(path)

    on_ranks(work, 1)


def name_of(mebibytes: int, world_size: int) -> str:
    return f"{mebibytes} MiB, {world_size} ranks"


@cache
def measure(effort: Effort) -> dict[str, Results]:
    """Measure all runs, by file and ranks; each kind's `added` is its time beyond a fit of
    the same strategy without a resume.
    """
    found = {}
    for mebibytes, world_size in effort.choose(((504, 4), (504, 8), (12, 4)), quick=((12, 2),)):
        layers = mebibytes // MIB_A_LAYER
        with scratch_directory() as directory:
            path = directory / "it.ckpt"
            write_file(path, layers)
            kinds: dict[str, Callable[[], Figures]] = {
                "stock, nothing": partial(resume, stock, None, world_size, layers),
                "ours, nothing": partial(resume, ours, None, world_size, layers),
                "stock": partial(resume, stock, path, world_size, layers),
                "mapped": partial(resume, ours, path, world_size, layers),
                "sent by rank 0": partial(resume, ours, path, world_size, layers, is_sent=True),
                "bare mapped": partial(resume_bare, True, path, world_size, layers),
                "bare sent by rank 0": partial(resume_bare, False, path, world_size, layers),
            }
            results = take_turns(kinds, effort.repeats(5))
        for kind, figures in results.items():
            if not kind.startswith("bare"):
                nothing = results["stock, nothing" if kind.startswith("stock") else "ours, nothing"]
                pairs = zip(figures["seconds"], nothing["seconds"], strict=True)
                figures["added"] = [mine - without for mine, without in pairs]
                # Both moments of each weight are what was asked for.
                pairs = zip(figures["peak"], nothing["peak"], strict=True)
                figures["memory"] = [mine - without - 2 / 3 * mebibytes for mine, without in pairs]
        found[name_of(mebibytes, world_size)] = results
    return found


def measure_seconds(effort: Effort) -> Table:
    rows = []
    for name, results in measure(effort).items():
        row: list[object] = [name, spread(results["stock"]["added"])]
        for kind in ("mapped", "sent by rank 0"):
            added = results[kind]["added"]
            row += [spread(added), ratio(added, results[f"bare {kind}"]["seconds"])]
        rows.append(row)
    columns = ["stock", "mapped", "× bare", "sent by rank 0", "× bare"]
    return Table("resume", ["seconds that resuming adds before the first batch", *columns], rows)


def measure_memory(effort: Effort) -> Table:
    kinds = ("stock", "mapped", "sent by rank 0")
    rows = [
        [name, *(f"{spread(results[kind]['memory']).median:.0f} MiB" for kind in kinds)]
        for name, results in measure(effort).items()
    ]
    return Table(
        "memory", ["memory of the worst rank beyond parameters and optimiser state", *kinds], rows
    )


if __name__ == "__main__":
    main(__doc__, {"resume": measure_seconds, "memory": measure_memory})
