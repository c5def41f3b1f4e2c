"""The run that faults happen to: what each of its ranks does, and how one of them comes to harm.

As a script it starts its other ranks by itself: ``training.py SEED DIRECTORY [CHECKPOINT]``.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
from torch import Tensor, nn

from lightning_ddp_ext import DDPExtStrategy, RankZeroCheckpoint, RankZeroCheckpointIO
from lightning_ddp_ext.checkpoint.atomic_file import Sink
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.rendezvous.request import Request
from tests.faults.plan import HOOKS, SIGNALS, WRITES, Injection, draw
from tests.harness.ranks import hold
from tests.harness.training import make_trainer
from tests.integration.continuing import Net
from tests.integration.stopping import shuffled
from tests.supervision.model import boom

STATUS = 3  # of a rank that leaves by sys.exit
JOURNAL = "journal"
SAMPLES = 24
_SIGNALS = {**SIGNALS, "kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_ACTIONS: dict[str, Callable[[], object]] = {
    "vanish": lambda: os._exit(0),
    "exit": lambda: sys.exit(STATUS),
    "raise": boom,
    "cut": lambda: hold("cut"),
    "slow": lambda: threading.Event().wait(0.1),
}


class Fault:
    """Does what a plan says, once, and writes it down; a slow rank is slow at each call from the planned one on."""

    def __init__(self, plan: Injection | None, rank: int, directory: Path) -> None:
        self.plan = plan if plan is not None and plan.striker == rank else None
        self.rank = rank
        self._journal = os.open(directory / JOURNAL, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._calls = 0

    def note(self, line: str) -> None:
        """A line that stays, whatever becomes of this process."""
        os.write(self._journal, f"{line}\n".encode())

    def at(self, hook: str) -> None:
        """This rank comes to a hook."""
        if self.plan is None or hook != self.plan.hook:
            return
        number, self._calls = self._calls, self._calls + 1
        if number == self.plan.number:
            self.note("struck")
        if number == self.plan.number or (number > self.plan.number and self.plan.kind == "slow"):
            self._strike(self.plan)

    def _strike(self, plan: Injection) -> None:
        if plan.kind in _SIGNALS:
            os.kill(self._pid_of(plan.culprit), _SIGNALS[plan.kind])
        else:
            _ACTIONS[plan.kind]()

    def _pid_of(self, rank: int) -> int:
        context = current()
        return os.getpid() if rank == self.rank or context is None else context.table[rank].pid


class Hooks(L.Callback):
    """Brings the fault to all hooks of a callback, of the model's forward and backward, and of the optimiser."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        at = self.fault.at
        assert isinstance(pl_module, Net)
        first, _, last = pl_module.layers
        first.register_forward_hook(lambda *_: at("forward") if pl_module.training else None)
        last.weight.register_hook(lambda _: at("backward"))  # while gradients of earlier layers are still to come
        trainer.optimizers[0].register_step_post_hook(lambda *_: at("optimizer_step"))  # type: ignore[attr-defined]
        at("on_train_start")


def _hook(name: str) -> Callable[..., None]:
    return lambda self, *args, **kwargs: self.fault.at(name)


for name in {hook for hooks in HOOKS.values() for hook in hooks}:
    if hasattr(L.Callback, name) and name not in vars(Hooks):
        setattr(Hooks, name, _hook(name))


class StruckNet(Net):
    """The model, with hooks that callbacks do not have."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(shuffled(SAMPLES))
        # Lightning does not make up for a validation that was due after a save; it draws a random number.
        self.layers[1] = nn.Identity()
        self.fault = fault

    def configure_optimizers(self) -> Any:
        self.fault.at("configure_optimizers")
        return super().configure_optimizers()

    def validation_step(self, batch: Tensor, index: int) -> None:
        super().validation_step(batch, index)
        self.fault.at("validation_step")


class StruckIO(RankZeroCheckpointIO):
    """Brings the fault to the midst of writing and reading, and writes down what has been saved."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        writes, write = iter(range(WRITES)), Sink.write

        def struck(sink: Sink, data: bytes | memoryview) -> int:
            try:
                if next(writes, None) is not None:
                    self.fault.at("writing")
            except BaseException as error:
                sink.error = error
                raise
            return write(sink, data)

        with patch.object(Sink, "write", struck):
            super().save_checkpoint(checkpoint, path, storage_options)
        self.fault.note(f"saved {checkpoint['global_step']}")

    def remove_checkpoint(self, path: str | Path) -> None:
        self.fault.at("removing")
        super().remove_checkpoint(path)

    def read(self, *args: Any, **kwargs: Any) -> Any:
        self.fault.at("reading")
        return super().read(*args, **kwargs)


class StruckStrategy(DDPExtStrategy):
    """Brings the fault to the handshake, in which a rank asks again and again whether a rank cannot come."""

    fault: Fault

    def _request(self) -> Request:
        def absence() -> str | None:
            self.fault.at("handshake")
            return request.absence()

        request = super()._request()
        return replace(request, absence=absence)


def train(
    fault: Fault, directory: Path, devices: int, checkpoint: str | None, keep: int = 1, **options: Any
) -> list[float]:
    """One rank's part of the run, from the beginning or from a checkpoint, with another seed; its weights at the end.

    There is a checkpoint every second step, of which ``keep`` are kept; ``options`` are for the strategy.
    """
    fault.at("begin")
    L.seed_everything(7 if checkpoint is None else 8, verbose=False)
    net = StruckNet(fault)
    strategy = StruckStrategy(checkpoint_io=StruckIO(fault), **options)
    strategy.fault = fault
    saver = RankZeroCheckpoint(directory, "{step}", every_n_train_steps=2, save_top_k=keep)
    settings: dict[str, Any] = {"devices": devices, "enable_checkpointing": True, "num_sanity_val_steps": 0}
    trainer = make_trainer(strategy, callbacks=[Hooks(fault), saver], **settings)
    trainer.fit(net, ckpt_path=checkpoint, weights_only=False)
    fault.at("after_fit")
    atexit.register(fault.at, "exit")
    return [float(number) for parameter in net.parameters() for number in parameter.detach().flatten()]


def options_of(plan: Injection | None) -> dict[str, float]:
    """Options of the strategy that bound how long the others wait for a rank that does not answer."""
    if plan is None:
        return {}
    return {**({"init_timeout": 5.0} if plan.is_unmet else {}), **({"timeout": 4.0} if plan.kind == "stop" else {})}


def main(seed: str, place: str, checkpoint: str | None = None) -> None:
    plan, directory = draw(int(seed)), Path(place)
    fault = Fault(plan, int(os.environ.get("LOCAL_RANK", 0)), directory)
    url = f"file://{directory}/store" if plan.method == "file" else None
    train(fault, directory, plan.world_size, checkpoint, init_method=url, **options_of(plan))


if __name__ == "__main__":
    main(*sys.argv[1:])
