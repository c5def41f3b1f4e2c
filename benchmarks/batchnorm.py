"""What BatchNorm over all ranks costs, by layer and in a network; prints Markdown tables.

    python benchmarks/batchnorm.py                # about 4 minutes on 2 cores
    python benchmarks/batchnorm.py --repeats 5 --steps 30

Layers: a forward and a backward of ours beside torch's plain BatchNorm followed by two all-reduces of as many numbers
as torch's SyncBatchNorm exchanges, by turns in one pair of processes. On a GPU, if there is one, torch's SyncBatchNorm
takes that place; both ranks share the GPU then, over gloo.

Network: steps of a Trainer with stock ``ddp`` and no conversion, and with ours, by turns in the same way.

Medians are followed by the lowest and highest value; ratios are medians of those within each repeat.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from measuring import fork_ranks, print_table, scratch_directory, spread, statuses
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

import lightning_ddp_ext as ddpx

WORLD_SIZE = 2
LARGE = [(16, 64, 56, 56), (16, 128, 28, 28), (16, 256, 14, 14), (16, 512, 7, 7)]
SMALL = [(8, 32, 8, 8), (4, 64, 8, 8), (16, 2048, 1, 1), (16, 64)]
Turn = Callable[[], None]


def in_ranks(work: Callable[[int, Path], Any], seconds: float = 900) -> Any:
    """What ``work(rank, directory)`` returns on rank 0 of two forked processes."""
    with scratch_directory() as name:
        directory = Path(name)

        def run(rank: int) -> None:
            warnings.simplefilter("ignore")
            torch.set_num_threads(1)
            (directory / f"{rank}.json").write_text(json.dumps(work(rank, directory)))

        ended = statuses(fork_ranks(WORLD_SIZE, run), seconds=seconds)
        assert not any(ended), f"exit statuses {ended}"
        return json.loads((directory / "0.json").read_text())


def by_turns(turns: dict[str, Turn], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds that each turn takes, by repeat; what goes first changes with each repeat, and one warms up."""
    found: dict[str, list[float]] = {name: [] for name in turns}
    for repeat in range(repeats + 1):
        for name in list(turns)[:: 1 if repeat % 2 else -1]:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(rounds):
                turns[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat:
                found[name].append((time.perf_counter() - began) / rounds * 1000)
    return found


# --- layers ---------------------------------------------------------------------------------------


def plain_and_two_reductions(layer: nn.Module, input: Tensor, gradient: Tensor) -> Turn:
    forward, backward = (torch.zeros(2 * input.size(1) + extra) for extra in (1, 0))

    def turn() -> None:
        output = layer(input)
        dist.all_reduce(forward)
        output.backward(gradient)
        dist.all_reduce(backward)

    return turn


def forward_and_backward(layer: nn.Module, input: Tensor, gradient: Tensor) -> Turn:
    return lambda: layer(input).backward(gradient)


def turns_of(shape: tuple[int, ...], channels_last: bool, device: str) -> dict[str, Turn]:
    channels = shape[1]
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    tensors = (torch.randn(shape).to(device, memory_format=memory_format) for _ in range(2))
    input, gradient = next(tensors).requires_grad_(), next(tensors)
    plain: nn.Module = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(channels).to(device)
    turns = {"ours": forward_and_backward(ddpx.SyncBatchNorm(channels).to(device), input, gradient)}
    if device == "cuda":
        stock = nn.SyncBatchNorm(channels).to(device)
        return {"reference": forward_and_backward(stock, input, gradient), **turns}
    return {"reference": plain_and_two_reductions(plain, input, gradient), **turns}


def layers(device: str, repeats: int) -> None:
    cases = [(shape, False) for shape in LARGE + SMALL] + [(shape, True) for shape in LARGE]

    def work(rank: int, directory: Path) -> list[dict[str, list[float]]]:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=WORLD_SIZE)
        rounds = [10 if torch.Size(shape).numel() > 1 << 18 else 100 for shape, _ in cases]
        found = [
            by_turns(turns_of(shape, last, device), count, repeats)
            for (shape, last), count in zip(cases, rounds, strict=True)
        ]
        dist.destroy_process_group()
        return found

    rows = []
    for (shape, last), found in zip(cases, in_ranks(work), strict=True):
        pairs = zip(found["ours"], found["reference"], strict=True)
        name = " × ".join(map(str, shape)) + (", channels last" if last else "")
        ratio = spread([mine / theirs for mine, theirs in pairs])
        rows.append([name, spread(found["reference"]), spread(found["ours"]), ratio])
    reference = "plain BatchNorm and two all-reduces" if device == "cpu" else "torch's SyncBatchNorm"
    print_table(f"Forward and backward on {device}, 2 ranks, ms", ["input", reference, "ours", "ratio"], rows)


# --- collectives ----------------------------------------------------------------------------------


def collectives(device: str) -> None:
    def work(rank: int, directory: Path) -> list[Any]:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=WORLD_SIZE)
        layer = ddpx.SyncBatchNorm(64).to(device)
        input = torch.randn(8, 64, 4, 4, device=device, requires_grad=True)
        output = layer(input)
        found = [launched(lambda: layer(input)), launched(lambda: output.sum().backward())]
        found.append(str(host_synchronisations(layer, input)) if device == "cuda" else "no device")
        dist.destroy_process_group()
        return found

    print_table(f"Collectives of one layer, {device}", ["forward", "backward", "waits for it"], [in_ranks(work)])


def launched(run: Callable[[], object]) -> str:
    """The collectives that it launches, counted."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    names = Counter(event.name.removeprefix("gloo:") for event in recorded.events() if "gloo:" in event.name)
    return ", ".join(f"{count} {name}" for name, count in names.items())


def host_synchronisations(layer: nn.Module, input: Tensor) -> int:
    """How often the host waits for the device in a forward and a backward, by torch's own count; without gloo's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        layer(input).sum().backward()
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


# --- a network ------------------------------------------------------------------------------------


def block(before: int, after: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()
    )


class Network(L.LightningModule):
    """Sixteen convolutions with BatchNorm, on images of 32 × 32."""

    def __init__(self, warming_up: int) -> None:
        super().__init__()
        widths = [3, *[16] * 6, *[32] * 5, *[64] * 5]
        steps = itertools.pairwise(widths)
        self.layers = nn.Sequential(*(block(a, b, 1 + (a != b and a > 3)) for a, b in steps))
        self.head = nn.Linear(64, 10)
        self.warming_up, self.began = warming_up, 0.0

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == self.warming_up:
            self.began = time.perf_counter()
        return self.head(self.layers(batch).mean((2, 3))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def one_run(kind: str, directory: Path, steps: int, batch_size: int) -> float:
    """Milliseconds a step."""
    strategies: dict[str, tuple[Any, list[L.Callback]]] = {
        "stock, no conversion": ("ddp", []),
        "ours, no conversion": (ddpx.DDPExtStrategy(init_method=f"file://{directory}/store"), []),
        "ours, converted": (
            ddpx.DDPExtStrategy(init_method=f"file://{directory}/store"),
            [ddpx.SyncBatchNormConversion()],
        ),
    }
    strategy, callbacks = strategies[kind]
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=WORLD_SIZE, max_epochs=1, callbacks=callbacks, **quiet
    )
    warming_up = 5
    model = Network(warming_up)
    length = (steps + warming_up) * batch_size * WORLD_SIZE
    trainer.fit(model, DataLoader(torch.randn(batch_size, 3, 32, 32).repeat(length // batch_size, 1, 1, 1), batch_size))
    return (time.perf_counter() - model.began) / steps * 1000


KINDS = ["stock, no conversion", "ours, no conversion", "ours, converted"]


def network(steps: int, repeats: int) -> None:
    rows = []
    for batch_size in (4, 32):

        def work(rank: int, directory: Path, batch_size: int = batch_size) -> dict[str, list[float]]:
            found: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for repeat in range(repeats + 1):
                for kind in KINDS[:: 1 if repeat % 2 else -1]:
                    value = one_run(kind, directory, steps, batch_size)
                    if repeat:
                        found[kind].append(value)
            return found

        found = in_ranks(work)
        stock = found[KINDS[0]]
        for kind in KINDS:
            ratios = [mine / theirs for mine, theirs in zip(found[kind], stock, strict=True)]
            rows.append([batch_size, kind, spread(found[kind], 1), spread(ratios)])
    columns = ["batch size a rank", "16 BatchNorm layers", "ms a step", "× stock"]
    print_table("A training step of a network, 2 ranks", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=40)
    chosen = parser.parse_args()
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        layers(device, chosen.repeats)
        collectives(device)
    network(chosen.steps, chosen.repeats)


if __name__ == "__main__":
    main()
