"""A resumed run equals one that never stopped, for generated combinations of factors.

A case chooses what is read, where a run stops, and on how many ranks it continues. On
the same number of ranks the resumed run must equal a whole run to the last bit, with
dropout if it stops between two optimiser steps. On another number the rest of the epoch
must be divided among the ranks. The epoch starts again with a stream, and if another
number of ranks cannot share its rest.

``make test`` plays few cases that together have each level of each factor, ``make
nightly`` cases of a new seed (``SWEEP_SEED``, ``SWEEP_COUNT``).
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import data as torch_data
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext import DistributedBatchSamplerWrapper, ScalableDistributedSampler
from tests.harness import sweeps
from tests.harness.training import OptimizesByHand, signalled
from tests.integration import continuing

BATCH_SIZE = 2
# Twelve batches, which 1, 2 or 3 ranks share evenly, as they do the rest of half of them.
SAMPLES = 24
STREAMED = 12  # samples of a stream, which each rank has for itself

WITH_RANKS = ("scalable", "distributed", "dealt")  # samplers that divide by themselves
# Divided by the strategy's sampler.
INJECTED = ("shuffled", "sequential", "weighted", "replacement")

# By the place where a run stops: the hook that stops it or saves a checkpoint, without "on_".
HOOKS = {
    "middle": "train_batch_end",
    "last": "train_batch_end",
    "sigterm": "train_batch_end",
    "first": "train_batch_end",
    "end": "train_epoch_end",
    "validation": "validation_end",
    "sigval": "validation_batch_start",
    "before": "train_batch_start",
}
SIGNALS = ("sigterm", "sigval")  # end the run; at the other stops it only saves
SAVES = [stop for stop in HOOKS if stop not in SIGNALS]
BETWEEN_EPOCHS = ("last", "end")


def levels(*names: str) -> Any:
    """Return the levels of a factor, the first of which is its default."""
    return field(default=names[0], metadata={"levels": names})


@dataclass(frozen=True)
class Case:
    """One level of each factor.

    Set the variable ``SWEEP`` to its ``str`` to play it again.
    """

    sampler: str = levels(*INJECTED, *WITH_RANKS, "batches", "stream", "stateful")
    stop: str = levels(*HOOKS)
    loaders: str = levels("one", "two")  # of the same kind
    # Before and after the first stop.
    ranks: str = levels("2>2", "1>1", "3>3", "1>2", "1>3", "2>1", "2>3", "3>1", "3>2")
    workers: str = levels("none", "fresh", "kept")
    again: str = levels("no", *SAVES)  # where the resumed run saves, in the epoch after
    epoch: str = levels("0", "1")  # in which it stops
    optimizing: str = levels("each", "second", "manual")  # at which batches
    generator: str = levels("global", "own")
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
        """Whether it can be played and compared."""
        stops = {self.stop, self.again}
        draws_by_itself = self.sampler == "stateful" and self.injected == "no"
        invalid = (
            self.sampler == "stream" and self.again != "no",
            # torchdata draws an order where workers start, and the seed of its orders
            # when the loader is made.
            draws_by_itself and self.workers == "kept",
            draws_by_itself and not stops.isdisjoint(BETWEEN_EPOCHS),
            # On other ranks, the steps that are repeated or done are not known.
            not self.keeps_ranks and (self.optimizing == "second" or self.again != "no"),
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
    def starts_again(self) -> bool:
        """Whether the epoch of the first stop starts again."""
        is_within = self.stop not in BETWEEN_EPOCHS
        continues = self.keeps_ranks or self.can_be_shared
        return is_within and (self.sampler == "stream" or not continues)

    @property
    def repeats_random_numbers(self) -> bool:
        """Whether each checkpoint is saved between two optimiser steps, and not repeated."""
        is_in_step = self.optimizing == "second" or "before" in (self.stop, self.again)
        return not (is_in_step or self.starts_again)

    @property
    def epochs(self) -> int:
        return int(self.epoch) + (2 if self.again == "no" else 3)

    @property
    def can_be_shared(self) -> bool:
        """Whether another number of ranks can share the rest of an epoch."""
        by_strategy = (*INJECTED, "batches") if self.injected == "yes" else ()
        return self.sampler in ("scalable", "dealt", *by_strategy)

    def length(self, ranks: int) -> int:
        """Return the number of steps in an epoch."""
        if self.sampler == "stream":
            return STREAMED // BATCH_SIZE
        is_divided = self.injected == "yes" or self.sampler in WITH_RANKS
        return SAMPLES // BATCH_SIZE // (ranks if is_divided else 1)

    def steps_until(self, stop: str, epoch: int, ranks: int) -> int:
        """Return the number of steps until a stop in an epoch.

        A validation is due after the last step but one.
        """
        length = self.length(ranks)
        due = length - 1
        steps = {"first": 1, "validation": due, "sigval": due, "last": length, "end": length}
        return epoch * length + steps.get(stop, length // 2)


FACTORS: dict[str, tuple[str, ...]] = {
    factor.name: factor.metadata["levels"] for factor in fields(Case)
}


# What is read.


def options_of(
    kind: str, data: list[Tensor], generator: torch.Generator | None, rank: int, ranks: int
) -> dict[str, Any]:
    """Return the options of a loader with a kind of sampler."""
    weights = [*range(1, SAMPLES + 1)]
    draw = partial(RandomSampler, data, generator=generator)
    samplers: dict[str, Any] = {
        "sequential": None,
        "weighted": torch_data.WeightedRandomSampler(weights, SAMPLES, generator=generator),
        "replacement": draw(replacement=True, num_samples=SAMPLES),
        "scalable": ScalableDistributedSampler(data, seed=1),
        "distributed": torch_data.DistributedSampler(data, ranks, rank, seed=1),
    }
    if kind in samplers:
        return {"batch_size": BATCH_SIZE, "sampler": samplers[kind]}
    if kind == "batches":
        return {"batch_sampler": continuing.Backwards(draw(), BATCH_SIZE, False)}
    if kind == "dealt":
        own = BatchSampler(draw(), BATCH_SIZE, False)
        return {"batch_sampler": DistributedBatchSamplerWrapper(own)}
    return {"batch_size": BATCH_SIZE, "shuffle": True}


def loader_of(case: Case, rank: int, ranks: int, number: int) -> Any:
    """Return a loader with batches of two samples; the samples of each loader differ."""
    options: dict[str, Any] = {"generator": None}
    if case.generator == "own":
        options["generator"] = torch.Generator().manual_seed(10 * (number + 1) + rank)
    if case.workers != "none":
        options |= continuing.workers(2 - number, persistent_workers=case.workers == "kept")
    first = 100 * number
    if case.sampler == "stream":
        return DataLoader(continuing.Stream(STREAMED, rank, first), BATCH_SIZE, **options)
    data: Any = [torch.tensor([float(first + place)]) for place in range(SAMPLES)]
    options |= options_of(case.sampler, data, options["generator"], rank, ranks)
    return (StatefulDataLoader if case.sampler == "stateful" else DataLoader)(data, **options)


def loaders_of(case: Case, rank: int, ranks: int) -> Any:
    """Return the module's ``train_dataloader``."""
    loaders = [loader_of(case, rank, ranks, number) for number in range(2)]
    return loaders if case.loaders == "two" else loaders[0]


# What is trained.


class Manual(OptimizesByHand, continuing.Net):
    """Optimises manually."""


def training_of(case: Case, rank: int, ranks: int, place: Path) -> continuing.Training:
    module = Manual if case.optimizing == "manual" else continuing.Net
    options: dict[str, Any] = {
        "max_epochs": case.epochs,
        "accumulate_grad_batches": 2 if case.optimizing == "second" else 1,
        "use_distributed_sampler": case.injected == "yes",
        "limit_val_batches": 2,
        "val_check_interval": case.length(ranks) - 1,
        "model": partial(module, dropout=0.5 if case.repeats_random_numbers else 0.0),
    }
    strategy: dict[str, Any] = {}
    if ranks == 3:
        # DDP would rebuild its buckets after the first step, and three ranks would then
        # add up in another order.
        strategy["find_unused_parameters"] = True
    loaders = partial(loaders_of, case, rank, ranks)
    return continuing.Training(loaders, place.parent, ranks, options, strategy, name=place.name)


# Playing a case. A rank that finds a fault continues, like the others.


@dataclass
class Played:
    """A rank's results of a case, until its first stop or after it on other ranks.

    Attributes:
        fault: what this rank has found to be wrong.
        path: the checkpoint of the stop.
        whole: the steps of a run without a stop.
        steps: those of them until the stop, or those after it.
    """

    fault: str = ""
    path: str = ""
    whole: list[continuing.Step] = field(default_factory=list)
    steps: list[continuing.Step] = field(default_factory=list)


def joined(*faults: str) -> str:
    return "; ".join(filter(None, faults))


def play_to_stop(case: Case, rank: int, ranks: int, place: Path) -> Played:
    """Play a case until its first stop, and on the same ranks to its end."""
    training = training_of(case, rank, ranks, place)
    epoch = int(case.epoch)
    done = case.steps_until(case.stop, epoch, ranks)
    if case.stop in SIGNALS:
        calls = 2 * epoch if case.stop == "sigval" else done - 1
        stopping = signalled(f"on_{HOOKS[case.stop]}", calls, ranks=[epoch % ranks])
        stopped = training.run(default_root_dir=place, callbacks=[stopping])
        whole = training.run()
        done = len(stopped.steps)  # the ranks may agree on a later stop
        path = str(next(place.rglob("last-preempted.ckpt"), ""))
    else:
        point = f"{HOOKS[case.stop]}-{done}"
        whole = stopped = training.run(point)
        path = whole.saved[point]
    fault = ""
    steps = stopped.steps
    if steps != whole.steps[: len(steps)] or len(whole.steps) != case.epochs * case.length(ranks):
        fault = f"reads {steps} before the stop instead of {whole.steps}"
    if case.keeps_ranks:
        fault = joined(fault, fault_after_stop(case, training, path, whole, done))
    return Played(fault, path, whole.steps, whole.steps[:done])


def fault_after_stop(
    case: Case, training: continuing.Training, path: str, whole: continuing.Run, done: int
) -> str:
    """Resume on the same ranks after ``done`` steps, and resume the resumed run."""
    if case.starts_again:
        epoch = done // case.length(training.devices)  # of the next step
        expected = [step for step in whole.steps if step.epoch >= epoch]
        steps = training.run(ckpt_path=path).steps
        return "" if steps == expected else f"reads {steps} instead of {expected}"
    if case.again == "no":
        return continuing.difference(training, whole, done, training.run(ckpt_path=path))
    done_again = case.steps_until(case.again, int(case.epoch) + 1, training.devices)
    point = f"{HOOKS[case.again]}-{done_again}"
    second = training.run(point, ckpt_path=path)
    third = training.run(ckpt_path=second.saved[point])
    again = continuing.difference(training, whole, done_again, third)
    return joined(
        continuing.difference(training, whole, done, second), again and f"resumed again {again}"
    )


def play_rest(resumption: tuple[Case, str], rank: int, ranks: int, place: Path) -> Played:
    """Play a case from the checkpoint of its first stop, which other ranks have saved."""
    case, path = resumption
    training = training_of(case, rank, ranks, place)
    whole = training.run()
    resumed = training.run(ckpt_path=path)
    events_of_epoch = case.length(ranks) + 2  # with a validation and the end
    expected, ended = (
        [event.what for event in run.events[-events_of_epoch:]] for run in (whole, resumed)
    )
    fault = "" if ended == expected else f"ends with {ended} instead of {expected}"
    return Played(fault, whole=whole.steps, steps=resumed.steps)


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
    """Check that an epoch's rest has each sample, and none twice if its half is left."""

    def count(steps_by_rank: Iterable[list[continuing.Step]]) -> Counter[int]:
        steps = [step for steps in steps_by_rank for step in steps if step.epoch == epoch]
        return Counter(continuing.samples_of(steps))

    whole = count(played.whole for played in firsts)
    read = count(played.steps for played in (*firsts, *seconds))
    is_half = case.stop in ("middle", "before")
    repeated = 0 if is_half else BATCH_SIZE * case.ranks_after * (1 + (case.loaders == "two"))
    if whole - read or (read - whole).total() > repeated:
        return f"leaves out {sorted(whole - read)} and reads {sorted(read - whole)} twice"
    steps = {len(played.steps) for played in seconds}
    return "" if len(steps) == 1 else f"the ranks have different numbers of steps: {steps}"


# Choosing cases.

REPEAT = "SWEEP='{}' .venv/bin/python -m pytest tests/integration/test_resume_sweep.py -k equals"


def draw_cases(chance: random.Random) -> Iterator[Case]:
    """Draw a level of each factor, again and again; yield the valid cases."""
    while True:
        case = Case(**{factor: chance.choice(levels) for factor, levels in FACTORS.items()})
        if case.is_valid:
            yield case


def levels_of(case: Case) -> set[Any]:
    """Return the levels that a case tries, those of sampler and stop also by whether the
    ranks change, after which less is compared.
    """
    divided = {("sampler", case.sampler), ("stop", case.stop)}
    return {*vars(case).items(), *((level, case.keeps_ranks) for level in divided)}


def cost_of(case: Case) -> float:
    """Return a measure of how long a case takes; processes of workers take longest."""
    runs = 2 + (case.stop in SIGNALS) + (case.again != "no") + (not case.keeps_ranks)
    processes = 1 + (case.workers != "none") * (2 if case.loaders == "one" else 3)
    return runs * case.epochs * (max(case.ranks_before, case.ranks_after) + 2) * processes


def daily_cases() -> list[Case]:
    """Return cases that together try each level, found greedily."""
    drawn = itertools.islice(draw_cases(random.Random(0)), 2000)
    return sweeps.greedy_cover({case: levels_of(case) for case in drawn}, cost_of)


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


@pytest.mark.parametrize("keeps_ranks", [True, False], ids=["same ranks", "other ranks"])
def test_a_run_that_is_resumed_equals_one_that_is_not(keeps_ranks: bool, tmp_path: Path) -> None:
    """Batches are the same, and on as many ranks also weights, to the last bit, with each
    level of each factor.
    """
    cases = sweeps.chosen_cases(Case.parse, daily_cases())
    chosen = [case for case in cases if case.keeps_ranks == keeps_ranks]
    sweeps.expect_nothing_wrong(play(chosen, tmp_path), REPEAT)


@pytest.mark.nightly
@pytest.mark.timeout(0)  # SWEEP_COUNT says how long it takes
def test_runs_of_a_new_seed_do_so_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cases are drawn from all levels of all factors."""
    seed, count = sweeps.new_seed(capsys, 60)
    cases = [*dict.fromkeys(itertools.islice(draw_cases(random.Random(seed)), count))]
    sweeps.expect_nothing_wrong(play(cases, tmp_path), REPEAT)
