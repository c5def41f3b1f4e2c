"""Measure the cost of BatchNorm over all ranks, by layer and in a network.

    python benchmarks/batchnorm.py            # about 3 minutes on 2 cores
    python benchmarks/batchnorm.py layers     # one table

Layers: a forward and a backward of ours beside torch's plain BatchNorm followed by two
all-reduces of as many numbers as torch's SyncBatchNorm exchanges, by turns in one pair
of processes. On a GPU, if there is one, torch's SyncBatchNorm takes that place; both
ranks share the GPU then, over gloo.

Network: steps of a Trainer with stock ``ddp`` and no conversion, and with ours, each
fit in separate processes.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from measuring import (
    Effort,
    Figures,
    Table,
    main,
    on_rank_zero,
    open_group,
    ratio,
    spread,
    take_turns,
)
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from training import WARMING_UP, make_trainer

import lightning_ddp_ext as ddpx

LARGE = [(16, 64, 56, 56), (16, 128, 28, 28), (16, 256, 14, 14), (16, 512, 7, 7)]
SMALL = [(8, 32, 8, 8), (4, 64, 8, 8), (16, 2048, 1, 1), (16, 64)]
Turn = Callable[[], None]


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


# Layers.


def plain_and_two_reductions(layer: nn.Module, input: Tensor, gradient: Tensor) -> None:
    output = layer(input)
    dist.all_reduce(torch.zeros(2 * input.size(1) + 1))
    output.backward(gradient)
    dist.all_reduce(torch.zeros(2 * input.size(1)))


def forward_and_backward(layer: nn.Module, input: Tensor, gradient: Tensor) -> None:
    layer(input).backward(gradient)


def turns_of(shape: tuple[int, ...], channels_last: bool) -> dict[str, Turn]:
    channels = shape[1]
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    input, gradient = (
        torch.randn(shape).to(device(), memory_format=memory_format) for _ in range(2)
    )
    input.requires_grad_()
    ours = partial(forward_and_backward, ddpx.SyncBatchNorm(channels).to(device()), input, gradient)
    if device() == "cuda":
        stock = nn.SyncBatchNorm(channels).to(device())
        return {"reference": partial(forward_and_backward, stock, input, gradient), "ours": ours}
    plain = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(channels)
    return {"reference": partial(plain_and_two_reductions, plain, input, gradient), "ours": ours}


def timed(turn: Turn, rounds: int) -> Figures:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(rounds):
        turn()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return {"ms": (time.perf_counter() - began) / rounds * 1000}


def measure_layers(effort: Effort) -> Table:
    cases = effort.choose(
        [*((s, False) for s in LARGE + SMALL), *((s, True) for s in LARGE)],
        quick=[((16, 64), False)],
    )

    def work(rank: int, directory: Path) -> list[Any]:
        open_group(rank, 2, directory)
        found = []
        for shape, channels_last in cases:
            rounds = effort.choose(10 if torch.Size(shape).numel() > 1 << 18 else 100, quick=2)
            kinds = {
                name: partial(timed, turn, rounds)
                for name, turn in turns_of(shape, channels_last).items()
            }
            take_turns(kinds, 1)  # warms up
            found.append(take_turns(kinds, effort.repeats(5)))
        return found

    rows = []
    for (shape, channels_last), found in zip(cases, on_rank_zero(work), strict=True):
        name = " × ".join(map(str, shape)) + (", channels last" if channels_last else "")
        reference = found["reference"]["ms"]
        ours = found["ours"]["ms"]
        rows.append([name, spread(reference), spread(ours), ratio(ours, reference)])
    reference_name = "plain and two all-reduces" if device() == "cpu" else "torch's SyncBatchNorm"
    return Table("layers", ["milliseconds", reference_name, "ours", "ours / plain"], rows)


def measure_collectives(effort: Effort) -> Table:
    """Count one layer's launches with torch's profiler."""

    def launched(run: Callable[[], object]) -> str:
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            run()
        names = Counter(
            event.name.removeprefix("gloo:") for event in recorded.events() if "gloo:" in event.name
        )
        return ", ".join(f"{count} {name}" for name, count in names.items())

    def work(rank: int, directory: Path) -> list[str]:
        open_group(rank, 2, directory)
        layer = ddpx.SyncBatchNorm(64).to(device())
        input = torch.randn(8, 64, 4, 4, device=device(), requires_grad=True)
        outputs: list[Tensor] = []
        return [
            launched(lambda: outputs.append(layer(input))),
            launched(lambda: outputs[0].sum().backward()),
        ]

    return Table(
        "collectives", ["collectives of a layer, forward", "backward"], [on_rank_zero(work)]
    )


# A network.


def block(before: int, after: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU())


class Network(L.LightningModule):
    """Sixteen convolutions with BatchNorm, on images of 32 × 32."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, *[16] * 6, *[32] * 5, *[64] * 5]
        self.layers = nn.Sequential(
            *(block(a, b, 1 + (a != b and a > 3)) for a, b in itertools.pairwise(widths))
        )
        self.head = nn.Linear(64, 10)
        self.began = self.began_cpu = 0.0

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == WARMING_UP:
            self.began = time.perf_counter()
            self.began_cpu = time.process_time()
        return self.head(self.layers(batch).mean((2, 3))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def network_step(strategy: str, converted: bool, batch_size: int, steps: int) -> Figures:
    def work(rank: int, directory: Path) -> Figures:
        callbacks = [ddpx.SyncBatchNormConversion()] if converted else []
        trainer = make_trainer(strategy, 2, max_epochs=1, callbacks=callbacks)
        model = Network()
        images: Any = torch.randn(batch_size, 3, 32, 32).repeat(2 * (steps + WARMING_UP), 1, 1, 1)
        trainer.fit(model, DataLoader(images, batch_size))
        clock = time.perf_counter() - model.began
        processor = time.process_time() - model.began_cpu
        return {"ms": clock / steps * 1000, "processor": processor / steps * 1000}

    return on_rank_zero(work)


def measure_network(effort: Effort) -> Table:
    kinds = {
        "stock `ddp`, statistics of each rank alone": ("ddp", False),
        "`ddp_ext`, the same": ("ddp_ext", False),
        "`ddp_ext`, converted": ("ddp_ext", True),
    }
    batch_sizes, steps = effort.choose(((4, 32), 40), quick=((4,), 2))
    rows: dict[str, list[object]] = {
        name: [name] for name in effort.choose(list(kinds), quick=list(kinds)[2:])
    }
    for batch_size in batch_sizes:
        turns: dict[str, Callable[[], Figures]] = {
            name: partial(network_step, *kinds[name], batch_size, steps) for name in rows
        }
        results = take_turns(turns, effort.repeats(5))
        stock = next(iter(results.values()))["ms"]
        for name, row in rows.items():
            row += [
                spread(results[name]["ms"]),
                ratio(results[name]["ms"], stock),
                spread(results[name]["processor"]),
            ]
    columns = [
        column
        for batch_size in batch_sizes
        for column in (f"batch {batch_size}: ms", "× stock", "ms of processor time, rank 0")
    ]
    return Table(
        "network", ["a step of a network with 16 BatchNorm layers", *columns], list(rows.values())
    )


if __name__ == "__main__":
    main(
        __doc__,
        {"layers": measure_layers, "collectives": measure_collectives, "network": measure_network},
    )
