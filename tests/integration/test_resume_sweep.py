"""A resumed run equals one that never stopped, for generated combinations of factors.

A case chooses what is read, where a run stops, and on how many ranks it continues. Ranks
play it and return the runs; the test's process judges them. On the same number of ranks
the resumed run must equal a whole run to the last bit, with dropout if it stops between
two optimiser steps. On another number the rest of the epoch must be divided among the
ranks. The epoch starts again with a stream, and if another number of ranks cannot share
its rest. These are promises of docs/guides/resuming.md; ``Case`` says which of them hold.

``make test`` plays few cases that together have each level of each factor, ``make
nightly`` cases of a new seed (``SWEEP_SEED``, ``SWEEP_COUNT``).
"""

import itertools
import random
from collections import Counter, namedtuple
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext import DistributedBatchSamplerWrapper, ScalableDistributedSampler
from tests.harness import sweeps
from tests.harness.training import OptimizesByHand, signalled
from tests.integration import continuing

# The levels of the factors that a case chooses from, by name.

BATCH_SIZE = 2
# Twelve batches, which 1, 2 or 3 ranks share evenly, as they do the rest of half of them.
SAMPLES = 24
STREAMED = 12  # samples of a stream, which each rank has for itself
WORKERS = (2, 1)  # of the first and the second loader
VALIDATION_BATCHES = 2


class Sampler(NamedTuple):
    """A way to read samples.

    Attributes:
        options: returns the options of a loader of data, whose orders a generator draws.
        divides_itself: whether the sampler, and not the strategy, divides the samples
            among the ranks.
        can_be_shared: whether another number of ranks can share the rest of an epoch.
    """

    options: Callable[[Any, torch.Generator | None], dict[str, Any]]
    divides_itself: bool = False
    can_be_shared: bool = True


def in_batches(data: Any, generator: torch.Generator | None, kind: type[Any]) -> Any:
    """Return a batch sampler of this kind, in a random order."""
    return kind(RandomSampler(data, generator=generator), BATCH_SIZE, drop_last=False)


SAMPLERS = {
    "shuffled": Sampler(lambda data, generator: {"shuffle": True}),
    "sequential": Sampler(lambda data, generator: {}),
    "weighted": Sampler(
        lambda data, generator: {
            "sampler": WeightedRandomSampler([*range(1, SAMPLES + 1)], SAMPLES, generator=generator)
        }
    ),
    "replacement": Sampler(
        lambda data, generator: {"sampler": RandomSampler(data, True, SAMPLES, generator=generator)}
    ),
    "scalable": Sampler(
        lambda data, generator: {"sampler": ScalableDistributedSampler(data, seed=1)},
        divides_itself=True,
    ),
    "distributed": Sampler(
        lambda data, generator: {"sampler": DistributedSampler(data, seed=1)},
        divides_itself=True,
        can_be_shared=False,
    ),
    "dealt": Sampler(
        lambda data, generator: {
            "batch_sampler": DistributedBatchSamplerWrapper(
                in_batches(data, generator, BatchSampler)
            ),
            "batch_size": 1,  # torch's default, which a batch sampler needs
        },
        divides_itself=True,
    ),
    "batches": Sampler(
        lambda data, generator: {
            "batch_sampler": in_batches(data, generator, continuing.Backwards),
            "batch_size": 1,
        }
    ),
    # Each rank reads its own numbers.
    "stream": Sampler(lambda data, generator: {}, can_be_shared=False),
    # A loader with a state.
    "stateful": Sampler(lambda data, generator: {"shuffle": True}, can_be_shared=False),
}
STREAM = SAMPLERS["stream"]
STATEFUL = SAMPLERS["stateful"]


class Stop(NamedTuple):
    """Where a run stops in an epoch.

    Attributes:
        hook: the hook, without "on_", that ends the run by a signal, or only saves.
        steps: returns the steps of the epoch until then, from the length of the epoch. A
            validation is due after the last step but one.
        is_signal: whether a signal ends the run.
        is_between_epochs: whether no batch of the epoch is left.
    """

    hook: str
    steps: Callable[[int], int]
    is_signal: bool = False
    is_between_epochs: bool = False


STOPS = {
    "middle": Stop("train_batch_end", lambda length: length // 2),
    "last": Stop("train_batch_end", lambda length: length, is_between_epochs=True),
    "sigterm": Stop("train_batch_end", lambda length: length // 2, is_signal=True),
    "first": Stop("train_batch_end", lambda length: 1),
    "end": Stop("train_epoch_end", lambda length: length, is_between_epochs=True),
    "validation": Stop("validation_end", lambda length: length - 1),
    "sigval": Stop("validation_batch_start", lambda length: length - 1, is_signal=True),
    "before": Stop("train_batch_start", lambda length: length // 2),
}
SAVES = {name: stop for name, stop in STOPS.items() if not stop.is_signal}
WITHIN_STEP = STOPS["before"]  # random numbers of a step are not repeated


class Ranks(NamedTuple):
    """The numbers of ranks until the first stop, and from then on."""

    before: int
    after: int


FACTORS: dict[str, dict[str, Any]] = {
    "sampler": SAMPLERS,
    "stop": STOPS,
    "loaders": {"one": 1, "two": 2},  # of the same kind
    "ranks": {
        f"{before}>{after}": Ranks(before, after)
        for before, after in ((2, 2), (1, 1), (3, 3), *itertools.permutations((1, 2, 3), 2))
    },
    "workers": {name: name for name in ("none", "fresh", "kept")},
    "again": {"no": None, **SAVES},  # where the resumed run saves, in the epoch after
    "epoch": {"0": 0, "1": 1},  # in which the run stops
    "optimizing": {name: name for name in ("each", "second", "manual")},  # at which batches
    "has_own_generator": {"no": False, "yes": True},
    "is_injected": {"yes": True, "no": False},  # Trainer(use_distributed_sampler=...)
}


class Case(namedtuple("Case", FACTORS)):
    """One level of each factor; these are its attributes.

    Set the variable ``SWEEP`` to its ``str`` to play it again.
    """

    def __str__(self) -> str:
        return " ".join(
            f"{factor}={name}"
            for factor, levels in FACTORS.items()
            for name, level in levels.items()
            if level == getattr(self, factor)
        )

    @staticmethod
    def parse(text: str) -> "Case":
        words = [word.split("=") for word in text.split()]
        return Case(**{factor: FACTORS[factor][name] for factor, name in words})

    def __reduce__(self) -> Any:
        return Case.parse, (str(self),)  # functions of levels cannot be sent to the ranks

    @property
    def keeps_ranks(self) -> bool:
        """Whether the run continues on the same number of ranks."""
        return self.ranks.before == self.ranks.after

    @property
    def is_divided(self) -> bool:
        """Whether the ranks divide samples, instead of each reading all or its own."""
        return self.sampler.divides_itself or (self.is_injected and self.sampler is not STREAM)

    @property
    def can_be_shared(self) -> bool:
        """Whether another number of ranks can share the rest of an epoch."""
        return self.is_divided and self.sampler.can_be_shared

    @property
    def starts_again(self) -> bool:
        """Whether the epoch of the first stop starts again: with a stream, and if other ranks
        cannot share its rest.
        """
        continues = self.sampler is not STREAM and (self.keeps_ranks or self.can_be_shared)
        return not (continues or self.stop.is_between_epochs)

    @property
    def repeats_random_numbers(self) -> bool:
        """Whether each checkpoint is saved between two optimiser steps, and not repeated."""
        is_in_step = self.optimizing == "second" or WITHIN_STEP in (self.stop, self.again)
        return not (is_in_step or self.starts_again)

    @property
    def epochs(self) -> int:
        """The number of epochs of a whole run."""
        return self.epoch + (2 if self.again is None else 3)

    def length(self, ranks: int) -> int:
        """Return the number of steps in an epoch."""
        if self.sampler is STREAM:
            return STREAMED // BATCH_SIZE
        return SAMPLES // BATCH_SIZE // (ranks if self.is_divided else 1)

    def steps_until(self, stop: Stop, epoch: int, ranks: int) -> int:
        """Return the number of steps of a run until a stop in an epoch."""
        length = self.length(ranks)
        return epoch * length + stop.steps(length)


# Choosing cases.


def is_valid(case: Case) -> bool:
    """Return whether a case can be played and judged."""
    draws_by_itself = case.sampler is STATEFUL and not case.is_injected
    return not any(
        (
            case.sampler is STREAM and case.again is not None,
            # torchdata draws an order where workers start, and the seed of its orders
            # when the loader is made.
            draws_by_itself and case.workers == "kept",
            draws_by_itself and case.stop.is_between_epochs,
            draws_by_itself and case.again is not None and case.again.is_between_epochs,
            # On other ranks, the steps that are repeated or done are not known.
            not case.keeps_ranks and (case.optimizing == "second" or case.again is not None),
        )
    )


def drawn_cases(seed: int, count: int) -> list[Case]:
    """Return valid cases, each with drawn levels."""
    chance = random.Random(seed)
    cases = list[Case]()
    while len(cases) < count:
        case = Case(*(chance.choice([*levels.values()]) for levels in FACTORS.values()))
        if is_valid(case):
            cases.append(case)
    return [*dict.fromkeys(cases)]


def levels_of(case: Case) -> set[Any]:
    """Return the levels that a case tries, those of sampler and stop also by whether the
    ranks change, after which less is compared.
    """
    divided = {("sampler", case.sampler), ("stop", case.stop)}
    return {*case._asdict().items(), *((level, case.keeps_ranks) for level in divided)}


def cost_of(case: Case) -> float:
    """Return a measure of how long a case takes; processes of workers take longest."""
    runs = 2 + case.stop.is_signal + (case.again is not None) + (not case.keeps_ranks)
    ranks = max(case.ranks) + 2  # to start them takes as long as two more
    processes_of_rank = 1 + (0 if case.workers == "none" else sum(WORKERS[: case.loaders]))
    return runs * case.epochs * ranks * processes_of_rank


def daily_cases() -> list[Case]:
    """Return cases that together try each level, found greedily."""
    tried = {case: levels_of(case) for case in drawn_cases(seed=0, count=2000)}
    return sweeps.greedy_cover(tried, cost_of)


# What a rank trains in a case.


def loader_of(case: Case, rank: int, number: int) -> Any:
    """Return a loader with batches of two samples; the samples of each loader differ."""
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "generator": None}
    if case.has_own_generator:
        options["generator"] = torch.Generator().manual_seed(10 * (number + 1) + rank)
    if case.workers != "none":
        options |= continuing.workers(WORKERS[number], persistent_workers=case.workers == "kept")
    first = 100 * number
    if case.sampler is STREAM:
        return DataLoader(continuing.Stream(STREAMED, rank, first), **options)
    data: Any = [torch.tensor([float(first + place)]) for place in range(SAMPLES)]
    options |= case.sampler.options(data, options["generator"])
    return (StatefulDataLoader if case.sampler is STATEFUL else DataLoader)(data, **options)


def loaders_of(case: Case, rank: int) -> Any:
    """Return the module's ``train_dataloader``."""
    loaders = [loader_of(case, rank, number) for number in range(case.loaders)]
    return loaders if len(loaders) > 1 else loaders[0]


class Manual(OptimizesByHand, continuing.Net):
    """Optimises manually."""


def training_of(case: Case, rank: int, ranks: int, place: Path) -> continuing.Training:
    module = Manual if case.optimizing == "manual" else continuing.Net
    options: dict[str, Any] = {
        "max_epochs": case.epochs,
        "accumulate_grad_batches": 2 if case.optimizing == "second" else 1,
        "use_distributed_sampler": case.is_injected,
        "limit_val_batches": VALIDATION_BATCHES,
        "val_check_interval": case.length(ranks) - 1,
        "model": partial(module, dropout=0.5 if case.repeats_random_numbers else 0.0),
    }
    return continuing.Training(
        partial(loaders_of, case, rank),
        place.parent,
        ranks,
        options,
        # Otherwise DDP rebuilds its buckets after the first step, and three ranks then add up in
        # another order.
        strategy={"find_unused_parameters": ranks == 3},
        name=place.name,
    )


# Playing a case, on each rank. Nothing is judged there.


class ToStop(NamedTuple):
    """A rank's runs until the first stop, and after it if the ranks stay the same.

    Attributes:
        whole: a run without a stop.
        done: the number of its steps until the stop.
        stopped: the steps of the run that stops; those of ``whole`` if it only saves.
        path: the checkpoint of the stop; empty if there is none.
        resumed: the run from this checkpoint on.
        resumed_again: a run from a checkpoint of ``resumed`` on, if the case has one.
    """

    whole: continuing.Run
    done: int
    stopped: list[continuing.Step]
    path: str
    resumed: continuing.Run | None
    resumed_again: continuing.Run | None


# A rank's whole run, and the one from the first stop on, on another number of ranks.
AfterStop = tuple[continuing.Run, continuing.Run]


def play_to_stop(case: Case, rank: int, ranks: int, place: Path) -> ToStop:
    """Play a case until its first stop, and on the same ranks to its end."""
    training = training_of(case, rank, ranks, place)
    done = case.steps_until(case.stop, case.epoch, ranks)
    if case.stop.is_signal:
        is_validation = case.stop.hook == "validation_batch_start"
        earlier = case.epoch * VALIDATION_BATCHES if is_validation else done - 1  # calls
        stopping = signalled(f"on_{case.stop.hook}", earlier, ranks=[case.epoch % ranks])
        stopped = training.run(default_root_dir=place, callbacks=[stopping])
        whole = training.run()
        done = len(stopped.steps)  # the ranks may agree on a later stop
        path = str(next(place.rglob("last-preempted.ckpt"), ""))
    else:
        point = f"{case.stop.hook}-{done}"
        whole = stopped = training.run(point)
        path = whole.saved[point]
    resumed, resumed_again = resume(case, training, path) if case.keeps_ranks else (None, None)
    return ToStop(whole, done, stopped.steps, path, resumed, resumed_again)


def resume(
    case: Case, training: continuing.Training, path: str
) -> tuple[continuing.Run, continuing.Run | None]:
    """Resume on the same ranks, and resume the resumed run if the case says so."""
    if case.again is None:
        return training.run(ckpt_path=path), None
    done_again = case.steps_until(case.again, case.epoch + 1, training.devices)
    point = f"{case.again.hook}-{done_again}"
    resumed = training.run(point, ckpt_path=path)
    return resumed, training.run(ckpt_path=resumed.saved[point])


def play_after_stop(resumption: tuple[Case, str], rank: int, ranks: int, place: Path) -> AfterStop:
    """Play a case from the checkpoint of its first stop, which other ranks have saved."""
    case, path = resumption
    training = training_of(case, rank, ranks, place)
    return training.run(), training.run(ckpt_path=path)


# Judging what the ranks have played: texts of faults, which are empty without any.


def joined(faults: Iterable[str]) -> str:
    return "; ".join(filter(None, faults))


def judge(case: Case, before: list[ToStop], after: list[AfterStop]) -> str:
    """Describe the faults of a case, from the runs of each rank; ``after`` is empty if the
    number of ranks stays the same.
    """
    faults = [fault_until_stop(case, played) for played in before]
    if case.keeps_ranks:
        faults += [fault_on_same_ranks(case, played) for played in before]
    else:
        faults += [fault_at_end(case, *played) for played in after]
    if case.keeps_ranks or any(faults):
        return joined(faults)
    epoch, done_in_epoch = divmod(before[0].done, case.length(case.ranks.before))
    if not done_in_epoch or case.starts_again:
        return fault_in_epochs_from(epoch, case, after)
    return joined(
        [
            fault_in_rest(epoch, before, after, samples_twice(case, done_in_epoch)),
            fault_in_epochs_from(epoch + 1, case, after),
        ]
    )


def fault_until_stop(case: Case, played: ToStop) -> str:
    """Compare the run that stops with the whole run, which must have all its steps."""
    whole = played.whole.steps
    is_whole = len(whole) == case.epochs * case.length(case.ranks.before)
    if not is_whole or played.stopped != whole[: len(played.stopped)]:
        return f"reads {played.stopped} before the stop instead of {whole}"
    return "" if played.path else "leaves no checkpoint"


def fault_on_same_ranks(case: Case, played: ToStop) -> str:
    """Compare the resumed runs with the whole run."""
    assert played.resumed is not None
    if case.starts_again:
        epoch = played.done // case.length(case.ranks.before)  # of the next step
        expected = [step for step in played.whole.steps if step.epoch >= epoch]
        steps = played.resumed.steps
        return "" if steps == expected else f"reads {steps} instead of {expected}"
    options = {"batches_of_step": 2 if case.optimizing == "second" else 1}
    fault = continuing.difference(played.whole, played.done, played.resumed, **options)
    if case.again is None or played.resumed_again is None:
        return fault
    done_again = case.steps_until(case.again, case.epoch + 1, case.ranks.before)
    again = continuing.difference(played.whole, done_again, played.resumed_again, **options)
    return joined([fault, again and f"resumed again {again}"])


def fault_at_end(case: Case, whole: continuing.Run, resumed: continuing.Run) -> str:
    """Compare the last epoch's events on other ranks: its steps, a validation and the end."""
    events_of_epoch = case.length(case.ranks.after) + 2
    expected, ended = (
        [event.what for event in run.events[-events_of_epoch:]] for run in (whole, resumed)
    )
    return "" if ended == expected else f"ends with {ended} instead of {expected}"


def fault_in_epochs_from(epoch: int, case: Case, after: list[AfterStop]) -> str:
    """Compare whole epochs of the new ranks: their steps, and their samples if known."""
    for whole, resumed in after:
        later = [step for step in resumed.steps if step.epoch >= epoch]
        expected = [step for step in whole.steps if step.epoch >= epoch]
        is_same = [step.moment for step in later] == [step.moment for step in expected]
        if not is_same or (case.can_be_shared and later != expected):
            return f"reads {later} in later epochs instead of {expected}"
    return ""


def samples_twice(case: Case, done_in_epoch: int) -> int:
    """Return how many samples the ranks may read twice in the rest of an epoch, to fill the
    last batch of each loader.
    """
    left = SAMPLES - BATCH_SIZE * case.ranks.before * done_in_epoch
    batch_of_all = BATCH_SIZE * case.ranks.after
    return 0 if left % batch_of_all == 0 else batch_of_all * case.loaders


def fault_in_rest(
    epoch: int, before: list[ToStop], after: list[AfterStop], allowed_twice: int
) -> str:
    """Check that the ranks read each sample in an epoch, before the stop or after it."""

    def count(steps_by_rank: Iterable[list[continuing.Step]]) -> Counter[int]:
        steps = [step for steps in steps_by_rank for step in steps if step.epoch == epoch]
        return Counter(continuing.samples_of(steps))

    until_stop = [played.whole.steps[: played.done] for played in before]
    from_stop = [resumed.steps for _, resumed in after]
    whole = count(played.whole.steps for played in before)
    read = count([*until_stop, *from_stop])
    if whole - read or (read - whole).total() > allowed_twice:
        return f"leaves out {sorted(whole - read)} and reads {sorted(read - whole)} twice"
    numbers = {len(steps) for steps in from_stop}
    return "" if len(numbers) == 1 else f"the ranks have different numbers of steps: {numbers}"


# The sweep.

REPEAT = "SWEEP='{}' .venv/bin/python -m pytest tests/integration/test_resume_sweep.py -k equals"


def faults_of(cases: Sequence[Case], directory: Path) -> dict[Case, str]:
    """Play cases, many to a process, and judge them; return the faults by case."""
    before = sweeps.play_cases(play_to_stop, cases, lambda case: case.ranks.before, directory)
    stopped = {case: played for case, played in before.items() if not isinstance(played, str)}
    faults = {case: story for case, story in before.items() if isinstance(story, str)}
    resumptions = [
        (case, played[0].path)
        for case, played in stopped.items()
        if played[0].path and not case.keeps_ranks
    ]
    after = sweeps.play_cases(
        play_after_stop, resumptions, lambda moved: moved[0].ranks.after, directory / "after"
    )
    for case, played in stopped.items():
        resumed = after.get((case, played[0].path), [])
        faults[case] = resumed if isinstance(resumed, str) else judge(case, played, resumed)
    return {case: fault for case, fault in faults.items() if fault}


@pytest.mark.parametrize("keeps_ranks", [True, False], ids=["same ranks", "other ranks"])
def test_a_run_that_is_resumed_equals_one_that_is_not(keeps_ranks: bool, tmp_path: Path) -> None:
    """Batches are the same, and on as many ranks also weights, to the last bit, with each
    level of each factor.
    """
    cases = sweeps.chosen_cases(Case.parse, daily_cases())
    chosen = [case for case in cases if case.keeps_ranks == keeps_ranks]
    sweeps.expect_nothing_wrong(faults_of(chosen, tmp_path), REPEAT)


@pytest.mark.nightly
@pytest.mark.timeout(0)  # SWEEP_COUNT says how long it takes
def test_runs_of_a_new_seed_equal_whole_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This holds for cases that are drawn from all levels of all factors."""
    seed, count = sweeps.new_seed(capsys, 60)
    sweeps.expect_nothing_wrong(faults_of(drawn_cases(seed, count), tmp_path), REPEAT)
