"""Train a run whose ranks end at chosen moments, and run it again until it ends."""

import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_ddp_ext import RankZeroCheckpointIO
from tests.harness import training
from tests.harness.ranks import Outcome, launch_ranks, stories

STOP_CHECKPOINT = "last-preempted.ckpt"  # the default
EPOCHS = 3
BATCHES = 12  # of each rank in an epoch
VALIDATION_BATCHES = 2  # of each rank
BATCH_SIZE = 2

# How a rank can end.
ENDS: dict[str, Callable[..., object]] = {
    "kill": training.die,
    "sigterm": lambda *_: os.kill(os.getpid(), signal.SIGTERM),
    "error": training.boom,
    # A collective that the other ranks do not call; it raises once they have waited.
    "other call": lambda *_: torch.distributed.all_reduce(torch.zeros(77)),
}
BY_EXCEPTION = ("error", "other call")  # such a rank saves its last step itself
WRITING = "writing"


@dataclass(frozen=True)
class Kill:
    """Ends some ranks at a moment of a run.

    Attributes:
        moment: a hook of a callback, or ``WRITING``: each write of the Trainer's own
            checkpoints.
        earlier: how often the ranks pass the moment before.
        ranks: the ranks that end; when writing, the one that writes.
        by: one of ``ENDS``.
    """

    moment: str
    earlier: int = 0
    ranks: Sequence[int] = (1,)
    by: str = "kill"

    def callback(self) -> L.Callback:
        """Return a callback that ends the ranks in the hook."""
        return training.At(self.moment, ENDS[self.by], earlier=self.earlier, ranks=self.ranks)

    def io(self) -> "FaultyIO":
        """Return an IO that ends the rank in a write."""
        return FaultyIO(ENDS[self.by], earlier=self.earlier, of_last_step=False)


class Net(training.Plain):
    """Reads a number of batches that does not depend on that of the ranks."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._samples_of(BATCHES), BATCH_SIZE, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._samples_of(VALIDATION_BATCHES), BATCH_SIZE)

    def _samples_of(self, batches: int) -> Any:
        return training.data(BATCH_SIZE * batches * self.trainer.world_size)


@dataclass(frozen=True)
class Plan:
    """A run, and what happens in it.

    Attributes:
        kill: which ranks end, and when.
        strategy: options of the strategy; with a ``start_method`` the process that trains
            starts two ranks.
        trainer: options of the Trainer.
        callbacks: of the Trainer, in addition to one that saves.
        model: makes the module.
        ckpt_path: the file to resume from.
    """

    kill: Kill | None = None
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: Sequence[L.Callback] = ()
    model: Callable[[], L.LightningModule] = Net
    ckpt_path: Any = "last"


class FaultyIO(RankZeroCheckpointIO):
    """Calls ``fault`` while a file is written.

    Args:
        fault: called before a write, which it may prevent.
        earlier: the number of writes before that one.
        of_last_step: whether the file is a survivor's, or one of the Trainer's own.
    """

    def __init__(
        self, fault: Callable[[], object], *, earlier: int = 0, of_last_step: bool = True
    ) -> None:
        super().__init__()
        self.fault = fault
        self.earlier = earlier
        self.of_last_step = of_last_step
        self.writes = 0

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        is_of_last_step = Path(path).name == STOP_CHECKPOINT
        is_faulty = is_of_last_step == self.of_last_step
        write = partial(self.write_or_fail, os.write) if is_faulty else os.write
        with patch.object(os, "write", write):
            super().save_checkpoint(checkpoint, path, storage_options)

    def write_or_fail(self, write: Callable[..., int], descriptor: int, content: Any) -> int:
        self.writes += 1
        if self.writes == self.earlier + 1:
            self.fault()
        return write(descriptor, content)


class FinishedSteps(L.Callback):
    """Writes down which step this rank has finished."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_before_zero_grad(self, trainer: L.Trainer, *_: Any) -> None:
        (self.directory / f"{trainer.global_rank}.steps").write_text(str(trainer.global_step))

    on_validation_start = on_train_batch_end = on_before_zero_grad


def train(rank: int, world_size: int, plan: Plan, directory: Path) -> dict[str, torch.Tensor]:
    """Train from the newest checkpoint on, with another seed; return the final weights and,
    on a rank, the number of steps that loggers count.
    """
    L.seed_everything(8 + rank if files_in(directory) else 7, verbose=False)
    net = plan.model()
    strategy = {"timeout": 60, **plan.strategy}
    training.backend(strategy.get("process_group_backend", "gloo"))
    starts_ranks = "start_method" in strategy  # and is not a rank itself
    options = {
        "devices": 2 if starts_ranks else world_size,
        "max_epochs": EPOCHS,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": True,
        "default_root_dir": directory,
        **plan.trainer,
    }
    kills: list[L.Callback] = []
    if plan.kill is not None and plan.kill.moment == WRITING:
        strategy["checkpoint_io"] = plan.kill.io()
    elif plan.kill is not None:
        kills = [plan.kill.callback()]
    trainer = training.fit(
        "ours",
        directory,
        net,
        FinishedSteps(directory),
        *kills,
        *plan.callbacks,
        ModelCheckpoint(directory, "{epoch}-{step}", monitor="val_loss", save_top_k=1),
        strategy=strategy,
        ckpt_path=plan.ckpt_path,
        **options,
    )
    if starts_ranks:
        return training.weights(net)
    steps = trainer.fit_loop.epoch_loop._batches_that_stepped
    return {**training.weights(net), "steps": torch.tensor(steps)}


def survive(
    world_size: int,
    plan: Plan,
    kills: Iterable[Kill],
    directory: Path,
    *,
    may_miss: bool = False,
    may_lose: bool = False,
    **options: Any,
) -> list[Any]:
    """Run the plan again after each kill, until it ends; return the results by rank.

    Fail if a step that a survivor finished is lost. The other options are those of
    ``launch_ranks``.

    Args:
        world_size: the number of ranks.
        plan: the run.
        kills: what ends the first run, the second, and so on.
        directory: where checkpoints are.
        may_miss: whether a run may end before the moment of its kill.
        may_lose: whether steps after the last checkpoint may be lost, as with NCCL.
    """
    for kill in (*kills, None):
        outcomes = launch_ranks(train, world_size, replace(plan, kill=kill), directory, **options)
        if not any(outcome.exit_code for outcome in outcomes):
            assert kill is None or may_miss, f"{kill} did not happen"
            break
        assert kill is not None, stories(outcomes)
        assert may_lose or lost_steps(directory, outcomes, kill) <= 0, stories(outcomes)
    assert not list(directory.rglob(STOP_CHECKPOINT))
    return [outcome.result for outcome in outcomes]


def lost_steps(directory: Path, outcomes: list[Outcome], kill: Kill) -> int:
    """Return the number of steps that a rank has finished which was not killed, and that are
    not in the newest checkpoint.
    """
    killed = () if kill.by in BY_EXCEPTION else kill.ranks
    paths = [directory / f"{each.rank}.steps" for each in outcomes if each.rank not in killed]
    finished = max((int(path.read_text()) for path in paths if path.exists()), default=0)
    return finished - saved_step(directory)


def files_in(directory: Path) -> list[Path]:
    """Return the checkpoints of a run, also in folders of its fits."""
    return [*directory.glob("*.ckpt"), *directory.glob(f"*/{STOP_CHECKPOINT}")]


def saved_step(directory: Path) -> int:
    """Return the step of the newest checkpoint; fail if it names a missing file."""
    newest = max(files_in(directory), key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is None:
        return 0
    checkpoint = torch.load(newest, weights_only=True, map_location="cpu")
    [state] = [
        state
        for name, state in checkpoint["callbacks"].items()
        if name.startswith("ModelCheckpoint")
    ]
    named = [*state["best_k_models"], state["best_model_path"]]
    assert all(Path(path).exists() for path in named if path)
    return int(checkpoint["global_step"])
