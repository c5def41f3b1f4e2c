"""Saving and resuming, beside stock Lightning and bare loops in the same run; prints Markdown tables.

    python benchmarks/checkpoint.py                       # everything, about 15 minutes on 2 cores; takes 4 GiB of disk
    python benchmarks/checkpoint.py resume --repeats 3    # one table

Every measurement runs in processes of its own, forked from one that has imported everything, and all kinds take turns
within each repeat. Medians are followed by the lowest and highest value; read ratios rather than seconds. Memory is
what a process has for itself (anonymous and shared memory, no mapped files), sampled every 2 ms.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from measuring import fork_ranks, print_table, scratch_directory, spread, statuses
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp_ext as ddpx
from lightning_ddp_ext.checkpoint.zip_crc import find_damage, open_archive

MIB = 1 << 20
WIDTH = 1024  # a layer's weight has 4 MiB

Work = Callable[[int, Path], dict[str, float] | None]
Results = dict[str, list[dict[str, float]]]


# Processes and memory.


def own_memory() -> int:
    """Bytes that this process has for itself."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))) * 1024


class Peak:
    """The most memory that this process has had while the block ran, over what it had before."""

    def __enter__(self) -> Peak:
        self.before = self.most = own_memory()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, own_memory())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def mebibytes(self) -> float:
        return (self.most - self.before) / MIB


def run(work: Work, world_size: int, directory: Path) -> dict[str, float]:
    """Run ``work(rank, directory)`` on forked ranks; the largest of each figure that a rank reports."""

    def one(rank: int) -> None:
        torch.set_num_threads(1 if world_size > 1 else 2)
        figures = work(rank, directory) or {}
        (directory / f"{rank}.json").write_text(json.dumps(figures))

    found = statuses(fork_ranks(world_size, one, ends_like_a_script=False), seconds=300)
    assert not any(found), f"exit statuses {found}"
    reports = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(world_size)]
    return {name: max(report[name] for report in reports if name in report) for name in reports[0]}


def take_turns(kinds: dict[str, Work], world_size: int, repeats: int) -> Results:
    """Each kind once in each repeat."""
    results: Results = defaultdict(list)
    for _ in range(repeats):
        for name, work in kinds.items():
            with scratch_directory() as directory:
                results[name].append(run(work, world_size, Path(directory)))
    return results


def of(results: Results, kind: str, figure: str) -> list[float]:
    return [result[figure] for result in results[kind]]


def ratio(results: Results, kind: str, to: str, figure: str) -> str:
    """The median of the ratios within each repeat."""
    pairs = zip(of(results, kind, figure), of(results, to, figure), strict=True)
    return spread([mine / theirs for mine, theirs in pairs])


@contextmanager
def timed(figures: dict[str, float], name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    figures[name] = time.perf_counter() - begin


# Resuming.


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
    """Notes when the first batch begins, and what memory there has been until then; ends training there."""

    def __init__(self) -> None:
        self.at = 0.0
        self.peak = Peak()

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> int:
        self.at = time.perf_counter()
        self.peak.__exit__()
        trainer.should_stop = True
        return -1


def trainer_of(strategy: Any, world_size: int, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    chosen: dict[str, Any] = {"accelerator": "cpu", "devices": world_size, "max_epochs": -1, **quiet, **options}
    return L.Trainer(strategy=strategy, callbacks=list(callbacks), **chosen)


def join(rank: int, world_size: int, directory: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", init_method=f"file://{directory}/group", rank=rank, world_size=world_size)


def resuming(make_strategy: Callable[[], Any], io: Any, world_size: int, path: Path | None, layers: int) -> Work:
    def work(rank: int, directory: Path) -> dict[str, float]:
        join(rank, world_size, directory)
        model, first = Layers(layers), FirstBatch()
        trainer = trainer_of(make_strategy(), world_size, first, plugins=[] if io is None else [io()])
        dist.barrier()
        first.peak.__enter__()
        begin = time.perf_counter()
        trainer.fit(model, ckpt_path=path)
        return {"seconds": first.at - begin, "peak": first.peak.mebibytes}

    return work


def bare(by_map: bool, world_size: int, path: Path, layers: int) -> Work:
    """The least that a resume can do: the same reads, copies and checks, and nothing else."""

    def work(rank: int, directory: Path) -> dict[str, float]:
        join(rank, world_size, directory)
        model = Layers(layers)
        figures: dict[str, float] = {}
        dist.barrier()
        with timed(figures, "seconds"), Peak() as peak:
            if by_map or rank == 0:
                content = torch.load(path, mmap=True, weights_only=True)
                state = content["optimizer_states"][0]["state"]
            checking = None
            if rank == 0:
                checking = threading.Thread(target=check, args=(path,))
                checking.start()
                if by_map:
                    checking.join()
            weights = [layer.weight.data for layer in model.layers]
            if by_map:
                dist.barrier()
                model.load_state_dict(content["state_dict"])
                _kept = [state[key][name].clone() for key in state for name in ("exp_avg", "exp_avg_sq")]
            elif rank == 0:
                model.load_state_dict(content["state_dict"])
                kept = [state[key][name] for key in state for name in ("exp_avg", "exp_avg_sq")]
                for tensor in (*content["state_dict"].values(), *kept):
                    dist.broadcast(tensor, 0)
                kept = [tensor.clone() for tensor in kept]
                if checking is not None:
                    checking.join()
            else:
                kept = [torch.empty(WIDTH, WIDTH) for _ in range(2 * layers)]
                for tensor in (*weights, *kept):
                    dist.broadcast(tensor, 0)
            dist.barrier()
        return {**figures, "peak": peak.mebibytes}

    return work


def check(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        zlib.crc32(content)


def ours(restore: str) -> Callable[[], Any]:
    return lambda: ddpx.RankZeroCheckpointIO(restore=restore)  # type: ignore[arg-type]


def stock_strategy() -> Any:
    # Without DDP's first synchronisation, whose buffer would hide what restoring takes, and which is the same for all.
    return DDPStrategy(process_group_backend="gloo", init_sync=False)


def write_file(path: Path, layers: int) -> None:
    """A checkpoint of a Trainer that has made one step; in a process of its own."""

    def work(rank: int, directory: Path) -> None:
        trainer = trainer_of("auto", 1, max_steps=1)
        trainer.fit(Layers(layers))
        trainer.save_checkpoint(path)

    with scratch_directory() as directory:
        run(work, 1, Path(directory))


def measure_resume(repeats: int) -> None:
    """Time that resuming adds before the first batch, and memory beyond what is resumed."""
    rows, memory_rows = [], []
    cases = [(512, world_size) for world_size in (2, 4, 8)] + [(12, 4)]
    for size, world_size in cases:
        layers = size // 12  # each has its weight and two moments
        with scratch_directory() as place:
            path = Path(place) / "it.ckpt"
            write_file(path, layers)
            kinds: dict[str, Work] = {
                "nothing": resuming(stock_strategy, None, world_size, None, layers),
                "stock": resuming(stock_strategy, None, world_size, path, layers),
                "map": resuming(stock_like_ours, ours("map"), world_size, path, layers),
                "bare map": bare(True, world_size, path, layers),
                "broadcast": resuming(stock_like_ours, ours("broadcast"), world_size, path, layers),
                "bare broadcast": bare(False, world_size, path, layers),
            }
            results = take_turns(kinds, world_size, repeats)
        for name in ("stock", "map", "broadcast"):
            for result, nothing in zip(results[name], results["nothing"], strict=True):
                result["added"] = result["seconds"] - nothing["seconds"]
                result["extra"] = result["peak"] - nothing["peak"] - 2 * 4 * layers
        for name in ("bare map", "bare broadcast"):
            for result in results[name]:
                result["added"] = result["seconds"]
        below = {
            name: sum(a < b for a, b in zip(of(results, name, "added"), of(results, "stock", "added"), strict=True))
            for name in ("map", "broadcast")
        }
        rows.append((
            f"{3 * 4 * layers} MiB, {world_size} ranks",
            spread(of(results, "stock", "added")),
            spread(of(results, "map", "added")),
            ratio(results, "map", "bare map", "added"),
            f"{below['map']} of {repeats}",
            spread(of(results, "broadcast", "added")),
            ratio(results, "broadcast", "bare broadcast", "added"),
            f"{below['broadcast']} of {repeats}",
        ))  # fmt: skip
        memory_rows.append((
            f"{3 * 4 * layers} MiB, {world_size} ranks",
            *(spread(of(results, name, "extra"), 0) for name in ("stock", "map", "broadcast")),
        ))  # fmt: skip
    print_table(
        f"Seconds that resuming adds before the first batch ({repeats} repeats)",
        ("file", "stock", "map", "× bare map", "below stock", "broadcast", "× bare broadcast", "below stock"),
        rows,
    )
    print_table(
        "MiB of memory that the worst rank takes meanwhile, beyond parameters and optimiser state",
        ("file", "stock", "map", "broadcast"),
        memory_rows,
    )


def stock_like_ours() -> Any:
    # The group is open already, as it is for stock: what is measured is the restore, not the rendezvous.
    return ddpx.DDPExtStrategy(init_sync=False)


# Saving.


def content_of(mebibytes: int) -> dict[str, Any]:
    """So many MiB in tensors of 4 MiB, or of a sixteenth of it all."""
    each = min(4, max(mebibytes / 16, 0.25))
    count = round(mebibytes / each)
    return {"state_dict": {f"layer.{number}": torch.rand(int(each * MIB) // 4) for number in range(count)}}


def saving(save: Callable[[dict[str, Any], Path], None], mebibytes: int, place: Path) -> Work:
    def work(rank: int, directory: Path) -> dict[str, float]:
        content = content_of(mebibytes)
        path = place / f"{directory.name}.ckpt"
        save(content_of(1), path)  # imports and first calls
        figures: dict[str, float] = {}
        os.sync()
        with timed(figures, "seconds"), Peak() as peak:
            save(content, path)
        path.unlink()
        os.sync()
        return {**figures, "peak": peak.mebibytes}

    return work


def save_raw(content: dict[str, Any], path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in content["state_dict"].values():
            view = memoryview(tensor.numpy()).cast("B")
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def save_stock(content: dict[str, Any], path: Path) -> None:
    TorchCheckpointIO().save_checkpoint(content, path)


def save_stock_to_disk(content: dict[str, Any], path: Path) -> None:
    save_stock(content, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def save_ours(content: dict[str, Any], path: Path) -> None:
    ddpx.RankZeroCheckpointIO().save_checkpoint(content, path)


def measure_save(repeats: int) -> None:
    """A foreground save, on the disk when it returns; stock's is not."""
    rows = []
    with scratch_directory() as place:
        for size in (10, 100, 1024):
            saves = {"raw": save_raw, "stock": save_stock, "stock + fsync": save_stock_to_disk, "ours": save_ours}
            kinds = {name: saving(save, size, Path(place)) for name, save in saves.items()}
            results = take_turns(kinds, 1, repeats if size > 100 else 2 * repeats + 1)
            rows.append((
                f"{size} MiB",
                *(spread(of(results, name, "seconds"), 3) for name in saves),
                ratio(results, "ours", "raw", "seconds"),
                ratio(results, "ours", "stock", "seconds"),
                *(f"{statistics.median(of(results, name, 'peak')):.0f}" for name in ("stock", "ours")),
            ))  # fmt: skip
    print_table(
        "Seconds of a foreground save",
        (
            "content", "raw write, fsync", "stock (no fsync)", "stock, fsync", "ours (fsync)", "× raw", "× stock",
            "MiB, stock", "MiB, ours",
        ),
        rows,
    )  # fmt: skip


def background(make_io: Callable[[], Any], mebibytes: int, place: Path, saves: int) -> Work:
    def work(rank: int, directory: Path) -> dict[str, float]:
        content, io, seconds, peaks = content_of(mebibytes), make_io(), [], []
        twin = {name: torch.empty_like(tensor).fill_(0) for name, tensor in content["state_dict"].items()}
        copies = []
        for number in range(saves):
            begin = time.perf_counter()
            for name, tensor in content["state_dict"].items():
                twin[name].copy_(tensor)
            copies.append(time.perf_counter() - begin)
            with Peak() as peak:
                begin = time.perf_counter()
                io.save_checkpoint(content, place / f"{directory.name}.ckpt")
                seconds.append(time.perf_counter() - begin)
                if number == 0:
                    before = peak.before
                wait(io)
            peaks.append((peak.most - before) / MIB)
        io.teardown()
        (place / f"{directory.name}.ckpt").unlink()
        return {
            "first": seconds[0],
            "later": statistics.median(seconds[1:]),
            "copy": statistics.median(copies[1:]),
            "peak": max(peaks) / mebibytes,
            "last peak": peaks[-1] / mebibytes,
        }

    return work


def wait(io: Any) -> None:
    """Until what was given to the background is written."""
    if isinstance(io, AsyncCheckpointIO):
        io.teardown()
    else:
        io.wait()


def measure_background(repeats: int) -> None:
    """How long training stands still for a save in the background, and what memory that takes."""
    rows = []
    with scratch_directory() as place:
        for size, saves in ((10, 20), (1024, 20 if repeats > 1 else 4)):
            kinds = {
                "stock `AsyncCheckpointIO`": background(stock_in_background, size, Path(place), saves),
                "ours": background(lambda: ddpx.RankZeroCheckpointIO(background=True), size, Path(place), saves),
            }
            results = take_turns(kinds, 1, min(repeats, 3))
            for name in kinds:
                own = [a / b for a, b in zip(of(results, name, "later"), of(results, name, "copy"), strict=True)]
                rows.append((
                    f"{size} MiB, {name}",
                    spread(of(results, name, "first"), 3),
                    spread(of(results, name, "later"), 3),
                    spread(own),
                    spread(of(results, name, "peak")),
                    spread(of(results, name, "last peak")),
                ))  # fmt: skip
    print_table(
        "Seconds that training stands still for a save in the background",
        ("content", "first", "later", "later × a memory copy", "memory × payload", f"at save {saves}"),
        rows,
    )


def stock_in_background() -> Any:
    return AsyncCheckpointIO(TorchCheckpointIO())


# Verifying.


def measure_verify(repeats: int) -> None:
    """How fast checksums are checked, from a file that is in memory already, as after a save."""
    with scratch_directory() as place:
        path = Path(place) / "it.ckpt"
        torch.save(content_of(1024), path)
        archive = open_archive(path)
        speeds = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            assert not find_damage(archive, archive.tensor_data)
            speeds.append(archive.size / 1e9 / (time.perf_counter() - begin))
    print_table("GB/s of verification, 1 GiB", ("GB/s",), [(spread(speeds[1:], 1),)])


MEASUREMENTS: dict[str, Callable[[int], None]] = {
    "resume": measure_resume,
    "save": measure_save,
    "background": measure_background,
    "verify": measure_verify,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure saving and resuming beside stock Lightning.")
    parser.add_argument("which", nargs="*", choices=[*MEASUREMENTS, []], help="tables to make (default: all)")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, Lightning {L.__version__}, {os.cpu_count()} cores")
    for name in args.which or MEASUREMENTS:
        MEASUREMENTS[name](args.repeats)


if __name__ == "__main__":
    main()
