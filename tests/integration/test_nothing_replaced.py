"""Training leaves nothing behind in a Trainer or in its process."""

from __future__ import annotations

import copy
import faulthandler
import os
import pickle
import re
import resource
import signal
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_ddp_ext import (
    HangWatchdog,
    RankConsistency,
    RankZeroCheckpoint,
    SamplerEpochSeeding,
    SyncBatchNormConversion,
)
from tests.harness import training
from tests.harness.training import Net
from tests.integration import continuing
from tests.supervision import model as supervision

FAMILIES = ("lightning.", "torch.utils.data")
# In the names of classes.
DATA = (
    "loader",
    "fetcher",
    "result",
    "iter",
    "_maxsize",
    "_minsize",
    "_sequential",
)
HOOKS = (
    "train_start",
    "train_batch_end",
    "validation_batch_end",
    "train_epoch_end",
    "test_batch_end",
)


def replaced(trainer: L.Trainer) -> set[str]:
    """List instance attributes that hide methods, such as "_FitLoop.run", of the
    Trainer, its loops and loaders.
    """
    things: dict[int, Any] = {id(trainer): trainer}
    for _ in range(4):
        parts = [
            part
            for thing in things.values()
            for part in vars(thing).values()
            if is_lightnings(part)
        ]
        things |= {id(part): part for part in parts}
    found = [
        (thing, name)
        for thing in things.values()
        for name, value in vars(thing).items()
        if callable(value)
    ]
    return {
        f"{type(thing).__name__}.{name}"
        for thing, name in found
        if callable(getattr(type(thing), name, None))
    }


def is_lightnings(thing: Any) -> bool:
    return (
        type(thing).__module__.startswith(FAMILIES)
        and hasattr(thing, "__dict__")
        and not isinstance(thing, type)
    )


class TwoLoaders(Net):
    """Reads two loaders together, one of them with a persistent worker."""

    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step(batch[0], index)

    def train_dataloader(self) -> Any:
        return CombinedLoader(
            [
                DataLoader(training.data(), 3, shuffle=True, **continuing.KEPT),
                DataLoader(training.data(), 3),
            ],
            "min_size",
        )


class Replaced(NamedTuple):
    """The replaced methods where a user's code runs, and before and after runs."""

    within: list[set[str]]
    around: dict[str, set[str]]


def ours_too(directory: Path) -> list[L.Callback]:
    return [
        SyncBatchNormConversion(),
        SamplerEpochSeeding(),
        RankConsistency(),
        RankZeroCheckpoint(directory),
    ]


def look(kind: training.Kind, directory: Path, model: Net, *, has_our_callbacks: bool) -> Replaced:
    warnings.simplefilter("ignore")
    found = Replaced([], {})
    callbacks = [
        training.At(f"on_{hook}", lambda trainer: found.within.append(replaced(trainer)))
        for hook in HOOKS
    ]
    trainer = training.make_trainer(
        training.make_strategy(kind, directory),
        callbacks=[*callbacks, *(ours_too(directory) if has_our_callbacks else ())],
        enable_checkpointing=has_our_callbacks,
        val_check_interval=2,
    )
    found.around["before runs"] = replaced(trainer)
    for run in ("fit", "validate", "test"):
        getattr(trainer, run)(model)
        found.around[f"after {run}"] = replaced(trainer)
    return found


def look_twice(kind: training.Kind, directory: Path) -> list[Replaced]:
    return [
        look(kind, directory, TwoLoaders(), has_our_callbacks=False),
        look(kind, directory, Net(), has_our_callbacks=True),
    ]


@pytest.mark.parametrize("kind", training.KINDS)
def test_hardly_anything_is_replaced_in_a_run_and_nothing_after_it(
    kind: training.Kind, tmp_path: Path
) -> None:
    """At most four methods are replaced, and none of a loader, fetcher or result.

    This holds with several loaders and our callbacks, also with stock strategies.
    """
    by_rank = training.on_ranks(kind, look_twice, tmp_path)
    for found in [each for of_rank in by_rank for each in of_rank]:
        assert max(len(names) for names in found.within) <= 4
        owners = {name.partition(".")[0].lower() for names in found.within for name in names}
        assert [owner for owner in owners if any(word in owner for word in DATA)] == []
        assert {when: names for when, names in found.around.items() if names} == {}
    assert any(names for found in by_rank[0] for names in found.within)


class Played(NamedTuple):
    """A run with a callback, and what it leaves changed in its process."""

    run: str
    callback: L.Callback
    leaves: set[str]


BATCH_END = "on_train_batch_end"
DEFERRED = {"SIGTERM", "SigCgt"}  # SIGTERM waits for some seconds
RUNS = {
    "fit": Played("fit", L.Callback(), leaves=set()),
    "validate": Played("validate", L.Callback(), leaves=set()),
    "test": Played("test", L.Callback(), leaves=set()),
    "predict": Played("predict", L.Callback(), leaves=set()),
    "stopped": Played("fit", continuing.signalled(BATCH_END), leaves=set()),
    "failed": Played("fit", supervision.Fault(BATCH_END, supervision.boom), leaves=DEFERRED),
    "interrupted": Played(
        "fit", supervision.Fault(BATCH_END, supervision.interrupt), leaves=DEFERRED
    ),
    "interrupted in setup": Played(
        "fit", supervision.Fault("setup", supervision.interrupt), leaves=DEFERRED
    ),
    "fit after failures": Played("fit", L.Callback(), leaves=set()),
}


def of_process() -> dict[str, Any]:
    """Return the environment, signal handlers (including those in C), the limit of open
    files, and the package's threads.
    """
    handlers = {number.name: signal.getsignal(number) for number in signal.Signals}
    status = Path("/proc/self/status").read_text()
    return {
        **os.environ,
        **handlers,
        **dict(re.findall(r"^(Sig(?:Blk|Ign|Cgt)):\t(.*)$", status, re.MULTILINE)),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        **{thread.name: "" for thread in threading.enumerate() if thread.name.startswith("ddpx")},
    }


def changed_in_process(before: dict[str, Any]) -> set[str]:
    """Return the names of what has changed since ``of_process`` returned this."""
    return {name for name, _ in before.items() ^ of_process().items()}


def changed_by_runs(kind: training.Kind, directory: Path) -> dict[str, set[str]]:
    """Return the changes after each run in a process that prints stacks on a signal."""
    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGUSR1)
    before = of_process()
    found = {}
    for name, played in RUNS.items():
        callbacks = [HangWatchdog(600), played.callback]
        trainer = training.make_trainer(
            training.make_strategy(kind, directory), callbacks=callbacks, default_root_dir=directory
        )
        with suppress(supervision.BoomError, SystemExit):
            getattr(trainer, played.run)(Net())
        found[name] = changed_in_process(before)
    trainer.strategy.setup_environment()  # by hand, and never torn down
    return {**found, "setup_environment": changed_in_process(before)}


def test_a_run_leaves_its_process_as_it_was(tmp_path: Path) -> None:
    """A process is unchanged after a run, however it ends.

    Only the channel stays, and after a failure SIGTERM waits for some seconds.
    """
    expected = {name: played.leaves for name, played in RUNS.items()} | {"setup_environment": set()}
    for found in training.on_ranks("ours", changed_by_runs, tmp_path, env={"OMP_NUM_THREADS": "1"}):
        threads = {each for changed in found.values() for each in changed if is_ours(each)}
        assert threads.isdisjoint({"ddpx-signals", "ddpx-stop-deadline"})
        left = {
            name: {each for each in changed if not is_ours(each)} for name, changed in found.items()
        }
        assert left == expected


def is_ours(changed: str) -> bool:
    """Whether it is the name of one of our threads."""
    return changed.startswith("ddpx-")


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda each: pickle.loads(pickle.dumps(each))}


def copy_fitted(kind: training.Kind, directory: Path) -> dict[str, Any]:
    """Return types and results of copies of a fitted Trainer and of its parts."""
    warnings.simplefilter("ignore")
    trainer = training.fit(kind, directory, Net())
    parts = {
        "Trainer": trainer,
        "strategy": trainer.strategy,
        "loop": trainer.fit_loop,
        "module": trainer.lightning_module,
        "loader": trainer.train_dataloader,
    }
    found: dict[str, Any] = {}
    for how, copied in COPIES.items():
        for name, part in parts.items():
            try:
                copied(part)
            except Exception as error:
                found[f"{how} of the {name}"] = repr(error)
        if f"{how} of the Trainer" not in found:
            found[f"{how} continues"] = train_on(copied(trainer))
    return found


def train_on(trainer: L.Trainer) -> Any:
    """Have a copy of a Trainer test its model, and train it for another epoch."""
    model: Any = trainer.lightning_module
    values = trainer.test(model, verbose=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model)
    return values, trainer.current_epoch, trainer.global_step, training.weights(model)


def test_a_fitted_trainer_is_copied_and_pickled_as_with_stock(tmp_path: Path) -> None:
    """A copy of a Trainer tests and trains as a copy of stock's does.

    Its strategy, loops, model and loader can also be copied and pickled.
    """
    for mine, expected in zip(*training.on_both(copy_fitted, tmp_path), strict=True):
        assert mine.keys() == expected.keys(), {
            name: mine[name] for name in mine.keys() - expected.keys()
        }
        training.assert_same(mine, expected)
