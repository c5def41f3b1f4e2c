"""Training leaves nothing behind in a Trainer, in its process, or in the user's
objects, loaders among them.
"""

from __future__ import annotations

import copy
import faulthandler
import os
import pickle
import signal
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader

from lightning_ddp_ext import (
    HangWatchdog,
    RankConsistency,
    RankZeroCheckpoint,
    SamplerEpochSeeding,
    SyncBatchNormConversion,
)
from tests.harness.processes import changed_in_process, of_process
from tests.harness.ranks import run_ranks
from tests.harness.training import (
    KINDS,
    At,
    Kind,
    Net,
    assert_same,
    data,
    make_strategy,
    make_trainer,
    on_both,
    on_ranks,
    weights,
)
from tests.integration.continuing import (
    KEPT,
    Loaders,
    Numbers,
    Training,
    Turning,
    sampled,
    signalled,
    stream,
)
from tests.supervision.model import BoomError, Fault, boom, interrupt

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
            [DataLoader(data(), 3, shuffle=True, **KEPT), DataLoader(data(), 3)], "min_size"
        )


def look(kind: Kind, directory: Path) -> tuple[list[set[str]], list[set[str]]]:
    """Return the replaced methods at points of runs where a user's code runs, and
    before and after each run.
    """
    warnings.simplefilter("ignore")
    within: list[set[str]] = []
    around: list[set[str]] = []
    ours = [
        SyncBatchNormConversion(),
        SamplerEpochSeeding(),
        RankConsistency(),
        RankZeroCheckpoint(directory),
    ]
    for model, callbacks in ((TwoLoaders(), []), (Net(), ours)):
        looks = [
            At(f"on_{hook}", lambda trainer: within.append(replaced(trainer))) for hook in HOOKS
        ]
        options = {
            "callbacks": [*looks, *callbacks],
            "enable_checkpointing": bool(callbacks),
            "val_check_interval": 2,
        }
        trainer = make_trainer(make_strategy(kind, directory), **options)
        for run in (trainer.fit, trainer.validate, trainer.test):
            around.append(replaced(trainer))
            run(model)
        around.append(replaced(trainer))
    return within, around


@pytest.mark.parametrize("kind", KINDS)
def test_hardly_anything_is_replaced_in_a_run_and_nothing_after_it(
    kind: Kind, tmp_path: Path
) -> None:
    """At most four methods are, and none of a loader, a fetcher or a result: with
    several loaders and our callbacks.

    The same holds for our callbacks with stock strategies.
    """
    for within, around in on_ranks(kind, look, tmp_path):
        assert 0 < max(len(names) for names in within) <= 4
        owners = {name.partition(".")[0].lower() for names in within for name in names}
        assert [owner for owner in owners if any(word in owner for word in DATA)] == []
        assert around == [set()] * 8


BATCH_END = "on_train_batch_end"
RUNS: list[tuple[str, L.Callback]] = [
    *((run, L.Callback()) for run in ("fit", "validate", "test", "predict")),
    ("fit", signalled(BATCH_END)),
    *(
        ("fit", fault)
        for fault in (
            Fault(BATCH_END, boom),
            Fault(BATCH_END, interrupt),
            Fault("setup", interrupt),
        )
    ),
    ("fit", L.Callback()),
]


def changed_by_runs(kind: Kind, directory: Path) -> list[dict[str, Any]]:
    """Return the changes after each run in a process that prints stacks on a signal."""
    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGUSR1)
    before = of_process()
    changes = []
    for run, callback in RUNS:
        callbacks = [HangWatchdog(600), callback]
        trainer = make_trainer(
            make_strategy(kind, directory), callbacks=callbacks, default_root_dir=directory
        )
        with suppress(BoomError, SystemExit):
            getattr(trainer, run)(Net())
        changes.append(changed_in_process(before))
    trainer.strategy.setup_environment()  # by hand, and never torn down
    return [*changes, changed_in_process(before)]


def test_a_run_leaves_its_process_as_it_was(tmp_path: Path) -> None:
    """This holds for every end; only the channel stays, and after a failure SIGTERM
    waits for some seconds.
    """
    deferred = {"SIGTERM", "SigCgt"}
    for changes in on_ranks("ours", changed_by_runs, tmp_path, env={"OMP_NUM_THREADS": "1"}):
        names = [{name for name in changed if not name.startswith("ddpx-")} for changed in changes]
        assert names == [set()] * 5 + [deferred] * 3 + [set()] * 2, changes
        assert all(
            "ddpx-signals" not in changed and "ddpx-stop-deadline" not in changed
            for changed in changes
        )


class Profiles(Net):
    """Profiles a part of its step, as users do."""

    def training_step(self, batch: Any, index: int) -> Any:
        assert isinstance(self.trainer.profiler, (PassThroughProfiler, SimpleProfiler))
        with self.trainer.profiler.profile("a part") as name:
            assert name == "a part"
        return self.trainer.profiler.profile("another")(super().training_step)(batch, index)


def profile_runs(kind: Kind, directory: Path) -> dict[str, Any]:
    """Return the counts of profilers that the user made, and whether the Trainer still
    has them after runs.
    """
    found: dict[str, Any] = {}
    for profiler in (PassThroughProfiler(str(directory), "times"), SimpleProfiler(), None):
        trainer = make_trainer(make_strategy(kind, directory), profiler=profiler, max_epochs=1)
        before = trainer.profiler
        for run in (trainer.fit, trainer.test):
            run(Profiles())
            assert trainer.profiler is before
        calls = {
            name: len(times) for name, times in getattr(before, "recorded_durations", {}).items()
        }
        found[str(type(profiler))] = (sorted(vars(before)), before.local_rank, calls.get("a part"))
    return found


def test_a_profiler_of_the_users_works_and_stays_the_trainers(tmp_path: Path) -> None:
    """The profiler counts a part that the module profiles, and after a run the Trainer
    still has this profiler.
    """
    ours, stock = on_both(profile_runs, tmp_path)
    assert ours == stock
    assert [calls for *_, calls in ours[0].values()] == [None, 4, None]


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda each: pickle.loads(pickle.dumps(each))}


def copy_fitted(kind: Kind, directory: Path) -> dict[str, Any]:
    """Return types and results of copies of a fitted Trainer and of its parts."""
    warnings.simplefilter("ignore")
    trainer = make_trainer(make_strategy(kind, directory))
    trainer.fit(Net())
    parts = [
        trainer,
        trainer.strategy,
        trainer.fit_loop,
        trainer.lightning_module,
        trainer.train_dataloader,
    ]
    found: dict[str, Any] = {}
    for how, copied in COPIES.items():
        for number, part in enumerate(parts):
            try:
                copied(part)
            except Exception as error:
                found[f"{how} of part {number}"] = repr(error)
        if f"{how} of part 0" not in found:
            found[f"{how} continues"] = train_on(copied(trainer))
    return found


def train_on(trainer: L.Trainer) -> Any:
    """Have a copy of a Trainer test its model, and train it for another epoch."""
    model: Any = trainer.lightning_module
    values = trainer.test(model, verbose=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model)
    return values, trainer.current_epoch, trainer.global_step, weights(model)


def test_a_fitted_trainer_is_copied_and_pickled_as_with_stock(tmp_path: Path) -> None:
    """So are its strategy, loops, model and loader; a copy tests and trains as a copy
    of stock's does.
    """
    for mine, expected in zip(*on_both(copy_fitted, tmp_path), strict=True):
        assert mine.keys() == expected.keys(), {
            name: mine[name] for name in mine.keys() - expected.keys()
        }
        assert_same(mine, expected)


SAMPLES = 16
POINT = "train_batch_end-2"


class InTwos(BatchSampler):
    """A batch sampler of the user's own."""


class OwnLoader(DataLoader[Any]):
    """A loader of the user's own, with arguments like those of torch_geometric's."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        own: Any = None,
        **options: Any,
    ):
        self.own = own
        super().__init__(dataset, batch_size, shuffle, **options)

    def write(self, value: Any) -> Any:
        self.own, before = value, self.own
        return before


def own_batches(rank: int, world_size: int) -> DataLoader[Any]:
    sampler = InTwos(Turning(SAMPLES, rank, world_size), 2, drop_last=False)
    return DataLoader(Numbers(SAMPLES), batch_sampler=sampler)  # type: ignore[arg-type]


LOADERS: dict[str, tuple[Loaders, dict[str, Any]]] = {
    "shuffled": (lambda *own: OwnLoader(Numbers(SAMPLES), 2, shuffle=True), {}),
    "a sampler, workers that stay": (sampled("distributed", SAMPLES, **KEPT), {}),
    "a batch sampler": (own_batches, {"use_distributed_sampler": False}),
    "a stream": (stream(8), {}),
}


def training(
    directory: Path, name: str, make: Loaders, rank: int, world_size: int, **options: Any
) -> Training:
    chosen = {"max_epochs": 2, "dropout": False, **options}
    return Training(lambda: make(rank, world_size), directory, world_size, chosen, name=name)


def snapshot(loader: Any) -> dict[str, Any]:
    """Return the state of a loader, its samplers and its dataset, without epochs and
    torch's workers.
    """
    parts = {"loader": loader, "dataset": loader.dataset, "sampler": loader.sampler}
    parts |= {"batch sampler": loader.batch_sampler}
    found = {}
    for name, part in parts.items():
        attributes = {
            key: id(value) for key, value in vars(part).items() if key not in ("epoch", "_iterator")
        }
        found[name] = (id(part), type(part), attributes)
    return found


def is_as_before(rank: int, world_size: int, directory: Path) -> list[str]:
    """Return the differences after a run, and after one that was resumed and failed."""
    wrong = []
    for name, (make, options) in LOADERS.items():
        loader = make(rank, world_size)
        before = snapshot(loader)
        runs = training(
            directory, name, lambda *_, loader=loader: loader, rank, world_size, **options
        )  # type: ignore[misc]
        path = runs.run(POINT).saved[POINT]
        wrong += [
            f"{part} of {name}" for part, was in before.items() if snapshot(loader)[part] != was
        ]
        runs.run(ckpt_path=path, fail_at=(0, 3))
        wrong += [
            f"{part} of {name}, resumed"
            for part, was in before.items()
            if snapshot(loader)[part] != was
        ]
    return wrong


def test_the_users_objects_are_as_they_were(tmp_path: Path) -> None:
    """Loader, sampler, batch sampler and dataset have the class and the attributes that
    they had before the run.
    """
    assert run_ranks(is_as_before, 2, tmp_path) == [[], []]


def made(**options: Any) -> OwnLoader:
    return OwnLoader(data(16), batch_size=2, shuffle=True, own="given", **options)


class Combined(Net):
    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step(batch["own"], index)


def look_at_loaders(kind: Kind, directory: Path) -> list[Any]:
    """Return what callbacks see of loaders and set in them, and Lightning's later
    copies.
    """
    facts: list[Any] = []

    def use(trainer: L.Trainer) -> None:
        loader: Any = trainer.train_dataloader
        again = [
            loader,
            type(loader)(loader.dataset),
            copy.copy(loader),
            pickle.loads(pickle.dumps(loader)),
        ]
        facts.append(
            [
                (type(each).__name__, isinstance(each, OwnLoader), len(each), {*vars(each)})
                for each in again
            ]
        )
        facts.append([loader.write("set"), vars(loader)["own"], again[2].own, loader.batch_size])
        loader.batch_sampler.batch_size = 4
        facts.append(
            [
                isinstance(trainer.val_dataloaders, DataLoader),
                isinstance(loader.batch_sampler, BatchSampler),
            ]
        )

    def size(trainer: L.Trainer) -> None:
        facts.append(trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def fit(module: L.LightningModule, loaders: Any, **options: Any) -> None:
        make_trainer(make_strategy(kind, directory), **{"max_epochs": 1, **options}).fit(
            module, loaders
        )

    for is_injected in (True, False):
        callbacks = [At("on_train_start", use), At("on_train_end", size)]
        fit(Net(), made(), use_distributed_sampler=is_injected, callbacks=callbacks)
    combined = CombinedLoader({"own": made()}, "max_size")
    for _ in range(2):
        fit(Combined(), combined, overfit_batches=2)
    facts.append(type(combined.flattened[0].sampler).__name__ == "SequentialSampler")
    if kind == "ours":  # stock starts the workers
        is_first = os.environ["RANK"] == "0"
        with (
            pytest.warns(UserWarning, match="persistent_workers=True")
            if is_first
            else nullcontext()
        ):
            fit(Net(), made(num_workers=1, multiprocessing_context="spawn"), max_epochs=0)
    return facts


def test_users_see_loaders_as_stock_shows_them(tmp_path: Path) -> None:
    """Loaders have their class, can be changed, copied and made again, and cause
    Lightning's hints.
    """
    ours, stock = on_both(look_at_loaders, tmp_path)
    assert ours == stock
    assert (ours[0][3], ours[0][7]) == (2, 4)
