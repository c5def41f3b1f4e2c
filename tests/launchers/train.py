"""The training script that every launcher of these tests starts: a few steps of a tiny model, and what came of them.

Each rank writes ``rank-<rank>.json`` into the directory that is its first argument, at the end of training: who it was,
its weights, and what it saw of the place where the ranks met. Each process that returns from the Trainer prints the
weights that it then has, and the results of a test. All of that can be done several times, by one init method after
another: in between the ranks leave each other, so that each time they meet as they would the first time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp_ext as ddpx
from lightning_ddp_ext.integration.endpoints import PRIVATE_FILE
from lightning_ddp_ext.rendezvous.process_context import leave

SAMPLES, BATCH_SIZE = 32, 2


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch)

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(11)
        inputs = torch.randn(SAMPLES, 4, generator=generator)
        return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=BATCH_SIZE)

    test_dataloader = train_dataloader

    def _loss(self, batch: Sequence[Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)


class Record(pl.Callback):
    """Writes down each rank's end of training."""

    def __init__(self, directory: Path, init_method: str | None) -> None:
        self.directory = directory
        self.init_method = init_method
        self.seen: object = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seen = look_at(self.init_method)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        record = {
            "rank": trainer.global_rank,
            "world_size": trainer.world_size,
            "local_rank": trainer.local_rank,
            "node_rank": trainer.node_rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "steps": trainer.global_step,
            "weights": fingerprint(pl_module),
            "meeting_place": self.seen,
        }
        (self.directory / f"rank-{trainer.global_rank}.json").write_text(json.dumps(record))


class Die(pl.Callback):
    """The process of a rank is killed in its second step."""

    def __init__(self, rank: str) -> None:
        self.rank = int(rank)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_rank == self.rank and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def fingerprint(module: nn.Module) -> str:
    """The same text for the same weights, to the last bit."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def look_at(init_method: str | None) -> object:
    """What anybody can see of a meeting place: whether somebody listens there, or which files are there."""
    url = urlsplit(init_method or "env://")
    if url.scheme == "file":
        directory = Path(url.path) if url.path.endswith("/") else Path(url.path).parent
        return sorted(path.name for path in directory.iterdir())
    if url.scheme == "tcp":
        return _listens(str(url.hostname), url.port or 0)
    if PRIVATE_FILE in os.environ:
        return Path(os.environ[PRIVATE_FILE]).exists()
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return _listens(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    return None


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except OSError:
        return False
    return True


def main(argv: Sequence[str]) -> None:
    options = parse(argv)
    call(options, options.calls, options.directory)
    if options.again:
        options.again.mkdir(exist_ok=True)
        call(options, ["fit"], options.again)
    for directory, init_method in options.then:
        leave()
        options.init_method = init_method
        call(options, ["fit"], Path(directory))


def call(options: argparse.Namespace, calls: Sequence[str], directory: Path) -> None:
    """Make a model and a Trainer, and call the Trainer's methods one after another."""
    pl.seed_everything(5)
    model = Regression()
    chosen = options.init_method or os.environ.get("DDPX_INIT_METHOD")
    attempt = [os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), options.init_method]
    deaths = [Die(rank) for rank, *when in options.die if when == attempt]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy=strategy_of(options),
        max_epochs=2,
        callbacks=[Record(directory, chosen), *deaths],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    for name in calls:
        results = getattr(trainer, name)(model)
        if results is not None:
            sys.stdout.write(f"tested {json.dumps(results)}\n")
    sys.stdout.write(f"learned {fingerprint(model)}\n")
    sys.stdout.flush()


def strategy_of(options: argparse.Namespace) -> str | ddpx.DDPExtStrategy:
    """The strategy by its name, as in an untouched script, unless something about it is to be chosen."""
    names = ("init_method", "start_method", "rank", "world_size", "run_id", "init_timeout")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return ddpx.DDPExtStrategy(**given) if given else str(options.strategy)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where each rank writes its record")
    parser.add_argument("--strategy", default="ddp_ext", help="its name, used if none of the next six is given")
    parser.add_argument("--init-method")
    parser.add_argument("--start-method")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--run-id")
    parser.add_argument("--init-timeout", type=float)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--calls", nargs="+", default=["fit"], help="methods of one Trainer")
    parser.add_argument("--again", type=Path, help="fit once more with a new Trainer, whose ranks write here")
    parser.add_argument(
        "--then", nargs=2, action="append", default=[], help="records of one more fit, and by which init method it is"
    )
    parser.add_argument(
        "--die", nargs=3, action="append", default=[], help="rank, attempt of torchrun, and init method of a killed run"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
