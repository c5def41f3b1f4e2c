"""Train a small model with our strategy and with stock ``ddp``, break the training at some
point, and compare the results.
"""

import gc
import hashlib
import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.harness.ranks import Environment, Outcome, RankProcesses, by_hand_env, run_ranks

Batch = list[Tensor]
Kind = Literal["ours", "stock"]  # our strategy, or Lightning's ``ddp``
KINDS: tuple[Kind, ...] = ("ours", "stock")


# What is trained.


def data(samples: int = 24) -> TensorDataset:
    """Return rows of four numbers with targets, the same in each call."""
    x = torch.linspace(-1, 1, samples * 4).reshape(samples, 4).sin()
    return TensorDataset(x, x.square().sum(1, keepdim=True))


class Streamed(IterableDataset[Any]):
    """The samples of a dataset or list, without a length."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[number] for number in range(len(self.samples)))


class Net(L.LightningModule):
    """A model with everything that DDP treats differently: parameters, buffers, and
    metrics of every rank and step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out

    def loss(self, batch: Batch) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: Batch, index: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Batch, index: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Batch, index: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data(), batch_size=3, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data(8), batch_size=2)

    test_dataloader = predict_dataloader = val_dataloader


class Plain(Net):
    """A model without buffers that logs nothing, so that only gradients need all ranks in
    a training step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Batch, index: int) -> Any:
        return self.loss(batch)


class OptimizesByHand(L.LightningModule):
    """Makes a step of the optimiser itself in each batch, with the loss of another class."""

    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        loss = super().training_step(batch, index)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class ByHand(OptimizesByHand, Plain):
    """Makes a step of its optimiser itself in each batch."""


class Sharded(Plain):
    """Has an optimiser of whose state each rank has a part."""

    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=0.05)


# Train on this rank.


def make_trainer(strategy: Any, **options: Any) -> L.Trainer:
    """Return a Trainer on two CPU ranks that writes nothing into the working directory
    and prints little, unless ``options`` change that.
    """
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 2,
        "default_root_dir": tempfile.mkdtemp(),  # a fit that fails saves there
        **quiet,
    }
    return L.Trainer(strategy=strategy, **{**defaults, **options})


def make_strategy(kind: Kind, directory: Path, **options: Any) -> DDPStrategy:
    """Return our strategy for ranks started by hand, with a file in ``directory``, which
    may be missing; or stock, in a ``stock_group``.
    """
    if kind == "stock":
        return DDPStrategy(**options)
    directory.mkdir(parents=True, exist_ok=True)
    from lightning_ddp_ext import DDPExtStrategy  # stock is to be judged without it

    return DDPExtStrategy(init_method=f"file://{directory}/store", **options)


def backend(name: str) -> str:
    """Return the name, after registering gloo under it if torch has no such backend; a
    stand-in for NCCL.
    """
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, dist.ProcessGroupGloo, devices=["cpu"])
    return name


def fit(
    kind: Kind,
    directory: Path,
    model: L.LightningModule,
    *callbacks: L.Callback,
    strategy: Mapping[str, Any] | None = None,
    ckpt_path: Any = None,
    **options: Any,
) -> L.Trainer:
    """Train on this rank, with options of the strategy and of the Trainer; return the
    Trainer.
    """
    trainer = make_trainer(
        make_strategy(kind, directory, **(strategy or {})), callbacks=[*callbacks], **options
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


def learned(
    kind: Kind, directory: Path, model: L.LightningModule, *callbacks: L.Callback, **options: Any
) -> dict[str, Tensor]:
    """Train on this rank by ``fit``; return the weights."""
    fit(kind, directory, model, *callbacks, **options)
    return weights(model)


# Train on several ranks, from the process of the test.


def fit_on(
    world_size: int,
    directory: Path,
    model: L.LightningModule,
    *callbacks: L.Callback,
    **options: Any,
) -> list[Outcome]:
    """Train with ours on ranks, by ``fit`` with these options; return how each ended.
    The results are the weights.
    """
    with start_fit(world_size, directory, model, *callbacks, **options) as ranks:
        return ranks.wait()


def start_fit(
    world_size: int,
    directory: Path,
    model: L.LightningModule,
    *callbacks: L.Callback,
    **options: Any,
) -> RankProcesses:
    """Return the ranks of ``fit_on``, which the test controls."""
    options["devices"] = world_size
    return RankProcesses(_fit_and_return_weights, world_size, directory, model, callbacks, options)


def _fit_and_return_weights(
    rank: int, world_size: int, directory: Path, model: Any, callbacks: Any, options: Any
) -> dict[str, Tensor]:
    return learned("ours", directory, model, *callbacks, **options)


def on_both(
    function: Callable[..., Any], directory: Path, *args: Any
) -> tuple[list[Any], list[Any]]:
    """Return ``function(kind, directory, *args)`` by rank, on two ranks with ours and
    on two other ranks with stock.
    """
    ours, stock = (on_ranks(kind, function, directory, *args) for kind in KINDS)
    return ours, stock


def on_ranks(
    kind: Kind,
    function: Callable[..., Any],
    directory: Path,
    *args: Any,
    world_size: int = 2,
    env: Environment | None = None,
    **options: Any,
) -> list[Any]:
    """Run ``function(kind, directory, *args)`` on ranks with ours or with stock, as
    ``run_ranks`` does.
    """
    (directory / kind).mkdir(exist_ok=True)
    env = {**by_hand_env(world_size), **(env or {})}
    return run_ranks(
        _on_side, world_size, kind, function, directory / kind, *args, env=env, **options
    )


def _on_side(
    rank: int, world_size: int, kind: Kind, function: Any, directory: Path, *args: Any
) -> Any:
    with stock_group(rank, world_size, directory) if kind == "stock" else nullcontext():
        return function(kind, directory, *args)


@contextmanager
def stock_group(
    rank: int, world_size: int, directory: Path, backend: str = "gloo"
) -> Iterator[None]:
    """Open and close the default process group as users may do; stock ``ddp`` uses it,
    so it needs no free port.
    """
    dist.init_process_group(
        backend, init_method=f"file://{directory}/store", rank=rank, world_size=world_size
    )
    yield
    gc.collect()
    dist.destroy_process_group()
    gc.collect()


# Do something at one point of a training, on this rank.


class At(L.Callback):
    """Calls ``do(trainer)`` in one call of a hook, the first one or that after
    ``earlier`` calls; on ``ranks``, by default on all.

    Nothing is called if the hook runs less often, so a test asserts what ``do`` causes.
    """

    def __init__(
        self,
        hook: str,
        do: Callable[[L.Trainer], object],
        *,
        earlier: int = 0,
        ranks: Collection[int] = (),
    ) -> None:
        assert hasattr(L.Callback, hook), f"{hook} is not a hook"
        self._do = do
        self._calls_left = earlier
        self._ranks = ranks
        setattr(self, hook, self._call)

    def _call(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        is_on_this_rank = not self._ranks or trainer.global_rank in self._ranks
        if self._calls_left == 0 and is_on_this_rank:
            self._do(trainer)
        self._calls_left -= 1


def in_step(action: Callable[..., object], *ranks: int) -> At:
    """Fail in the second step, when the first one has left gradients."""
    return At("on_train_batch_start", action, earlier=1, ranks=ranks)


def signalled(
    hook: str, earlier: int = 0, signum: int = signal.SIGTERM, *, ranks: Collection[int] = ()
) -> At:
    """Return a callback that signals its process at a call of a hook, see ``At``."""
    return At(hook, partial(_signal_itself, signum), earlier=earlier, ranks=ranks)


STOPPED = 128 + signal.SIGTERM  # the exit status of a rank that stops on SIGTERM


def _signal_itself(signum: int, trainer: L.Trainer) -> None:
    os.kill(os.getpid(), signum)


class BoomError(ValueError):
    """The error of ``boom``; no other code raises it."""


def boom(*_: object) -> None:
    raise BoomError("no such layer")


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def wait_for_ever(*_: object) -> None:
    """Block in a way that no broken connection unblocks."""
    threading.Event().wait()


def wait_for_another_ranks_end(*_: object) -> None:
    """Wait until this rank has been told that another one failed or exited."""
    from lightning_ddp_ext.rendezvous.process_context import current

    context = current()
    assert context is not None
    assert context.peers.wait(60.0) is not None


def limit_collectives(seconds: float) -> None:
    """Change the ``timeout`` of this rank's collectives; a timeout from the start would
    also limit the start, which a busy machine delays.
    """
    from lightning_ddp_ext.rendezvous.process_context import current

    context = current()
    assert context is not None
    context.groups.serve(replace(context.groups.request, timeout=timedelta(seconds=seconds)))


def change_timeouts(strategy: Any, **changes: Any) -> None:
    """Change durations of the control channel, see ``Timeouts``; users cannot choose them."""
    strategy._rendezvous.timeouts = replace(strategy._rendezvous.timeouts, **changes)


# Look at the results.


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters and buffers, which later steps do not change."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def fingerprint(module: nn.Module) -> str:
    """Return a hash of the weights."""
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


E = TypeVar("E", bound=BaseException)


def raised(
    kind: type[E] | tuple[type[E], ...], function: Callable[..., object], *args: Any, **options: Any
) -> E:
    """Return the error of this kind that a call raises; fail if it raises none."""
    with pytest.raises(kind) as caught:
        function(*args, **options)
    return caught.value


@contextmanager
def warnings_with(part: str) -> Iterator[list[str]]:
    """Yield a list that has, after the block, the texts of its warnings that contain
    ``part``.
    """
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    texts = [str(warning.message) for warning in caught]
    found += [text for text in texts if part in text]


def assert_same(ours: Any, stock: Any) -> None:
    """Assert equality to the last bit, including types and shapes."""
    torch.testing.assert_close(ours, stock, rtol=0, atol=0, equal_nan=True)
