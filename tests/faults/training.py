"""The run that faults happen to: what each of its ranks does, and how one of them comes to harm."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import lightning as L

from lightning_ddp_ext import DDPExtStrategy, RankZeroCheckpoint, RankZeroCheckpointIO
from tests.harness.ranks import hold
from tests.harness.training import At, Net, make_trainer

if TYPE_CHECKING:
    from tests.faults.test_faults import Injection

# What one rank can do to another one; the other kinds a rank does to itself.
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM, "interrupt": signal.SIGINT}
# What of the strategy's limits is short, by the moment or the kind of a fault.
LIMITS = {"begin": {"init_timeout": 15.0}, "stop": {"timeout": 10.0}, "cut": {"heartbeat_timeout": 8.0}}
STATUS = 3  # of a rank that leaves by sys.exit


class Fault:
    """Does once what a plan says; files tell that it was done, and which steps have been saved."""

    def __init__(self, plan: Injection | None, rank: int, directory: Path) -> None:
        self.plan = plan if plan is not None and plan.striker == rank else None
        self.directory = directory
        self.earlier = 0

    def at(self, moment: str) -> None:
        """This rank comes to a moment."""
        if self.plan is not None and moment == self.plan.moment:
            if self.earlier == self.plan.number:
                self.strike(self.plan)
            self.earlier += 1

    def strike(self, plan: Injection) -> None:
        (self.directory / "struck").touch()
        if plan.kind in SIGNALS:
            os.kill(int((self.directory / f"{plan.culprit}.pid").read_text()), SIGNALS[plan.kind])
        elif plan.kind == "vanish":
            os._exit(0)
        elif plan.kind == "exit":
            sys.exit(STATUS)
        elif plan.kind == "raise":
            raise OSError(errno.ENOSPC, "No space left on device")
        elif plan.kind == "cut":
            hold("cut")
        else:
            threading.Event().wait(1.0)

    def callbacks(self) -> list[L.Callback]:
        """Bring the fault to a hook, or to the midst of a backward pass, when other gradients are still to come."""
        if self.plan is None:
            return []
        plan, moment = self.plan, self.plan.moment
        if moment == "backward":
            return [At("on_train_start", lambda trainer: self.register(trainer.lightning_module))]
        is_hook = hasattr(L.Callback, moment)
        return [At(moment, lambda trainer: self.strike(plan), earlier=plan.number)] if is_hook else []

    def register(self, module: Any) -> None:
        module.layers[3].weight.register_hook(lambda gradient: self.at("backward"))


class StruckIO(RankZeroCheckpointIO):
    """Brings the fault to the midst of writing, removing and reading."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        write = os.write

        def struck(descriptor: int, data: Any) -> int:
            self.fault.at("writing")
            return write(descriptor, data)

        with patch.object(os, "write", struck):
            super().save_checkpoint(checkpoint, path, storage_options)
        (self.fault.directory / f"{checkpoint['global_step']}.saved").touch()

    def remove_checkpoint(self, path: str | Path) -> None:
        self.fault.at("removing")
        super().remove_checkpoint(path)

    def read(self, *args: Any, **kwargs: Any) -> Any:
        self.fault.at("reading")
        return super().read(*args, **kwargs)


def train(
    rank: int, world_size: int, plan: Injection | None, directory: Path, url: str, checkpoint: Path | None, keep: int
) -> list[float]:
    """One rank's part of the run, from the beginning or from a checkpoint, with another seed; its weights at the end.

    There is a checkpoint every second step, of which ``keep`` are kept. The others do not wait long for a rank that
    does not come, is stopped, or cannot be reached.
    """
    (directory / f"{rank}.pid").write_text(str(os.getpid()))
    fault = Fault(plan, rank, directory)
    fault.at("begin")
    L.seed_everything(7 if checkpoint is None else 8, verbose=False)
    net = Net()
    options: dict[str, Any] = {"init_method": url, "rank": rank, "world_size": world_size}
    if plan is not None:
        options |= LIMITS.get("begin" if plan.is_unmet else plan.kind, {})
    trainer = make_trainer(
        DDPExtStrategy(checkpoint_io=StruckIO(fault), **options),
        devices=world_size,
        max_epochs=3,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[
            *fault.callbacks(),
            RankZeroCheckpoint(directory, "{step}", every_n_train_steps=2, save_top_k=keep),
        ],
    )
    trainer.fit(net, ckpt_path=checkpoint, weights_only=False)
    fault.at("after_fit")
    return [float(number) for parameter in net.parameters() for number in parameter.detach().flatten()]
