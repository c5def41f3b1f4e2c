"""A resumed run equals one that never stopped, for generated combinations of factors.

A case chooses what is read, where a run stops, and on how many ranks it continues. On
the same number of ranks the resumed run must equal a whole run to the last bit, with
dropout if it stops between two optimiser steps. On another number the rest of the epoch
must be divided among the ranks. The epoch starts again with a stream, and if another
number of ranks cannot share its rest.

``make test`` plays a pairwise cover, ``make nightly`` cases of a new seed
(``SWEEP_SEED``, ``SWEEP_COUNT``).
"""

import functools
import itertools
import math
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils import data as torch_data
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext import DistributedBatchSamplerWrapper, ScalableDistributedSampler
from tests.harness import sweeps
from tests.integration import continuing
from tests.integration.continuing import Backwards, Run, Step

BATCH_SIZE = 2
# The samples of a loader, which 1, 2 or 3 ranks split evenly, and those of a stream,
# which each rank has for itself, by whether it is the shorter of two loaders.
SAMPLES = {False: 18, True: 12}
STREAMED = {False: 12, True: 8}
LIMIT = 4  # batches of an epoch

WITH_RANKS = ("scalable", "distributed", "dealt")  # samplers that divide by themselves
# Divided by the strategy's sampler.
INJECTED = ("shuffled", "sequential", "own", "weighted", "replacement")
STREAMS = ("stream", "sized")

# By the place where a run stops: the hook that stops it or saves a checkpoint.
HOOKS = {
    "middle": "on_train_batch_end",
    "last": "on_train_batch_end",
    "sigterm": "on_train_batch_end",
    "first": "on_train_batch_end",
    "end": "on_train_epoch_end",
    "validation": "on_validation_end",
    "sigval": "on_validation_batch_start",
    "max_steps": "on_train_end",
    "before": "on_train_batch_start",
}
SIGNALS = ("sigterm", "sigval")
ENDING = (*SIGNALS, "max_steps")  # stops that end the run; at the others it only saves
BETWEEN_EPOCHS = ("last", "end")


def levels(*names: str) -> Any:
    """Return the levels of a factor, the first of which is its default."""
    return field(default=names[0], metadata={"levels": names})


class Source(NamedTuple):
    """What a loader reads: data of a kind, in the longer loader or in the shorter one."""

    kind: str
    is_shorter: bool

    @property
    def samples(self) -> int:
        """The number of samples, on each rank if it is a stream."""
        return (STREAMED if self.kind in STREAMS else SAMPLES)[self.is_shorter]

    @property
    def first_sample(self) -> int:
        """The number of its first sample on rank 0."""
        return 100 if self.is_shorter else 0


@dataclass(frozen=True)
class Case:
    """One level of each factor.

    Set the variable ``SWEEP`` to its ``str`` to play it again.
    """

    sampler: str = levels(*INJECTED, *WITH_RANKS, "batches", *STREAMS, "stateful")
    stop: str = levels(*HOOKS)
    loaders: str = levels("one", "list", "dict", "min_size", "max_size", "max_size_cycle")
    beside: str = levels("same", "shuffled", "stream")  # what the second of two loaders reads
    # Before and after the first stop.
    ranks: str = levels("2", "1", "3", "1>2", "1>3", "2>1", "2>3", "3>1", "3>2")
    workers: str = levels("none", "fresh", "kept")
    again: str = levels("no", *HOOKS)  # where the resumed run stops, in the epoch after
    epoch: str = levels("0", "1")  # in which it stops
    optimizing: str = levels("each", "third", "manual")  # at which batches
    step: str = levels("batch", "dataloader_iter")  # what a training step takes
    limit: str = levels("none", "four")  # batches of an epoch
    made: str = levels("once", "each")  # the loaders
    looks: str = levels("no", "yes")  # a callback that reads a batch itself
    generator: str = levels("global", "own", "shared")
    injected: str = levels("yes", "no")  # Trainer(use_distributed_sampler=...)

    def __str__(self) -> str:
        chosen = [
            f"{factor}={level}"
            for factor, level in vars(self).items()
            if level != FACTORS[factor][0]
        ]
        return " ".join(chosen or [f"sampler={self.sampler}"])

    @staticmethod
    def parse(text: str) -> "Case":
        return Case(**dict(word.split("=") for word in text.split()))

    @property
    def is_valid(self) -> bool:
        """Whether it can be played, and each level makes a difference."""
        stops = {self.stop, self.again}
        kinds = {source.kind for source in self.sources}
        has_one_loader = self.loaders == "one"
        restarts_loader = self.loaders in ("list", "dict", "max_size_cycle")
        invalid = (
            has_one_loader and self.beside != "same",
            has_one_loader and self.generator == "shared",
            self.looks == "yes" and self.workers != "none",
            self.looks == "yes" and self.step != "batch",
            # A loader that begins again with the batch that was read has drawn numbers
            # for that already.
            "before" in stops and restarts_loader,
            # Lightning clears gradients one batch too late.
            self.optimizing == "third" and self.step != "batch",
            # A validation that is due after the last batch's save is skipped, so none
            # exist.
            "last" in stops and not stops.isdisjoint({"validation", "sigval"}),
            # Lightning begins to read new streams twice, and makes new loaders before it
            # restores numbers.
            self.made == "each" and not kinds.isdisjoint({"stream", "stateful"}),
            self.has_stream and self.again != "no",
            # What workers draw after a resume differs.
            "sized" in kinds and self.workers != "none",
            # torchdata also draws an order where workers start.
            self.workers == "kept" and self.injected == "no" and "stateful" in kinds,
            # torchdata draws the seed of its orders when the loader is made.
            "stateful" in kinds and self.injected == "no" and not stops.isdisjoint(BETWEEN_EPOCHS),
            # The epoch's last batch is not a step.
            "max_steps" in stops and self.optimizing == "third" and self.ends_unannounced,
            # On a busy machine the ranks may agree on a first stop after the second one.
            self.stop in SIGNALS and self.again == "max_steps",
            # On other ranks the number of steps is unknown, and with a limit the
            # remaining data are not all the rest.
            not self.keeps_ranks and (self.again == "max_steps" or self.limit != "none"),
        )
        return not any(invalid)

    @property
    def ranks_before(self) -> int:
        """The number of ranks until the first stop."""
        return int(self.ranks[0])

    @property
    def ranks_after(self) -> int:
        """The number of ranks from the first stop on."""
        return int(self.ranks[-1])

    @property
    def keeps_ranks(self) -> bool:
        """Whether the run continues on the same number of ranks."""
        return self.ranks_before == self.ranks_after

    @property
    def sources(self) -> list[Source]:
        """What the loaders read, the longer loader first."""
        second = self.sampler if self.beside == "same" else self.beside
        sources = [Source(self.sampler, is_shorter=False), Source(second, is_shorter=True)]
        return sources[:1] if self.loaders == "one" else sources

    @property
    def has_stream(self) -> bool:
        return any(source.kind in STREAMS for source in self.sources)

    @property
    def starts_again(self) -> bool:
        """Whether the epoch of the first stop starts again."""
        is_within = self.stop not in BETWEEN_EPOCHS
        return is_within and (self.has_stream or not (self.keeps_ranks or self.can_be_shared))

    @property
    def repeats_random_numbers(self) -> bool:
        """Whether each checkpoint is saved between two optimiser steps, and not repeated."""
        is_in_step = self.optimizing == "third" or "before" in (self.stop, self.again)
        return not (is_in_step or self.starts_again)

    @property
    def ends_unannounced(self) -> bool:
        """Whether Lightning detects an epoch's end only when it requests another batch."""
        has_stream = any(source.kind == "stream" for source in self.sources)
        return has_stream and (self.loaders == "min_size" or self.step == "dataloader_iter")

    @property
    def epochs(self) -> int:
        return int(self.epoch) + (2 if self.again == "no" else 3)

    @property
    def accumulated(self) -> int:
        return 3 if self.optimizing == "third" else 1

    @property
    def can_be_shared(self) -> bool:
        """Whether another number of ranks can share the rest of an epoch."""
        by_strategy = (*INJECTED, "batches") if self.injected == "yes" else ()
        return all(source.kind in ("scalable", "dealt", *by_strategy) for source in self.sources)

    def batches(self, source: Source, ranks: int) -> int:
        """Return the number of batches in an epoch on each rank."""
        is_divided = self.injected == "yes" or source.kind in WITH_RANKS
        is_own = source.kind in STREAMS or not is_divided
        return math.ceil(source.samples / BATCH_SIZE / (1 if is_own else ranks))

    def length(self, ranks: int) -> int:
        """Return the number of steps in an epoch."""
        lengths = [self.batches(source, ranks) for source in self.sources]
        length = min(lengths) if self.loaders == "min_size" else max(lengths)
        return length if self.limit == "none" else min(length, LIMIT)

    def index(self, stop: str, ranks: int) -> int:
        """Return the batch of the epoch after which a run stops.

        Validations are due after each second batch, but not after "first" and "middle".
        """
        length = self.length(ranks)
        indices = {
            "first": 0,
            "validation": 1,
            "sigval": 1,
            "max_steps": min(self.accumulated, length) - 1,
            "last": length - 1,
            "end": length - 1,
        }
        # The other stops are after an even index, where no validation is due.
        return indices.get(stop, min(4, (length - 2) // 2 * 2))


FACTORS: dict[str, tuple[str, ...]] = {
    factor.name: factor.metadata["levels"] for factor in fields(Case)
}


# What is read.


class Own(torch_data.Sampler[int]):
    """A sampler of the user's own that draws from NumPy."""

    def __init__(self, samples: int, seed: int | None) -> None:
        self.samples = samples
        self.numpy = np.random if seed is None else np.random.default_rng(seed)

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        return iter(self.numpy.permutation(self.samples).tolist())


class Sized(continuing.Stream):
    """A stream with a length, whose workers draw the orders of their parts."""

    def __len__(self) -> int:
        return len(self.numbers)

    def order(self, length: int) -> list[int]:
        return torch.randperm(length).tolist()


def options_of(
    kind: str, data: list[Tensor], generator: torch.Generator | None, rank: int, ranks: int
) -> dict[str, Any]:
    """Return the options of a loader with a kind of sampler."""
    count = len(data)
    seed = None if generator is None else generator.initial_seed()
    weights = [*range(1, count + 1)]
    draw = partial(RandomSampler, data, generator=generator)
    weighted = torch_data.WeightedRandomSampler(weights, count, generator=generator)
    dealt = DistributedBatchSamplerWrapper(BatchSampler(draw(), BATCH_SIZE, False))
    samplers: dict[str, Any] = {
        "sequential": None,
        "own": Own(count, seed),
        "weighted": weighted,
        "replacement": draw(replacement=True, num_samples=count),
        "scalable": ScalableDistributedSampler(data, seed=1),
        "distributed": torch_data.DistributedSampler(data, ranks, rank, seed=1),
    }
    batch_samplers = {"batches": Backwards(draw(), BATCH_SIZE, False), "dealt": dealt}
    if kind in batch_samplers:
        return {"batch_sampler": batch_samplers[kind]}
    if kind in samplers:
        return {"batch_size": BATCH_SIZE, "sampler": samplers[kind]}
    return {"batch_size": BATCH_SIZE, "shuffle": True}


def loaders_of(case: Case, rank: int, ranks: int) -> Any:
    """Return the module's ``train_dataloader``."""
    shared = torch.Generator().manual_seed(rank)
    loaders = []
    for number, source in enumerate(case.sources):
        own = torch.Generator().manual_seed(10 * (number + 1) + rank)
        generator = {"global": None, "shared": shared, "own": own}[case.generator]
        loaders.append(loader_of(case, source, rank, ranks, generator))
    if case.loaders in ("one", "list", "dict"):
        return {"one": loaders[0], "list": loaders, "dict": dict(enumerate(loaders))}[case.loaders]
    return CombinedLoader(loaders, case.loaders)


def loader_of(
    case: Case, source: Source, rank: int, ranks: int, generator: torch.Generator | None
) -> Any:
    """Return a loader with batches of two samples."""
    options: dict[str, Any] = {"generator": generator}
    if case.workers != "none":
        options |= continuing.workers(1 if source.is_shorter else 2)
        options["persistent_workers"] = case.workers == "kept"
    first = source.first_sample
    if source.kind in STREAMS:
        kind = continuing.Stream if source.kind == "stream" else Sized
        return DataLoader(kind(source.samples, rank, first), BATCH_SIZE, **options)
    data: Any = [torch.tensor([float(first + place)]) for place in range(source.samples)]
    options |= options_of(source.kind, data, generator, rank, ranks)
    return (StatefulDataLoader if source.kind == "stateful" else DataLoader)(data, **options)


# What is trained.


class Swept(continuing.Net):
    """Takes batches of a dict of loaders.

    It may optimise manually, and have a scheduler that needs a value.
    """

    def __init__(
        self, *args: Any, is_manual: bool = False, has_plateau: bool = False, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = not is_manual
        self.has_plateau = has_plateau

    def training_step(self, batch: Any, index: int) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        loss = super().training_step(parts, index)
        if not self.automatic_optimization:
            self.optimize(loss)
        return loss

    def optimize(self, loss: Tensor) -> None:
        optimizer = self.optimizers()
        scheduler, *_ = self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        scheduler.step()

    def configure_optimizers(self) -> Any:
        [optimizer], schedulers = super().configure_optimizers()
        if self.has_plateau:
            plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            schedulers.append({"scheduler": plateau, "monitor": "epoch"})
        return [optimizer], schedulers


class Iterating(Swept):
    """Fetches its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:
        ready = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return super().training_step(next(dataloader_iter)[0], ready - 1)


def module_of(case: Case) -> Any:
    """Return a function that makes the module from its loaders."""
    module = Swept if case.step == "batch" else Iterating
    # As with Lightning, a run that is resumed at an epoch's end does not update then.
    has_plateau = {case.stop, case.again} <= {"no", "first", "middle", "before"}
    return partial(
        module,
        dropout=0.5 if case.repeats_random_numbers else 0.0,
        is_manual=case.optimizing == "manual",
        has_plateau=has_plateau,
    )


def training_of(case: Case, rank: int, ranks: int, place: Path) -> continuing.Training:
    options: dict[str, Any] = {
        "max_epochs": case.epochs,
        "limit_train_batches": 1.0 if case.limit == "none" else LIMIT,
        "accumulate_grad_batches": case.accumulated,
        "use_distributed_sampler": case.injected == "yes",
        "reload_dataloaders_every_n_epochs": int(case.made == "each"),
        "callbacks": [Looks()] if case.looks == "yes" else [],
        "model": module_of(case),
    }
    if "last" not in (case.stop, case.again):
        options |= {"limit_val_batches": 2, "val_check_interval": 2}
    strategy: dict[str, Any] = {}
    if ranks == 3:
        # DDP would rebuild its buckets after the first step, and three ranks would then
        # add up in another order.
        strategy["find_unused_parameters"] = True
    loaders = partial(loaders_of, case, rank, ranks)
    return continuing.Training(loaders, place.parent, ranks, options, strategy, name=place.name)


# Where it stops.


class Looks(L.Callback):
    """Reads a batch of each loader before each step."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        for loader in tree_leaves(trainer.train_dataloader):
            next(iter(loader))


class After(L.Callback):
    """Calls ``do(trainer)`` once in a hook, after a batch and before the next one.

    The batch is given by its epoch and number.
    """

    def __init__(
        self, hook: str, batch: tuple[int, int], do: Callable[[L.Trainer], object]
    ) -> None:
        self.batch = batch
        self.do = do
        self.is_done = False
        setattr(self, hook, self.call)

    def call(self, trainer: Any, *_: Any, **__: Any) -> None:
        steps = trainer.lightning_module.steps
        if steps and steps[-1].moment == self.batch and not self.is_done:
            self.is_done = True
            self.do(trainer)


class Stopped(NamedTuple):
    """A run to a stop, or past one that only saves.

    Attributes:
        path: the checkpoint of the stop.
        done: the number of steps of the run until the stop.
    """

    run: Run
    path: str
    done: int


def run_to(
    stop: str, epoch: int, case: Case, training: continuing.Training, ckpt_path: str | None = None
) -> Stopped:
    """Train to a stop in an epoch, from the beginning or from a checkpoint."""
    ranks = training.devices
    place = training.directory / training.name / f"{stop}-{epoch}"
    batch = (epoch, case.index(stop, ranks))
    options = dict[str, Any]()
    if stop in SIGNALS:
        path = ""
        options["default_root_dir"] = place
        is_signalled = int(os.environ["RANK"]) == epoch % ranks  # any rank will do
        stopping = After(HOOKS[stop], batch, lambda _: os.kill(os.getpid(), signal.SIGTERM))
        callbacks = [stopping] if is_signalled else []
    else:
        path = str(place / "save.ckpt")
        callbacks = [After(HOOKS[stop], batch, lambda trainer: trainer.save_checkpoint(path))]
    if stop == "max_steps":
        options["max_steps"] = epoch * math.ceil(case.length(ranks) / case.accumulated) + 1
    options["callbacks"] = [*callbacks, *training.options["callbacks"]]
    run = training.run(ckpt_path=ckpt_path, **options)
    path = path or str(next(place.rglob("last-preempted.ckpt"), ""))
    until_batch = [step for step in run.steps if step.moment <= batch]
    return Stopped(run, path, len(run.steps if stop in ENDING else until_batch))


# Playing a case. A rank that finds a fault continues, like the others.


@dataclass
class Played:
    """A rank's results of a case, until its first stop or after it on other ranks.

    Attributes:
        fault: what this rank has found to be wrong.
        path: the checkpoint of the stop.
        whole: the steps of a run without a stop.
        steps: those of them until the stop, or those after it, without the steps before
            the stop that are repeated after it.
    """

    fault: str = ""
    path: str = ""
    whole: list[Step] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


def joined(*faults: str) -> str:
    return "; ".join(filter(None, faults))


def play_to_stop(case: Case, rank: int, ranks: int, place: Path) -> Played:
    """Play a case until its first stop, and on the same ranks to its end."""
    training = training_of(case, rank, ranks, place)
    stopped = run_to(case.stop, int(case.epoch), case, training)
    whole = training.run() if case.stop in ENDING else stopped.run
    fault = fault_before_stop(case, whole, stopped.run, case.length(ranks))
    if case.keeps_ranks:
        resumed, fault_again = resume(case, training, stopped.path)
        difference = (
            fault_in_repeated_epoch(case, whole, stopped, resumed)
            if case.starts_again
            else continuing.difference(training, whole, stopped.done, resumed)
        )
        fault = joined(fault, difference, fault_again)
    # Steps that no optimiser step followed are repeated.
    repeated = stopped.done % case.length(ranks) % case.accumulated
    before = whole.steps[: stopped.done - repeated]
    return Played(fault, path=stopped.path, whole=whole.steps, steps=before)


def play_rest(resumption: tuple[Case, str], rank: int, ranks: int, place: Path) -> Played:
    """Play a case from the checkpoint of its first stop, which other ranks have saved."""
    case, path = resumption
    training = training_of(case, rank, ranks, place)
    whole = training.run()
    resumed, fault = resume(case, training, path)
    fault = joined(fault, fault_at_end(case, whole, resumed))
    return Played(fault, whole=whole.steps, steps=resumed.steps)


def fault_before_stop(case: Case, whole: Run, stopped: Run, length: int) -> str:
    is_same = stopped.steps == whole.steps[: len(stopped.steps)]
    if is_same and len(whole.steps) == case.epochs * length:
        return ""
    return f"reads {stopped.steps} before the stop, in epochs of {length} steps: {whole.steps}"


def fault_in_repeated_epoch(case: Case, whole: Run, stopped: Stopped, resumed: Run) -> str:
    """Compare the steps of a run in which the epoch of the stop starts again."""
    last = whole.steps[stopped.done - 1]
    is_complete = last.batch == case.length(case.ranks_before) - 1  # the ranks stopped later
    epoch = last.epoch + 1 if is_complete else last.epoch
    expected = [step for step in whole.steps if step.epoch >= epoch]
    steps = resumed.steps
    if any(source.kind == "sized" for source in case.sources):  # draws another order
        expected, steps = ([step.moment for step in each] for each in (expected, steps))
    return "" if steps == expected else f"reads {steps} instead of {expected}"


def fault_at_end(case: Case, whole: Run, resumed: Run) -> str:
    """Compare the events of the last epoch."""
    events = events_of_last_epoch(resumed)
    expected = events_of_last_epoch(whole)
    if case.again in SIGNALS and len(events) < len(expected):
        # On a busy machine the ranks may agree on a later stop, also in the last epoch.
        expected = expected[len(expected) - len(events) :]
    return "" if events == expected else f"ends with {events} instead of {expected}"


def events_of_last_epoch(run: Run) -> list[str]:
    """Return the events of the last epoch, or of the part of it that is in this run."""
    names = [event.what for event in run.events]
    ends = [-1, *(place for place, name in enumerate(names) if name == "epoch end")]
    begin = ends[-2:][0] + 1
    return names[begin:]


def resume(case: Case, training: continuing.Training, path: str) -> tuple[Run, str]:
    """Train from a checkpoint to the end, and return the run and its faults.

    If the case has a second stop, join the two runs around it into one.
    """
    if case.again == "no":
        return training.run(ckpt_path=path), ""
    epoch = int(case.epoch) + 1
    stopped = run_to(case.again, epoch, case, training, path)
    second = stopped.run
    due = (epoch, case.index(case.again, training.devices))
    if case.stop in SIGNALS and second.steps and second.steps[0].moment > due:
        return second, ""  # on a busy machine the ranks had agreed on a first stop after this one
    third = training.run(ckpt_path=stopped.path)
    if case.again not in ENDING:
        difference = continuing.difference(training, second, stopped.done, third)
        return second, difference and f"resumed again {difference}"
    steps = second.steps
    if third.steps:
        begin = third.steps[0].moment
        steps = [*(step for step in second.steps if step.moment < begin), *third.steps]
    is_same = steps[: len(second.steps)] == second.steps
    fault = "" if is_same else f"resumed again reads {third.steps} after {second.steps}"
    return replace(third, steps=steps), fault


# Judging what other ranks have played.


def judge(case: Case, firsts: list[Played], seconds: list[Played]) -> str:
    """Describe the faults of a case; return an empty string if there are none.

    Args:
        case: the case.
        firsts: the results until the first stop, by rank.
        seconds: the results after it, by rank; empty on the same number of ranks.
    """
    faults = [played.fault for played in (*firsts, *seconds)]
    if any(faults) or not seconds:
        return joined(*faults)
    epoch, done = divmod(len(firsts[0].steps), case.length(case.ranks_before))
    if not done or case.starts_again:
        return fault_in_epochs_from(epoch, case, seconds)
    rest = fault_in_rest(case, epoch, firsts, seconds)
    return joined(fault_in_epochs_from(epoch + 1, case, seconds), rest)


def fault_in_epochs_from(epoch: int, case: Case, seconds: list[Played]) -> str:
    """Compare whole epochs of the new ranks: their steps, and their samples if known."""
    for played in seconds:
        later = [step for step in played.steps if step.epoch >= epoch]
        expected = [step for step in played.whole if step.epoch >= epoch]
        is_same = [step.moment for step in later] == [step.moment for step in expected]
        if not is_same or (case.can_be_shared and later != expected):
            return f"reads {later} in later epochs instead of {expected}"
    return ""


def fault_in_rest(case: Case, epoch: int, firsts: list[Played], seconds: list[Played]) -> str:
    """Check that an epoch's rest has each sample of the loader that ends it."""
    source = case.sources[1 if case.loaders == "min_size" else 0]
    own_samples = range(source.first_sample, source.first_sample + source.samples)

    def count(steps_by_rank: Iterable[list[Step]]) -> Counter[int]:
        steps = [step for steps in steps_by_rank for step in steps if step.epoch == epoch]
        samples = continuing.samples_of(steps)
        return Counter(sample for sample in samples if sample in own_samples)

    whole = count(played.whole for played in firsts)
    read = count(played.steps for played in (*firsts, *seconds))
    repeated = case.ranks_after - 1
    if source.kind in ("dealt", "batches"):
        # Pads by batches, and already on two ranks, which share nine of them.
        whole = Counter(set(whole))
        repeated = BATCH_SIZE * case.ranks_after
    if whole - read or (read - whole).total() > repeated:
        return f"leaves out {sorted(whole - read)} and reads {sorted(read - whole)} twice"
    steps = {len(played.steps) for played in seconds}
    return "" if len(steps) == 1 else f"the ranks have different numbers of steps: {steps}"


# Choosing cases.

# Levels that the daily cover leaves to the nightly sweep: they take long, or do nearly
# what others do.
NIGHTLY = {"dict", "max_size", "max_size_cycle", "first", "validation", "3", "fresh", "shared"}
FAMILIES = {
    **dict.fromkeys(INJECTED, "injected"),
    **dict.fromkeys(WITH_RANKS, "with ranks"),
    **dict.fromkeys(STREAMS, "stream"),
}
# What the nightly sweep found, and no pair of levels shows.
FOUND = (
    "stop=before ranks=1 workers=fresh epoch=1 generator=own injected=no",
    (
        "sampler=sized loaders=list beside=shuffled ranks=1 workers=fresh optimizing=third"
        " generator=own injected=no"
    ),
    "sampler=batches stop=end epoch=1 made=each generator=own injected=no",
)
REPEAT = "SWEEP='{}' .venv/bin/python -m pytest tests/integration/test_resume_sweep.py -k equals"
DRAWS = 10_000


def draw_cases(chance: random.Random, draws: Iterable[object]) -> Iterator[Case]:
    """Draw a level of each factor for each of ``draws``; yield the valid cases."""
    for _ in draws:
        case = Case(**{factor: chance.choice(levels) for factor, levels in FACTORS.items()})
        if case.is_valid:
            yield case


def group_of(case: Case) -> str:
    """Return the test that plays the case in the daily cover."""
    return case.ranks if case.ranks in ("1", "2") else "other"


def pairs_of(case: Case) -> set[frozenset[tuple[str, str]]]:
    """Return the pairs of levels that a case tries.

    On other ranks, where less is compared, these are only the pairs with that level.
    Samplers of one family are the same to all factors but the ranks, which divide what
    they yield.
    """
    ranks = ("ranks", group_of(case))
    levels = {
        **vars(case),
        "ranks": group_of(case),
        "again": str(case.again != "no"),
        "sampler": FAMILIES.get(case.sampler, case.sampler),
    }
    tried = set(levels.items())
    if case.again != "no":
        tried.add(("stop", case.again))
    pairs = {frozenset(pair) for pair in itertools.combinations(tried, 2)}
    pairs.add(frozenset({("sampler", case.sampler), ranks}))
    return pairs if case.keeps_ranks else {pair for pair in pairs if ranks in pair}


def is_quick(case: Case) -> bool:
    """Whether the daily cover may contain the case."""
    if not NIGHTLY.isdisjoint(vars(case).values()):
        return False
    # Torch waits for seconds for workers whose iterator is garbage, as those of a step
    # that takes an iterator are.
    has_few_workers = len(case.sources) * case.ranks_before < 3 and case.again == "no"
    return case.workers == "none" or (has_few_workers and case.step == "batch")


def cost_of(case: Case) -> float:
    """Return a measure of how long a case takes."""
    return (case.epochs + (case.stop in ENDING) + 4) * (case.ranks_before + case.ranks_after + 2)


@functools.cache
def pairwise_cover() -> list[Case]:
    """Return cases that together try each pair of levels, found greedily."""
    pool = filter(is_quick, draw_cases(random.Random(0), range(DRAWS)))
    return sweeps.greedy_cover({case: pairs_of(case) for case in pool}, cost_of)


def play(cases: Sequence[Case], directory: Path) -> dict[Case, str]:
    """Run cases, many to a process; return the faults by case."""
    firsts = results_of(play_to_stop, cases, lambda case: case.ranks_before, directory)
    moved = [case for case in cases if not case.keeps_ranks and firsts[case][0].path]
    resumptions = [(case, firsts[case][0].path) for case in moved]
    later = directory / "after"
    seconds = results_of(
        play_rest, resumptions, lambda resumption: resumption[0].ranks_after, later
    )
    by_case = {case: results for (case, _), results in seconds.items()}
    faults = {case: judge(case, firsts[case], by_case.get(case, [])) for case in cases}
    return {case: fault for case, fault in faults.items() if fault}


def results_of(
    function: Any, cases: Sequence[Any], ranks_of: Callable[[Any], int], directory: Path
) -> dict[Any, list[Played]]:
    """Return each rank's results, or one with the story of ranks that ended early."""
    results = sweeps.play_cases(function, cases, ranks_of, directory)
    return {
        case: [Played(result)] if isinstance(result, str) else result
        for case, result in results.items()
    }


@pytest.mark.parametrize("group", ["1", "2", "other"])
def test_a_run_that_is_resumed_equals_one_that_is_not(group: str, tmp_path: Path) -> None:
    """Batches and weights are the same to the last bit, for each pair of levels."""
    cases = sweeps.chosen_cases(Case.parse, [*map(Case.parse, FOUND), *pairwise_cover()])
    chosen = [case for case in cases if group_of(case) == group]
    sweeps.expect_nothing_wrong(play(chosen, tmp_path), REPEAT)


@pytest.mark.nightly
@pytest.mark.timeout(0)  # SWEEP_COUNT says how long it takes
def test_runs_of_a_new_seed_do_so_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cases are drawn from all levels of all factors."""
    seed, count = sweeps.new_seed(capsys, 60)
    drawn = draw_cases(random.Random(seed), itertools.count())
    cases = [*dict.fromkeys(itertools.islice(drawn, count))]
    sweeps.expect_nothing_wrong(play(cases, tmp_path), REPEAT)
