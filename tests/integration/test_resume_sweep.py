"""A resumed run equals one that never stopped, for generated combinations of data,
stops and resumes.

``make test`` plays a pairwise cover, ``make nightly`` cases of a new seed
(``SWEEP_SEED``, ``SWEEP_COUNT``).
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils import data as torch_data
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext import DistributedBatchSamplerWrapper, ScalableDistributedSampler
from lightning_ddp_ext.errors import RankFailedError, ResumeError
from tests.harness import sweeps
from tests.integration import continuing
from tests.integration.reading import Backwards

# samples, which 1, 2 or 3 ranks split evenly
LONG = 18
SHORT = 12
OF_STREAM = {LONG: 12, SHORT: 8}  # samples of each rank
WITH_RANKS = ("scalable", "distributed", "dealt")  # share out by themselves
# Are shared out by the strategy's sampler.
INJECTED = (
    "shuffled",
    "sequential",
    "own",
    "weighted",
    "replacement",
    "option",  # of the strategy: sampler="scalable"
)
HOOKS = {
    **dict.fromkeys(("middle", "last", "sigterm", "first"), "on_train_batch_end"),
    **dict(
        end="on_train_epoch_end", validation="on_validation_end", sigval="on_validation_batch_start"
    ),
    "max_steps": "on_train_end",
    "before": "on_train_batch_start",
}
SIGNALS = ("sigterm", "sigval")
ENDING = (*SIGNALS, "max_steps")  # stops that end the run


def levels(*names: str) -> Any:
    """Return the levels of a factor, the first of which is its default."""
    return field(default=names[0], metadata={"levels": names})


@dataclass(frozen=True)
class Case:
    """One level of each factor.

    Set the variable ``SWEEP`` to its ``str`` to play it again.
    """

    sampler: str = levels(*INJECTED, *WITH_RANKS, "batches", "stream", "sized", "stateful")
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
    def parse(text: str) -> Case:
        return Case(**dict(word.split("=") for word in text.split()))

    @property
    def is_valid(self) -> bool:
        """Whether it can be played, and each level makes a difference."""
        if self.loaders == "one" and (self.beside != "same" or self.generator == "shared"):
            return False
        if self.looks == "yes" and (self.workers != "none" or self.step != "batch"):
            return False
        if "before" in (self.stop, self.again) and self.loaders in (
            "list",
            "dict",
            "max_size_cycle",
        ):
            # a loader that begins again with the batch that was read has drawn numbers
            # for that already
            return False
        if self.optimizing == "third" and self.step != "batch":
            return False  # Lightning clears gradients one batch too late
        if "last" in (self.stop, self.again) and {"validation", "sigval"} & {self.stop, self.again}:
            # a validation that is due after the last batch's save is skipped, so none
            # exist
            return False
        if self.made == "each" and {"stream", "stateful"} & {*self.kinds}:
            # Lightning begins to read new streams twice, and makes new loaders before
            # it restores numbers
            return False
        if "option" in self.kinds and self.injected == "no":
            return False
        if self.workers == "kept" and self.injected == "no" and "stateful" in self.kinds:
            return False  # torchdata also draws an order where workers start
        if (
            "max_steps" in (self.stop, self.again)
            and self.optimizing == "third"
            and self.ends_unannounced
        ):
            return False  # the epoch's last batch is not a step then
        # Otherwise the number of steps is unknown, and the remaining data are not all
        # the rest.
        return self.stays or (self.again != "max_steps" and self.limit == "none")

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of ranks until the first stop, and from then on."""
        return int(self.ranks[0]), int(self.ranks[-1])

    @property
    def stays(self) -> bool:
        """Whether the run continues on the same number of ranks."""
        return len(self.ranks) == 1

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of data of the loaders, the longer loader first."""
        second = self.sampler if self.beside == "same" else self.beside
        return (self.sampler,) if self.loaders == "one" else (self.sampler, second)

    @property
    def draws(self) -> bool:
        """Whether an order is drawn."""
        return not {*self.kinds} <= {"sequential", *WITH_RANKS, "stream"}

    @property
    def ends_unannounced(self) -> bool:
        """Whether Lightning detects the end of an epoch only when it requests another
        batch.
        """
        return "stream" in self.kinds and (
            self.loaders == "min_size" or self.step == "dataloader_iter"
        )

    @property
    def epochs(self) -> int:
        return int(self.epoch) + (2 if self.again == "no" else 3)

    @property
    def accumulated(self) -> int:
        return 3 if self.optimizing == "third" else 1

    def can_share(self, kind: str) -> bool:
        """Whether another number of ranks can share the rest of an epoch."""
        return kind in ("scalable", "dealt") or (kind in INJECTED and self.injected == "yes")

    def batches(self, kind: str, samples: int, ranks: int) -> int:
        """Return the number of batches in an epoch on each rank."""
        if kind == "dealt":
            return -(-samples // 2 // ranks)
        if kind in ("stream", "sized"):
            return OF_STREAM[samples] // 2
        return -(-samples // (2 * ranks if self.injected == "yes" or kind in WITH_RANKS else 2))

    def length(self, ranks: int) -> int:
        """Return the number of steps in an epoch."""
        lengths = [
            self.batches(kind, size, ranks)
            for kind, size in zip(self.kinds, (LONG, SHORT), strict=False)
        ]
        length = min(lengths) if self.loaders == "min_size" else max(lengths)
        return length if self.limit == "none" else min(length, 4)

    def index(self, stop: str, ranks: int) -> int:
        """Return the batch of the epoch after which a run stops; no validation is due
        after "first" and "middle".
        """
        length = self.length(ranks)
        others = {
            "validation": 1,
            "sigval": 1,
            "max_steps": min(self.accumulated, length) - 1,
            "first": 0,
        }
        return (
            length - 1
            if stop in ("last", "end")
            else others.get(stop, min(4, (length - 2) // 2 * 2))
        )


FACTORS: dict[str, tuple[str, ...]] = {each.name: each.metadata["levels"] for each in fields(Case)}


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


class Sized(torch_data.IterableDataset[Tensor]):
    """Numbers that the workers of a rank split; each worker draws an order for its
    part.
    """

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        own = self.numbers if worker is None else self.numbers[worker.id :: worker.num_workers]
        return (torch.tensor([float(own[place])]) for place in self.order(len(own)))

    def order(self, length: int) -> Any:
        return torch.randperm(length)


class Stream(Sized):
    """The same numbers in another order in each epoch."""

    __len__ = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self, length: int) -> Any:
        return ((place + self.epoch) % length for place in range(length))


def loaders_of(case: Case, rank: int, ranks: int) -> Any:
    """Return the module's ``train_dataloader``."""
    shared = torch.Generator().manual_seed(rank)
    made = []
    for number, (kind, samples) in enumerate(zip(case.kinds, (LONG, SHORT), strict=False)):
        own = torch.Generator().manual_seed(10 * (number + 1) + rank)
        generator = {"global": None, "shared": shared, "own": own}[case.generator]
        made.append(loader_of(case, kind, samples, number, rank, ranks, generator))
    if case.loaders in ("one", "list", "dict"):
        return {"one": made[0], "list": made, "dict": dict(enumerate(made))}[case.loaders]
    return CombinedLoader(made, case.loaders)


def loader_of(
    case: Case, kind: str, samples: int, number: int, rank: int, ranks: int, generator: Any
) -> Any:
    """Return a loader with batches of two samples, numbered from 0 or 100; a stream
    adds 1000 times the rank.
    """
    options: dict[str, Any] = {"generator": generator}
    if case.workers != "none":
        options |= {"num_workers": 2 - number, "multiprocessing_context": "fork"}
        options["persistent_workers"] = case.workers == "kept"
    if kind in ("stream", "sized"):
        numbers = range(100 * number + 1000 * rank, 100 * number + 1000 * rank + OF_STREAM[samples])
        return DataLoader(Stream(numbers) if kind == "stream" else Sized(numbers), 2, **options)
    data: Any = [
        torch.tensor([float(sample)]) for sample in range(100 * number, 100 * number + samples)
    ]
    drawn = partial(RandomSampler, data, generator=generator)
    weights = [*range(1, samples + 1)]
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "sequential": dict,
        "own": lambda: {"sampler": Own(samples, generator and generator.initial_seed())},
        "weighted": lambda: {
            "sampler": torch_data.WeightedRandomSampler(weights, samples, generator=generator)
        },
        "replacement": lambda: {"sampler": drawn(replacement=True, num_samples=samples)},
        "scalable": lambda: {"sampler": ScalableDistributedSampler(data, seed=1)},
        "distributed": lambda: {
            "sampler": torch_data.DistributedSampler(data, ranks, rank, seed=1)
        },
        "batches": lambda: {"batch_sampler": Backwards(drawn(), 2, False)},
        "dealt": lambda: {
            "batch_sampler": DistributedBatchSamplerWrapper(BatchSampler(drawn(), 2, False))
        },
    }
    options |= ways[kind]() if kind in ways else {"shuffle": True}
    options |= {} if "batch_sampler" in options else {"batch_size": 2}
    return (StatefulDataLoader if kind == "stateful" else DataLoader)(data, **options)


# What is trained.


class Swept(continuing.Net):
    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step(
            list(batch.values()) if isinstance(batch, dict) else batch, index
        )


class Manual(Swept):
    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        optimizer = self.optimizers()
        schedulers = self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        for each in (optimizer, schedulers[0]):
            each.step()
        return loss


class Iterating(Swept):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        ready = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return super().training_step(next(dataloader_iter)[0], ready - 1)


class IteratingManual(Iterating, Manual): ...


KINDS = {"batch": (Swept, Manual), "dataloader_iter": (Iterating, IteratingManual)}


def training_of(case: Case, rank: int, ranks: int, place: Path) -> continuing.Training:
    options: dict[str, Any] = {
        "max_epochs": case.epochs,
        "limit_train_batches": 1.0 if case.limit == "none" else 4,
        # Resumed at an epoch's end, a run leaves out what is updated then: as with
        # Lightning.
        "plateau": {case.stop, case.again} <= {"no", "first", "middle", "before"},
        "accumulate_grad_batches": case.accumulated,
        "use_distributed_sampler": case.injected == "yes",
        "reload_dataloaders_every_n_epochs": int(case.made == "each"),
        "callbacks": [Looks()] if case.looks == "yes" else [],
        "validation": continuing.KEPT if case.workers == "kept" else {},
        "model": KINDS[case.step][case.optimizing == "manual"],
        **(
            {}
            if "last" in (case.stop, case.again)
            else {"limit_val_batches": 2, "val_check_interval": 2}
        ),
    }
    # DDP rebuilds its buckets after the first step otherwise, and three ranks then add
    # up in another order.
    strategy: dict[str, Any] = {"find_unused_parameters": True} if ranks == 3 else {}
    if "option" in case.kinds:
        strategy["sampler"] = "scalable"
    return continuing.Training(
        lambda: loaders_of(case, rank, ranks),
        place.parent,
        ranks,
        options,
        strategy,
        name=place.name,
    )


# Where it stops.


class Looks(L.Callback):
    """Looks at a batch of each loader before each step."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        for loader in tree_leaves(trainer.train_dataloader):
            next(iter(loader))


class After(L.Callback):
    """Calls ``do(trainer)`` in a hook, after this batch of this epoch and before the
    next one.
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


def run_to(
    stop: str, epoch: int, case: Case, training: continuing.Training, ckpt_path: str | None = None
) -> tuple[continuing.Run, str, int]:
    """Train to a stop, or past one that only saves; return the run, its checkpoint, and
    its steps until then.
    """
    ranks = training.devices
    options = dict[str, Any]()
    place = training.directory / training.name / f"{stop}-{epoch}"
    batch = (epoch, case.index(stop, ranks))
    path = str(place / ("last-preempted.ckpt" if stop in SIGNALS else "save.ckpt"))
    callbacks = [After(HOOKS[stop], batch, lambda trainer: trainer.save_checkpoint(path))]
    if stop == "max_steps":
        options["max_steps"] = epoch * -(-case.length(ranks) // case.accumulated) + 1
    if stop in SIGNALS:
        options["default_root_dir"] = place
        kill = After(HOOKS[stop], batch, lambda trainer: os.kill(os.getpid(), signal.SIGTERM))
        callbacks = [kill] if int(os.environ["RANK"]) == epoch % ranks else []
    callbacks += training.options["callbacks"]
    run = training.run(callbacks=callbacks, ckpt_path=ckpt_path, **options)
    return (
        run,
        path,
        len(run.steps) if stop in ENDING else sum(step.moment <= batch for step in run.steps),
    )


# Playing a case. A rank that finds something wrong continues, like the others.

# A case, and a checkpoint of other ranks from which these ranks resume.
Half = tuple[Case, "str | None"]


@dataclass
class Played:
    """A rank's results of a case, or of one half on other ranks; ``before`` leaves out
    steps that are repeated.
    """

    wrong: str = ""
    refused: str = ""
    path: str = ""
    whole: list[continuing.Step] = field(default_factory=list)  # without a stop
    before: list[continuing.Step] = field(default_factory=list)
    after: list[continuing.Step] = field(default_factory=list)


LATER_THAN_ANY = (99, 0)  # epoch and batch


def resume(case: Case, training: continuing.Training, path: str) -> tuple[continuing.Run, str]:
    """Train from a checkpoint to the end; join the two runs around a second stop into
    one.
    """
    if case.again == "no":
        return training.run(ckpt_path=path), ""
    second, path, done = run_to(case.again, int(case.epoch) + 1, case, training, path)
    due = (int(case.epoch) + 1, case.index(case.again, training.devices))
    if case.stop in SIGNALS and second.steps and second.steps[0].moment > due:
        return second, ""  # on a busy machine the ranks had agreed on a first stop after this one
    third = training.run(ckpt_path=path)
    if case.again not in ENDING:
        text = continuing.difference(training, second, done, third)
        return second, text and f"resumed again {text}"
    begin = third.steps[0].moment if third.steps else LATER_THAN_ANY
    steps = [*(step for step in second.steps if step.moment < begin), *third.steps]
    is_same = steps[: len(second.steps)] == second.steps
    return replace(third, steps=steps), (
        "" if is_same else f"resumed again reads {third.steps} after {second.steps}"
    )


def last_epoch(run: continuing.Run) -> list[str]:
    """Return the events of the last epoch, or of the part of it that belongs to this
    run.
    """
    names = [name for name, *_ in run.events]
    ends = [-1, *(place for place, name in enumerate(names) if name == "epoch end")]
    return names[ends[-2:][0] + 1 :]


def play_half(half: Half, rank: int, ranks: int, place: Path) -> Played:
    case, path = half
    training = training_of(case, rank, ranks, place)
    length = case.length(ranks)
    try:
        if path is not None:
            whole = training.run()
            resumed, text = resume(case, training, path)
            ending = last_epoch(resumed)
            expected = last_epoch(whole)
            # On a busy machine the ranks may agree on a stop that is later, also in the
            # last epoch.
            is_partial = case.again in SIGNALS and len(ending) < len(expected)
            if ending != (expected[len(expected) - len(ending) :] if is_partial else expected):
                text += f"; ends with {ending} instead of {expected}"
            return Played(text, whole=whole.steps, after=resumed.steps)
        stopped, path, done = run_to(case.stop, int(case.epoch), case, training)
        whole = training.run() if case.stop in ENDING else stopped
        texts = []
        if (
            len(whole.steps) != case.epochs * length
            or stopped.steps != whole.steps[: len(stopped.steps)]
        ):
            texts.append(
                f"reads {stopped.steps} before the stop, in epochs of {length} steps: {whole.steps}"
            )
        if case.stays:
            resumed, text = resume(case, training, path)
            texts += [continuing.difference(training, whole, done, resumed), text]
        before = whole.steps[: done - done % length % case.accumulated]  # until an optimiser step
        return Played("; ".join(filter(None, texts)), "", path, whole.steps, before)
    except (
        ResumeError,
        RankFailedError,
    ) as error:  # of the first rank that refuses, and of the others because of it
        return Played(refused=str(error))


# Levels that the daily cover leaves to the nightly sweep: they take long, or do nearly
# what others do.
NIGHTLY = {"dict", "max_size", "max_size_cycle", "first", "validation", "3", "fresh", "shared"}
FAMILIES = {
    **dict.fromkeys(INJECTED, "injected"),
    **dict.fromkeys(WITH_RANKS, "shares out"),
    "sized": "stream",
}
# What the nightly sweep found, and no pair of levels shows.
FOUND = (
    "stop=before ranks=1 workers=fresh epoch=1 generator=own injected=no",
    (
        "sampler=sized loaders=list beside=shuffled ranks=1 workers=fresh optimizing=third"
        " generator=own injected=no"
    ),
)
REPEAT = "SWEEP='{}' .venv/bin/python -m pytest tests/integration/test_resume_sweep.py -k equals"


def drawn(chance: random.Random) -> Case | None:
    """Draw a case; ``None`` for one that cannot be played."""
    case = Case(**{factor: chance.choice(levels) for factor, levels in FACTORS.items()})
    return case if case.is_valid else None


def ranks_of(case: Case) -> str:
    return case.ranks if case.stays else "other"


def pairs_of(case: Case) -> set[frozenset[tuple[str, str]]]:
    """Return the pairs of levels that a case tries; on other ranks, where less is
    compared, only those with that level.

    Samplers of one family are the same to all factors but the ranks, which share out
    what they yield.
    """
    levels = {
        *{**vars(case), "ranks": ranks_of(case), "again": str(case.again != "no")}.items(),
        ("stop", case.again),
    }
    family = {
        *levels - {("sampler", case.sampler)},
        ("sampler", FAMILIES.get(case.sampler, case.sampler)),
    }
    pairs = {frozenset(pair) for pair in itertools.combinations(family - {("stop", "no")}, 2)}
    pairs.add(frozenset({("sampler", case.sampler), ("ranks", ranks_of(case))}))
    return pairs if case.stays else {pair for pair in pairs if ("ranks", "other") in pair}


@functools.cache
def pairwise_cover(seed: int = 0) -> list[Case]:
    """Return cases that together try each pair of levels of two factors, found
    greedily.
    """
    chance = random.Random(seed)
    cases = [
        case
        for _ in range(10_000)
        if (case := drawn(chance)) and not NIGHTLY & {*vars(case).values()}
    ]
    # Torch waits for seconds for workers whose iterator is garbage, as those of a step
    # that takes an iterator are.
    with_workers = [
        case for case in cases if len(case.kinds) * case.sizes[0] < 3 and case.again == "no"
    ]
    pool = [
        case
        for case in cases
        if case.workers == "none" or (case in with_workers and case.step == "batch")
    ]
    tried = {case: pairs_of(case) for case in pool}
    return sweeps.greedy_cover(
        tried, lambda case: (case.epochs + (case.stop in ENDING) + 4) * (sum(case.sizes) + 2)
    )


def played(halves: Sequence[Half], number: int, directory: Path) -> dict[Case, list[Played]]:
    """Return each rank's record of the first or second halves of cases."""
    found = sweeps.play_cases(play_half, halves, lambda half: half[0].sizes[number], directory)
    return {
        case: [Played(each)] if isinstance(each, str) else each for (case, _), each in found.items()
    }


def play(cases: Iterable[Case], directory: Path) -> dict[Case, str]:
    """Run cases, many to a process; return the faults by case."""
    befores = played([(case, None) for case in cases], 0, directory)
    paths = {case: records[0].path for case, records in befores.items() if not case.stays}
    afters = played([(case, path) for case, path in paths.items() if path], 1, directory / "after")
    judged = {case: judge(case, befores[case], afters.get(case, [])) for case in befores}
    return {case: text for case, text in judged.items() if text}


def judge(case: Case, befores: list[Played], afters: list[Played]) -> str:
    """Describe the faults of a case; empty without any.

    On other ranks what is left of the epoch is shared out, or refused if only the ranks
    that saved it know what that is; later epochs are those of the new ranks.
    """
    for rank, played in [*enumerate(befores), *enumerate(afters)]:
        if played.wrong or (played.refused and played in befores):
            return f"rank {rank}: {played.wrong or played.refused}"
    if not afters:
        return ""
    epoch, done = divmod(len(befores[0].before), case.length(case.sizes[0]))
    can_share = all(map(case.can_share, case.kinds))
    if refused := [played.refused for played in afters if played.refused]:
        is_within = done or (case.stop in (*SIGNALS, "last") and case.ends_unannounced)
        is_right = (
            is_within
            and not can_share
            and len(refused) == case.sizes[1]
            and "had ranks=" in refused[0]
        )
        return "" if is_right else f"is refused: {refused}"
    if done and not can_share:
        return "is not refused, although the rest is unknown to other ranks"
    for played in afters:
        later, whole = (
            [step for step in steps if step.epoch >= epoch + bool(done)]
            for steps in (played.after, played.whole)
        )
        is_same = (
            later == whole
            if can_share
            else [step.moment for step in later] == [step.moment for step in whole]
        )
        if not is_same:
            return f"reads {later} in later epochs instead of {whole}"
    return judge_rest(case, epoch, befores, afters) if done else ""


def judge_rest(case: Case, epoch: int, befores: list[Played], afters: list[Played]) -> str:
    """Describe the faults of an epoch's rest: it must have each sample of the loader
    that ends it.
    """
    number = int(case.loaders == "min_size")

    def count(steps: Iterable[continuing.Step]) -> Counter[int]:
        return Counter(
            sample
            for step in steps
            if step.epoch == epoch
            for sample in step.samples
            if sample // 100 == number
        )

    whole = count(step for played in befores for step in played.whole)
    read = count(step for played in befores for step in played.before)
    read += count(step for played in afters for step in played.after)
    allowed = case.sizes[1] - 1
    if case.kinds[number] == "dealt":
        # Pads by batches, and already on two ranks, which share nine of them.
        whole = Counter(set(whole))
        allowed = 2 * case.sizes[1]
    if whole - read or (read - whole).total() > allowed:
        return f"leaves out {sorted(whole - read)} and reads {sorted(read - whole)} twice"
    return (
        ""
        if len({len(played.after) for played in afters}) == 1
        else "ranks do other numbers of steps"
    )


@pytest.mark.parametrize("ranks", ["1", "2", "other"])
def test_a_run_that_is_resumed_equals_one_that_is_not(ranks: str, tmp_path: Path) -> None:
    """For each pair of ways to read, to stop and to resume, batches and weights are the
    same, to the last bit.
    """
    cases = sweeps.chosen_cases(Case.parse, [*map(Case.parse, FOUND), *pairwise_cover()])
    sweeps.expect_nothing_wrong(
        play(
            [case for case in cases if ("2" if ranks_of(case) == "3" else ranks_of(case)) == ranks],
            tmp_path,
        ),
        REPEAT,
    )


@pytest.mark.nightly
@pytest.mark.timeout(0)  # SWEEP_COUNT says how long it takes
def test_runs_of_a_new_seed_do_so_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cases are drawn from all levels of all factors."""
    seed, count = sweeps.new_seed(capsys, 60)
    chance = random.Random(seed)
    sweeps.expect_nothing_wrong(
        play(
            itertools.islice(filter(None, (drawn(chance) for _ in itertools.count())), count),
            tmp_path,
        ),
        REPEAT,
    )
