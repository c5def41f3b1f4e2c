"""Training leaves nothing behind in a Trainer, in its process, or in the user's
objects, loaders among them.
"""

from __future__ import annotations

import copy
import faulthandler
import pickle
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

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


@dataclass
class Replaced:
    """The replaced methods where a user's code runs, and before and after runs."""

    within: list[set[str]]
    around: dict[str, set[str]]


def look(kind: Kind, directory: Path) -> Replaced:
    warnings.simplefilter("ignore")
    found = Replaced([], {})
    ours = [
        SyncBatchNormConversion(),
        SamplerEpochSeeding(),
        RankConsistency(),
        RankZeroCheckpoint(directory),
    ]
    for model, callbacks in ((TwoLoaders(), []), (Net(), ours)):
        looks = [
            At(f"on_{hook}", lambda trainer: found.within.append(replaced(trainer)))
            for hook in HOOKS
        ]
        options = {
            "callbacks": [*looks, *callbacks],
            "enable_checkpointing": bool(callbacks),
            "val_check_interval": 2,
        }
        trainer = make_trainer(make_strategy(kind, directory), **options)
        name = type(model).__name__
        found.around[f"{name} before runs"] = replaced(trainer)
        for run in ("fit", "validate", "test"):
            getattr(trainer, run)(model)
            found.around[f"{name} after {run}"] = replaced(trainer)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_hardly_anything_is_replaced_in_a_run_and_nothing_after_it(
    kind: Kind, tmp_path: Path
) -> None:
    """At most four methods are replaced, and none of a loader, fetcher or result.

    This holds with several loaders and our callbacks, also with stock strategies.
    """
    for found in on_ranks(kind, look, tmp_path):
        assert 0 < max(len(names) for names in found.within) <= 4
        owners = {name.partition(".")[0].lower() for names in found.within for name in names}
        assert [owner for owner in owners if any(word in owner for word in DATA)] == []
        assert {when: names for when, names in found.around.items() if names} == {}


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
    "stopped": Played("fit", signalled(BATCH_END), leaves=set()),
    "failed": Played("fit", Fault(BATCH_END, boom), leaves=DEFERRED),
    "interrupted": Played("fit", Fault(BATCH_END, interrupt), leaves=DEFERRED),
    "interrupted in setup": Played("fit", Fault("setup", interrupt), leaves=DEFERRED),
    "fit after failures": Played("fit", L.Callback(), leaves=set()),
}


def changed_by_runs(kind: Kind, directory: Path) -> dict[str, set[str]]:
    """Return the changes after each run in a process that prints stacks on a signal."""
    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGUSR1)
    before = of_process()
    found = {}
    for name, played in RUNS.items():
        callbacks = [HangWatchdog(600), played.callback]
        trainer = make_trainer(
            make_strategy(kind, directory), callbacks=callbacks, default_root_dir=directory
        )
        with suppress(BoomError, SystemExit):
            getattr(trainer, played.run)(Net())
        found[name] = {*changed_in_process(before)}
    trainer.strategy.setup_environment()  # by hand, and never torn down
    return {**found, "setup_environment": {*changed_in_process(before)}}


def test_a_run_leaves_its_process_as_it_was(tmp_path: Path) -> None:
    """A process is unchanged after a run, however it ends.

    Only the channel stays, and after a failure SIGTERM waits for some seconds.
    """
    expected = {name: played.leaves for name, played in RUNS.items()} | {"setup_environment": set()}
    for found in on_ranks("ours", changed_by_runs, tmp_path, env={"OMP_NUM_THREADS": "1"}):
        threads = {each for changed in found.values() for each in changed if is_ours(each)}
        assert threads.isdisjoint({"ddpx-signals", "ddpx-stop-deadline"})
        left = {
            name: {each for each in changed if not is_ours(each)} for name, changed in found.items()
        }
        assert left == expected


def is_ours(changed: str) -> bool:
    """Whether it is the name of one of our threads."""
    return changed.startswith("ddpx-")


class Profiles(Net):
    """Profiles a part of its step, as users do."""

    def training_step(self, batch: Any, index: int) -> Any:
        assert isinstance(self.trainer.profiler, (PassThroughProfiler, SimpleProfiler))
        with self.trainer.profiler.profile("a part") as name:
            assert name == "a part"
        return self.trainer.profiler.profile("another")(super().training_step)(batch, index)


@dataclass
class Profiled:
    """A user's profiler after runs."""

    attributes: list[str]
    local_rank: int | None
    calls: int | None  # of the part that the module profiles, where they are counted


PROFILERS: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda directory: PassThroughProfiler(str(directory), "times"),
    "times": lambda directory: SimpleProfiler(),
    "default": lambda directory: None,
}


def profile_runs(kind: Kind, directory: Path) -> dict[str, Profiled]:
    found = {}
    for name, make in PROFILERS.items():
        strategy = make_strategy(kind, directory)
        trainer = make_trainer(strategy, profiler=make(directory), max_epochs=1)
        before: Any = trainer.profiler
        for run in (trainer.fit, trainer.test):
            run(Profiles())
            assert trainer.profiler is before
        times = getattr(before, "recorded_durations", {}).get("a part")
        calls = None if times is None else len(times)
        found[name] = Profiled(sorted(vars(before)), before.local_rank, calls)
    return found


def test_a_profiler_of_the_users_works_and_stays_the_trainers(tmp_path: Path) -> None:
    """The profiler counts a part that the module profiles.

    After a run the Trainer still has this profiler.
    """
    ours, stock = on_both(profile_runs, tmp_path)
    assert ours == stock
    calls = {name: profiled.calls for name, profiled in ours[0].items()}
    assert calls == {"nothing": None, "times": 4, "default": None}


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda each: pickle.loads(pickle.dumps(each))}


def copy_fitted(kind: Kind, directory: Path) -> dict[str, Any]:
    """Return types and results of copies of a fitted Trainer and of its parts."""
    warnings.simplefilter("ignore")
    trainer = make_trainer(make_strategy(kind, directory))
    trainer.fit(Net())
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
    return values, trainer.current_epoch, trainer.global_step, weights(model)


def test_a_fitted_trainer_is_copied_and_pickled_as_with_stock(tmp_path: Path) -> None:
    """A copy of a Trainer tests and trains as a copy of stock's does.

    Its strategy, loops, model and loader can also be copied and pickled.
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
    """Loader, sampler, batch sampler and dataset have the attributes from before.

    Their classes are also those from before the run.
    """
    assert run_ranks(is_as_before, 2, tmp_path) == [[], []]


def made(**options: Any) -> OwnLoader:
    return OwnLoader(data(16), batch_size=2, shuffle=True, own="given", **options)


class Combined(Net):
    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step(batch["own"], index)


@dataclass
class Seen:
    """What user code sees of a loader."""

    type_name: str
    is_users: bool
    length: int
    attributes: set[str]


def seen(loader: Any) -> Seen:
    return Seen(type(loader).__name__, isinstance(loader, OwnLoader), len(loader), {*vars(loader)})


def fit_with(kind: Kind, directory: Path, do: Callable[[Any], None], is_injected: bool) -> int:
    """Train with ``do(loader)`` at the start; return the number of steps."""

    def begin(trainer: L.Trainer) -> None:
        assert isinstance(trainer.val_dataloaders, DataLoader)
        do(trainer.train_dataloader)

    start = At("on_train_start", begin)
    options = {"use_distributed_sampler": is_injected, "callbacks": [start], "max_epochs": 1}
    trainer = make_trainer(make_strategy(kind, directory), **options)
    trainer.fit(Net(), made())
    return trainer.global_step


def copy_loaders(kind: Kind, directory: Path, is_injected: bool) -> dict[str, Seen]:
    found: dict[str, Seen] = {}

    def copy_loader(loader: Any) -> None:
        found["itself"] = seen(loader)
        found["made again"] = seen(type(loader)(loader.dataset))
        found["copied"] = seen(copy.copy(loader))
        found["pickled"] = seen(pickle.loads(pickle.dumps(loader)))

    fit_with(kind, directory, copy_loader, is_injected)
    return found


INJECTED = pytest.mark.parametrize("is_injected", [True, False])


@INJECTED
def test_copies_of_a_loader_in_a_run_are_as_with_stock(is_injected: bool, tmp_path: Path) -> None:
    """A loader, and one that is copied, pickled or made again, have the user's class."""
    ours, stock = on_both(copy_loaders, tmp_path, is_injected)
    assert ours == stock


def write_to_loaders(kind: Kind, directory: Path, is_injected: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def write(loader: Any) -> None:
        copied = copy.copy(loader)
        found["before"] = loader.write("set")
        found["after"] = vars(loader)["own"]
        found["of the copy"] = copied.own

    fit_with(kind, directory, write, is_injected)
    return found


@INJECTED
def test_a_method_of_a_loader_writes_to_it(is_injected: bool, tmp_path: Path) -> None:
    """An attribute is set in the loader that users see, and not in its copy."""
    ours, stock = on_both(write_to_loaders, tmp_path, is_injected)
    assert ours == stock == [{"before": "given", "after": "set", "of the copy": "given"}] * 2


def enlarge_batches(kind: Kind, directory: Path, is_injected: bool) -> int:
    def enlarge(loader: Any) -> None:
        assert loader.batch_size == 2
        assert isinstance(loader.batch_sampler, BatchSampler)
        loader.batch_sampler.batch_size = 4

    return fit_with(kind, directory, enlarge, is_injected)


@INJECTED
def test_a_batch_size_that_users_set_applies(is_injected: bool, tmp_path: Path) -> None:
    """An epoch of 16 samples has batches of four, divided among ranks or not."""
    ours, stock = on_both(enlarge_batches, tmp_path, is_injected)
    assert ours == stock == [2 if is_injected else 4] * 2


def overfit_twice(kind: Kind, directory: Path) -> tuple[bool, bool]:
    """Return whether a combined loader's sampler divides samples after two runs, and
    whether it shuffles.
    """
    combined = CombinedLoader({"own": made()}, "max_size")
    for _ in range(2):
        trainer = make_trainer(make_strategy(kind, directory), max_epochs=1, overfit_batches=2)
        trainer.fit(Combined(), combined)
    sampler = combined.flattened[0].sampler
    return isinstance(sampler, DistributedSampler), sampler.shuffle


def test_overfitting_leaves_a_combined_loader_as_stock_does(tmp_path: Path) -> None:
    """Its sampler divides the samples and does not shuffle, also after a second run."""
    ours, stock = on_both(overfit_twice, tmp_path)
    assert ours == stock == [(True, False)] * 2


def fit_with_spawned_worker(kind: Kind, directory: Path) -> list[str]:
    """Return Lightning's hints at a worker that is started anew each epoch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(make_strategy(kind, directory), max_epochs=0)
        trainer.fit(Net(), made(num_workers=1, multiprocessing_context="spawn"))
    texts = [str(each.message) for each in caught]
    return [text for text in texts if "persistent_workers=True" in text]


def test_a_spawned_worker_causes_lightnings_hint(tmp_path: Path) -> None:
    """Rank 0 prints it.

    It is not compared with stock, which starts the workers.
    """
    first, second = on_ranks("ours", fit_with_spawned_worker, tmp_path)
    assert first
    assert not second
