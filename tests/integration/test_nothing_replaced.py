"""A run leaves nothing behind in its Trainer or its process: methods, environment, signal
handlers, sockets, threads or memory.
"""

import copy
import faulthandler
import gc
import itertools
import os
import pickle
import re
import resource
import signal
import sys
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch.utils.data import DataLoader

from lightning_ddp_ext import (
    DDPExtStrategy,
    RankConsistency,
    RankZeroCheckpoint,
    RankZeroCheckpointIO,
    SamplerEpochSeeding,
    SyncBatchNormConversion,
)
from tests.harness import training
from tests.harness.ranks import RankProcesses, announce, free_port, hold, run_ranks

LIBRARIES = ("lightning.", "torch.utils.data")
# Parts of the names of classes whose objects hold data or results.
DATA = ("loader", "fetcher", "result", "iter", "_maxsize", "_minsize", "_sequential")
HOOKS = (
    "on_train_start",
    "on_train_batch_end",
    "on_validation_batch_end",
    "on_train_epoch_end",
    "on_test_batch_end",
)


def replaced_methods(trainer: L.Trainer) -> set[str]:
    """List instance attributes that hide methods, such as "_FitLoop.run", of the Trainer
    and of objects of libraries within it, four levels deep.
    """
    found: dict[int, Any] = {id(trainer): trainer}
    for _ in range(4):
        parts = [part for owner in found.values() for part in vars(owner).values()]
        found |= {id(part): part for part in parts if is_library_object(part)}
    return {
        f"{type(owner).__name__}.{name}"
        for owner in found.values()
        for name, value in vars(owner).items()
        if callable(value) and callable(getattr(type(owner), name, None))
    }


def is_library_object(part: Any) -> bool:
    is_object = hasattr(part, "__dict__") and not isinstance(part, type)
    return is_object and type(part).__module__.startswith(LIBRARIES)


def replaced_in_runs(kind: training.Kind, directory: Path) -> list[set[str]]:
    """Fit and test with our callbacks; return the replaced methods in several hooks, and
    fail if any is replaced after a run.
    """
    warnings.simplefilter("ignore")
    in_hooks: list[set[str]] = []
    callbacks: list[L.Callback] = [
        SyncBatchNormConversion(),
        SamplerEpochSeeding(),
        RankConsistency(),
        RankZeroCheckpoint(directory),
    ]
    callbacks += [
        training.At(hook, lambda trainer: in_hooks.append(replaced_methods(trainer)))
        for hook in HOOKS
    ]
    model = training.Net()
    trainer = training.fit(kind, directory, model, *callbacks, enable_checkpointing=True)
    assert not replaced_methods(trainer)
    trainer.test(model)
    assert not replaced_methods(trainer)
    return in_hooks


@pytest.mark.parametrize("kind", training.KINDS)
def test_at_most_four_methods_are_replaced_in_a_run_and_none_after_it(
    kind: training.Kind, tmp_path: Path
) -> None:
    """None of them is a method of a loader, fetcher or result. This also holds with our
    callbacks in a stock strategy.
    """
    for in_hooks in training.on_ranks(kind, replaced_in_runs, tmp_path):
        assert 0 < max(map(len, in_hooks)) <= 4
        owners = {name.partition(".")[0].lower() for name in set().union(*in_hooks)}
        assert [owner for owner in owners if any(word in owner for word in DATA)] == []


BATCH_END = "on_train_batch_end"
# What a Trainer does, and with which callback.
RUNS: dict[str, tuple[str, Callable[[], L.Callback]]] = {
    "fit": ("fit", L.Callback),
    "validate": ("validate", L.Callback),
    "test": ("test", L.Callback),
    "predict": ("predict", L.Callback),
    "stopped": ("fit", partial(training.signalled, BATCH_END)),
    "failed": ("fit", partial(training.At, BATCH_END, training.boom)),
    "interrupted": ("fit", partial(training.At, BATCH_END, training.interrupt)),
    "interrupted in setup": ("fit", partial(training.At, "setup", training.interrupt)),
    "fit after failures": ("fit", L.Callback),
}


def process_state() -> dict[str, Any]:
    """Return the environment, signal handlers (including those in C), and the limit of open
    files.
    """
    handlers = {number.name: signal.getsignal(number) for number in signal.Signals}
    status = Path("/proc/self/status").read_text()
    in_c = dict(re.findall(r"^(Sig(?:Blk|Ign|Cgt)):\t(.*)$", status, re.MULTILINE))
    return {**os.environ, **handlers, **in_c, "files": resource.getrlimit(resource.RLIMIT_NOFILE)}


def parts_of_run(
    kind: training.Kind, directory: Path, run: str, callback: L.Callback
) -> list[weakref.ref[Any]]:
    """Run, and return references to what the run used."""
    strategy = training.make_strategy(
        kind, directory, checkpoint_io=AsyncCheckpointIO(RankZeroCheckpointIO())
    )
    trainer = training.make_trainer(
        strategy,
        callbacks=[callback],
        default_root_dir=directory,
        enable_checkpointing=True,
    )
    model = training.Net()
    with suppress(training.BoomError, SystemExit):
        getattr(trainer, run)(model)
    loaders = [trainer.train_dataloader, trainer.val_dataloaders]
    used = [trainer, strategy, model, *trainer.optimizers, *filter(None, loaders)]
    return [weakref.ref(part) for part in used]


def changed_by_runs(kind: training.Kind, directory: Path) -> dict[str, set[str]]:
    """Return the changes after each run, and the types of what it used and did not free,
    in a process that prints stacks on a signal.
    """
    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGUSR1)
    before = process_state()
    changed = {}
    for name, (run, make_callback) in RUNS.items():
        parts = parts_of_run(kind, directory, run, make_callback())
        gc.collect()
        kept = {type(part()).__name__ for part in parts if part() is not None}
        now = process_state()
        changed[name] = kept | {each for each in before | now if before.get(each) != now.get(each)}
    return changed


def test_a_run_leaves_its_process_as_it_was(tmp_path: Path) -> None:
    """A process is unchanged after a run, however it ends, and what the run used is freed
    with the script's last reference to it.
    """
    expected: dict[str, set[str]] = {name: set() for name in RUNS}
    env = {"OMP_NUM_THREADS": "1"}
    assert training.on_ranks("ours", changed_by_runs, tmp_path, env=env) == [expected] * 2


def pickled_copy(original: Any) -> Any:
    return pickle.loads(pickle.dumps(original))


def use_copies(kind: training.Kind, directory: Path, make_copy: Any) -> dict[str, Any]:
    """Copy a Trainer in its first batch, as some loggers do, and after the fit; have the last
    copy test its model, and train it for another epoch.
    """
    warnings.simplefilter("ignore")
    copying = training.At("on_train_batch_end", copy.deepcopy)
    copied = make_copy(training.fit(kind, directory, training.Net(), copying))
    model: Any = copied.lightning_module
    tested = copied.test(model, verbose=False)
    copied.fit_loop.max_epochs = 3
    copied.fit(model)
    return {"tested": tested, "steps": copied.global_step, "weights": training.weights(model)}


@pytest.mark.parametrize("make_copy", [copy.deepcopy, pickled_copy])
def test_a_fitted_trainer_is_copied_as_with_stock(make_copy: Any, tmp_path: Path) -> None:
    """A copy of a Trainer tests and trains as a copy of stock's does."""
    ours, stock = training.on_both(use_copies, tmp_path, make_copy)
    training.assert_same(ours, stock)


# Sockets, threads and memory.


def resources_of_trainers(
    rank: int, world_size: int, directory: Path, is_destroyed: bool
) -> list[tuple[int, int]]:
    """Return the numbers of descriptors and threads after each of five Trainers, none of
    which has the group of the one before: the script destroys it, or the next one needs
    another interface.
    """
    resources = []
    for number in range(5):
        interface = None if is_destroyed or number % 2 else "lo"
        strategy = DDPExtStrategy(f"file://{directory}/store", interface=interface)
        training.make_trainer(strategy, max_steps=1).fit(training.Net())
        if is_destroyed:
            dist.destroy_process_group()
        gc.collect()
        resources.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return resources


@pytest.mark.parametrize("is_destroyed", [True, False], ids=["destroyed", "other interface"])
def test_groups_formed_one_after_another_free_their_sockets_and_threads(
    is_destroyed: bool, tmp_path: Path
) -> None:
    """A script may destroy the group after each fit, or alternate between network
    interfaces.
    """
    for resources in run_ranks(resources_of_trainers, 2, tmp_path, is_destroyed):
        _, second, *_, last = resources
        # A thread that looks for deadlocks may be reading at that moment; a leak adds
        # some for each group.
        assert last[0] <= second[0] + 1, resources
        assert last[1] <= second[1] + 1, resources


def kept_by_late_start(rank: int, world_size: int, url: str) -> list[str]:
    """Fit, on rank 0 only after another rank has failed to connect to it; return what is
    in memory once the script has dropped it.
    """
    attempts = itertools.count(1)

    def announce_second_attempt(event: str, arguments: Any) -> None:
        if event == "socket.connect" and next(attempts) == 2:
            announce("refused")

    if rank == 0:
        hold("late")
    else:
        sys.addaudithook(announce_second_attempt)
    trainer = training.make_trainer(DDPExtStrategy(url), max_steps=1)
    model = training.Net()
    parts = [weakref.ref(part) for part in (trainer, trainer.strategy, model)]
    trainer.fit(model)
    del trainer, model
    gc.collect()
    return [type(part()).__name__ for part in parts if part() is not None]


def test_a_rank_that_was_refused_at_first_frees_its_trainer() -> None:
    """Rank 0 starts last."""
    with RankProcesses(kept_by_late_start, 2, f"tcp://127.0.0.1:{free_port()}") as ranks:
        ranks.wait_for("late", 0)
        ranks.wait_for("refused", 1)
        ranks.release(0)
        assert [outcome.result for outcome in ranks.wait()] == [[], []]


class Reloaded(training.Net):
    """Makes a new loader for each epoch; counts the datasets in memory when it starts."""

    def __init__(self) -> None:
        super().__init__()
        self.datasets: list[weakref.ref[Any]] = []
        self.alive: list[int] = []

    def train_dataloader(self) -> DataLoader[Any]:
        dataset = training.data()
        self.datasets.append(weakref.ref(dataset))
        return DataLoader(dataset, 4)

    def on_train_epoch_start(self) -> None:
        self.alive.append(sum(dataset() is not None for dataset in self.datasets))


def fit_reloaded(kind: training.Kind, directory: Path) -> list[int]:
    model = Reloaded()
    gc.disable()  # in this rank's process, so that only references keep a dataset
    training.fit(kind, directory, model, reload_dataloaders_every_n_epochs=1, max_epochs=4)
    return model.alive


def test_loaders_that_are_made_again_are_freed_immediately(tmp_path: Path) -> None:
    """As with stock, memory and workers of earlier epochs do not wait for a collection."""
    ours, stock = training.on_both(fit_reloaded, tmp_path)
    assert ours == stock == [[1, 1, 1, 1]] * 2
