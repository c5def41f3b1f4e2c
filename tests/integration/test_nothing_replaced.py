"""Training leaves nothing behind in a Trainer or in its process."""

import copy
import faulthandler
import gc
import os
import pickle
import re
import resource
import signal
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_ddp_ext import (
    RankConsistency,
    RankZeroCheckpoint,
    RankZeroCheckpointIO,
    SamplerEpochSeeding,
    SyncBatchNormConversion,
)
from tests.harness import training
from tests.harness.training import Net
from tests.integration import continuing
from tests.supervision import model as supervision

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
    """List instance attributes that hide methods, such as "_FitLoop.run", of the
    Trainer, its loops and loaders.
    """
    return {
        f"{type(owner).__name__}.{name}"
        for owner in library_objects(trainer)
        for name, value in vars(owner).items()
        if callable(value) and callable(getattr(type(owner), name, None))
    }


def library_objects(trainer: L.Trainer) -> list[Any]:
    """Return a Trainer and the objects of libraries within it, four levels deep."""
    found: dict[int, Any] = {id(trainer): trainer}
    for _ in range(4):
        parts = [part for owner in found.values() for part in vars(owner).values()]
        found |= {id(part): part for part in parts if is_library_object(part)}
    return list(found.values())


def is_library_object(part: Any) -> bool:
    is_object = hasattr(part, "__dict__") and not isinstance(part, type)
    return is_object and type(part).__module__.startswith(LIBRARIES)


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
    """The replaced methods at several times."""

    in_hooks: list[set[str]]
    between_runs: list[set[str]]  # also before the first and after the last


def fit_and_evaluate(kind: training.Kind, directory: Path, with_our_callbacks: bool) -> Replaced:
    warnings.simplefilter("ignore")
    in_hooks: list[set[str]] = []
    callbacks: list[L.Callback] = [
        training.At(hook, lambda trainer: in_hooks.append(replaced_methods(trainer)))
        for hook in HOOKS
    ]
    if with_our_callbacks:
        callbacks += [
            SyncBatchNormConversion(),
            SamplerEpochSeeding(),
            RankConsistency(),
            RankZeroCheckpoint(directory),
        ]
    trainer = training.make_trainer(
        training.make_strategy(kind, directory),
        val_check_interval=2,
        callbacks=callbacks,
        enable_checkpointing=with_our_callbacks,
    )
    model = TwoLoaders()
    between_runs = [replaced_methods(trainer)]
    for run in (trainer.fit, trainer.validate, trainer.test):
        run(model)
        between_runs.append(replaced_methods(trainer))
    return Replaced(in_hooks, between_runs)


@pytest.mark.parametrize("with_our_callbacks", [False, True], ids=["alone", "with our callbacks"])
@pytest.mark.parametrize("kind", training.KINDS)
def test_hardly_anything_is_replaced_in_a_run_and_nothing_after_it(
    kind: training.Kind, with_our_callbacks: bool, tmp_path: Path
) -> None:
    """At most four methods are replaced, and none of a loader, fetcher or result.

    This also holds with our callbacks in a stock strategy.
    """
    uses_ours = kind == "ours" or with_our_callbacks
    for replaced in training.on_ranks(kind, fit_and_evaluate, tmp_path, with_our_callbacks):
        assert max(map(len, replaced.in_hooks)) <= 4
        owners = {name.partition(".")[0].lower() for name in set().union(*replaced.in_hooks)}
        assert [owner for owner in owners if any(word in owner for word in DATA)] == []
        assert replaced.between_runs == [set()] * 4
        assert any(replaced.in_hooks) is uses_ours, "nothing was looked at"


class Played(NamedTuple):
    """A run with a callback."""

    run: str
    make_callback: Callable[[], L.Callback] = L.Callback


BATCH_END = "on_train_batch_end"
RUNS = {
    "fit": Played("fit"),
    "validate": Played("validate"),
    "test": Played("test"),
    "predict": Played("predict"),
    "stopped": Played("fit", partial(training.At, BATCH_END, supervision.terminate)),
    "failed": Played("fit", partial(training.At, BATCH_END, supervision.boom)),
    "interrupted": Played("fit", partial(training.At, BATCH_END, supervision.interrupt)),
    "interrupted in setup": Played("fit", partial(training.At, "setup", supervision.interrupt)),
    "fit after failures": Played("fit"),
}


def process_state() -> dict[str, Any]:
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
    """Return the names of what has changed since ``process_state`` returned this."""
    now = process_state()
    return {name for name in before | now if before.get(name) != now.get(name)}


def parts_of_run(kind: training.Kind, directory: Path, played: Played) -> list[weakref.ref[Any]]:
    """Run, and return references to what the run used."""
    strategy = training.make_strategy(
        kind, directory, checkpoint_io=AsyncCheckpointIO(RankZeroCheckpointIO())
    )
    trainer = training.make_trainer(
        strategy,
        callbacks=[played.make_callback()],
        default_root_dir=directory,
        enable_checkpointing=True,
    )
    model = Net()
    with suppress(supervision.BoomError, SystemExit):
        getattr(trainer, played.run)(model)
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
    for name, played in RUNS.items():
        parts = parts_of_run(kind, directory, played)
        gc.collect()
        kept = {type(part()).__name__ for part in parts if part() is not None}
        changed[name] = changed_in_process(before) | kept
    trainer = training.make_trainer(training.make_strategy(kind, directory))
    trainer.strategy.setup_environment()  # by hand, and never torn down
    changed["setup_environment"] = changed_in_process(before)
    return changed


ENDS_WITH_RUN = {"ddpx-signals", "ddpx-stop-deadline"}  # the other threads of ours may stay


def is_left_over(changed: str) -> bool:
    return changed in ENDS_WITH_RUN or not changed.startswith("ddpx-")


def test_a_run_leaves_its_process_as_it_was(tmp_path: Path) -> None:
    """A process is unchanged after a run, however it ends, and what the run used is freed
    with the script's last reference to it.

    Only the channel stays.
    """
    expected: dict[str, set[str]] = {name: set() for name in (*RUNS, "setup_environment")}
    by_rank = training.on_ranks("ours", changed_by_runs, tmp_path, env={"OMP_NUM_THREADS": "1"})
    for changed_by_run in by_rank:
        left = {run: set(filter(is_left_over, names)) for run, names in changed_by_run.items()}
        assert left == expected


def pickled_copy(original: Any) -> Any:
    return pickle.loads(pickle.dumps(original))


def use_copies(kind: training.Kind, directory: Path, make_copy: Any) -> dict[str, Any]:
    """Copy a fitted Trainer and its parts; have the copy test its model, and train it for
    another epoch.
    """
    warnings.simplefilter("ignore")
    trainer = training.fit(kind, directory, Net())
    for part in (
        trainer.strategy,
        trainer.fit_loop,
        trainer.lightning_module,
        trainer.train_dataloader,
    ):
        make_copy(part)
    copied = make_copy(trainer)
    model: Any = copied.lightning_module
    tested = copied.test(model, verbose=False)
    copied.fit_loop.max_epochs = 3
    copied.fit(model)
    return {
        "tested": tested,
        "epochs": copied.current_epoch,
        "steps": copied.global_step,
        "weights": training.weights(model),
    }


@pytest.mark.parametrize("make_copy", [copy.deepcopy, pickled_copy])
def test_a_fitted_trainer_is_copied_as_with_stock(make_copy: Any, tmp_path: Path) -> None:
    """A copy of a Trainer tests and trains as a copy of stock's does.

    Its strategy, loops, model and loader can also be copied.
    """
    ours, stock = training.on_both(use_copies, tmp_path, make_copy)
    training.assert_same(ours, stock)
