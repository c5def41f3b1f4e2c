"""Cases of the resume sweep: what a run reads, where it stops, on how many ranks it goes on; and playing a case."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext import DistributedBatchSamplerWrapper, ScalableDistributedSampler
from lightning_ddp_ext.errors import ResumeError
from tests.integration.continuing import Net, Run, Step, Training, difference

STOPS = ("middle", "last", "end", "validation", "sigterm", "sigval", "max_steps", "first")
FACTORS: dict[str, tuple[str, ...]] = {
    "sampler": (
        *("sequential", "shuffled", "own", "weighted", "replacement", "scalable", "distributed", "batches", "dealt"),
        *("stream", "sized", "stateful"),
    ),
    "stop": STOPS,
    "loaders": ("one", "list", "dict", "min_size", "max_size", "max_size_cycle"),
    "beside": ("same", "shuffled", "stream"),  # what the second of several loaders reads
    "ranks": ("1", "2", "3", "1>2", "1>3", "2>1", "2>3", "3>1", "3>2"),
    "workers": ("none", "fresh", "kept"),
    "again": ("no", *STOPS),  # where the resumed run stops, in the next epoch, to be resumed for the second time
    "epoch": ("0", "1"),
    "optimizing": ("each", "third", "manual"),
    "generator": ("global", "own", "shared"),
    "injected": ("yes", "no"),  # Trainer(use_distributed_sampler=...)
}
LONG, SHORT = 18, 12  # samples of all ranks; both divide by 1, 2 and 3 ranks
OF_STREAM = {LONG: 12, SHORT: 8}  # samples of each rank
STREAMS = ("stream", "sized")
OF_ITS_RANK = ("scalable", "distributed", "dealt")  # without a sampler of the Trainer's, too
SHARED_OUT = ("sequential", "shuffled", "own", "weighted", "replacement")  # by a sampler of the Trainer's
VALIDATIONS = {"limit_val_batches": 1.0, "val_check_interval": 2}


@dataclass(frozen=True)
class Case:
    """One level of each factor; ``str`` of it can be given in ``SWEEP`` to play it again."""

    sampler: str = "shuffled"
    stop: str = "middle"
    loaders: str = "one"
    beside: str = "same"
    ranks: str = "2"
    workers: str = "none"
    again: str = "no"
    epoch: str = "0"
    optimizing: str = "each"
    generator: str = "global"
    injected: str = "yes"

    def __post_init__(self) -> None:
        for factor, level in vars(self).items():
            assert level in FACTORS[factor], f"{factor} must be one of {FACTORS[factor]} (got {level!r})"

    def __str__(self) -> str:
        return " ".join(f"{each.name}={vars(self)[each.name]}" for each in fields(self))

    @staticmethod
    def parse(text: str) -> Case:
        return Case(**dict(word.split("=") for word in text.split()))

    @property
    def before(self) -> int:
        """Ranks until the first stop."""
        return int(self.ranks[0])

    @property
    def after(self) -> int:
        """Ranks from then on."""
        return int(self.ranks[-1])

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of each loader, the longer one first."""
        if self.loaders == "one":
            return (self.sampler,)
        return (self.sampler, self.sampler if self.beside == "same" else self.beside)

    @property
    def epochs(self) -> int:
        return int(self.epoch) + (2 if self.again == "no" else 3)

    @property
    def accumulated(self) -> int:
        return 3 if self.optimizing == "third" else 1

    @property
    def is_valid(self) -> bool:
        """Whether it can be played, and no factor has a level that makes no difference."""
        if self.loaders == "one" and (self.beside != "same" or self.generator == "shared"):
            return False
        if "last" in (self.stop, self.again) and {"validation", "sigval"} & {self.stop, self.again}:
            return False  # it has none
        return self.again != "max_steps" or self.before == self.after  # else nobody knows how many steps there were

    def is_shared(self, kind: str) -> bool:
        """Whether what is left of an epoch can be shared out among another number of ranks."""
        return kind in ("scalable", "dealt") or (kind in SHARED_OUT and self.injected == "yes")

    def batches(self, kind: str, samples: int, ranks: int) -> int:
        """Batches of an epoch on each rank."""
        if kind == "dealt":
            return -(-samples // 2 // ranks)
        if kind in STREAMS:
            return OF_STREAM[samples] // 2
        is_split = self.injected == "yes" or kind in OF_ITS_RANK
        return -(-samples // (2 * ranks if is_split else 2))

    def length(self, ranks: int) -> int:
        """Steps of an epoch."""
        lengths = [self.batches(kind, size, ranks) for kind, size in zip(self.kinds, (LONG, SHORT), strict=False)]
        return min(lengths) if self.loaders == "min_size" else max(lengths)


# What is read.


class Own(Sampler[int]):
    """A sampler of the user's own that draws from NumPy."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(self.samples).tolist())


class Backwards(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return (batch[::-1] for batch in super().__iter__())


class Stream(IterableDataset[Tensor]):
    """Numbers that a rank's workers share out, in another order each epoch."""

    def __init__(self, numbers: range) -> None:
        self.numbers, self.epoch = numbers, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        own = self.numbers if worker is None else self.numbers[worker.id :: worker.num_workers]
        return (torch.tensor([float(own[place])]) for place in self.order(len(own)))

    def order(self, length: int) -> list[int]:
        return [(place + self.epoch) % length for place in range(length)]


class Sized(Stream):
    """Has a length, and draws its order."""

    def __len__(self) -> int:
        return len(self.numbers)

    def order(self, length: int) -> list[int]:
        drawn: list[int] = torch.randperm(length).tolist()
        return drawn


def loaders_of(case: Case, rank: int, ranks: int) -> Any:
    """What the module's ``train_dataloader`` returns."""
    shared = torch.Generator().manual_seed(rank)
    made = [
        loader_of(case, kind, size, 100 * number, rank, ranks, shared if case.generator == "shared" else None)
        for number, (kind, size) in enumerate(zip(case.kinds, (LONG, SHORT), strict=False))
    ]
    if case.loaders == "one":
        return made[0]
    if case.loaders in ("list", "dict"):
        return made if case.loaders == "list" else {"first": made[0], "second": made[1]}
    return CombinedLoader(made, case.loaders)  # type: ignore[arg-type]


def loader_of(
    case: Case, kind: str, samples: int, first: int, rank: int, ranks: int, generator: torch.Generator | None
) -> Any:
    if case.generator == "own":
        generator = torch.Generator().manual_seed(first + rank)
    options: dict[str, Any] = {"generator": generator}
    if case.workers != "none":
        options |= {
            "num_workers": 1 if first else 2,
            "multiprocessing_context": "fork",
            "persistent_workers": case.workers == "kept",
        }
    if kind in STREAMS:
        number = first + 1000 * rank
        of_kind = Stream if kind == "stream" else Sized
        return DataLoader(of_kind(range(number, number + OF_STREAM[samples])), 2, **options)
    data: Any = [torch.tensor([float(number)]) for number in range(first, first + samples)]
    drawn = partial(RandomSampler, data, generator=generator)
    batch_samplers: dict[str, Callable[[], Any]] = {
        "batches": lambda: Backwards(drawn(), 2, False),
        "dealt": lambda: DistributedBatchSamplerWrapper(BatchSampler(drawn(), 2, False)),
    }
    if kind in batch_samplers:
        return DataLoader(data, batch_sampler=batch_samplers[kind](), **options)
    samplers: dict[str, Callable[[], Any]] = {
        "own": lambda: Own(samples),
        "weighted": lambda: WeightedRandomSampler(range(1, samples + 1), samples, generator=generator),  # type: ignore[arg-type]
        "replacement": lambda: drawn(replacement=True, num_samples=samples),
        "scalable": lambda: ScalableDistributedSampler(data, seed=1),
        "distributed": lambda: DistributedSampler(data, ranks, rank, seed=1),
    }
    if kind in samplers:
        return DataLoader(data, 2, sampler=samplers[kind](), **options)
    return (StatefulDataLoader if kind == "stateful" else DataLoader)(
        data, batch_size=2, shuffle=kind != "sequential", **options
    )


# What is trained.


class Automatic(Net):
    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step(list(batch.values()) if isinstance(batch, dict) else batch, index)


class Manual(Automatic):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss, optimizer, (scheduler, _) = super().training_step(batch, index), self.optimizers(), self.lr_schedulers()  # type: ignore[misc]
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss)
        optimizer.step()  # type: ignore[union-attr]
        scheduler.step()  # type: ignore[union-attr]
        return loss


def training_of(case: Case, rank: int, ranks: int, place: Path) -> Training:
    options: dict[str, Any] = {
        "max_epochs": case.epochs,
        "accumulate_grad_batches": case.accumulated,
        "use_distributed_sampler": case.injected == "yes",
        "kind": Manual if case.optimizing == "manual" else Automatic,
        # A validation that is due right after a save in on_train_batch_end is skipped, as the documentation says.
        **({} if "last" in (case.stop, case.again) else VALIDATIONS),
    }
    # DDP's buckets are made anew after the first step otherwise, and three ranks then add up in another order.
    strategy = {"find_unused_parameters": True} if ranks == 3 else {}
    return Training(lambda: loaders_of(case, rank, ranks), place.parent, ranks, options, strategy, name=place.name)


# Where it stops.

SIGNALS = ("sigterm", "sigval")
HOOKS = {
    **dict.fromkeys(("first", "middle", "last", "sigterm"), "on_train_batch_end"),
    **{"end": "on_train_epoch_end", "validation": "on_validation_end", "sigval": "on_validation_batch_start"},
    "max_steps": "on_train_end",
}


def index_of(stop: str, case: Case, ranks: int) -> int:
    """The epoch's batch after which a run stops."""
    length = case.length(ranks)
    if stop in ("last", "end"):
        return length - 1
    if stop == "max_steps":
        return min(case.accumulated, length) - 1
    if stop in ("validation", "sigval"):
        return 1
    # No validation is due there.
    return 0 if stop == "first" else min(4, (length - 2) // 2 * 2)


class After(L.Callback):
    """Calls ``do(trainer)`` in a hook, once the run has done this batch of this epoch and before it does another."""

    def __init__(self, hook: str, batch: tuple[int, int], do: Callable[[L.Trainer], object]) -> None:
        self.batch, self.do = batch, do
        setattr(self, hook, self.call)

    def call(self, trainer: Any, *_: Any, **__: Any) -> None:
        steps = trainer.lightning_module.steps
        if steps and steps[-1][:2] == self.batch:
            self.batch = (-1, -1)
            self.do(trainer)


@dataclass
class Stopped:
    """A run with a stop: all of it, if the stop only saves."""

    run: Run
    path: str
    done: int  # steps until the stop
    is_whole: bool


def stop(training: Training, case: Case, where: str, epoch: int, ckpt_path: str | None = None) -> Stopped:
    """Train until a stop, or through one that only saves."""
    rank, ranks = int(os.environ["RANK"]), training.devices
    index = index_of(where, case, ranks)
    place = training.directory / training.name / f"{where}-{epoch}"
    path, options = f"{place}/save.ckpt", {}
    save = After(HOOKS[where], (epoch, index), lambda trainer: trainer.save_checkpoint(path))
    callbacks: list[L.Callback] = [save]
    if where == "max_steps":
        options = {"max_steps": epoch * -(-case.length(ranks) // case.accumulated) + 1}
    if where in SIGNALS:
        path, options = f"{place}/preempted.ckpt", {"default_root_dir": place}
        kill = After(HOOKS[where], (epoch, index), lambda trainer: os.kill(os.getpid(), signal.SIGTERM))
        callbacks = [kill] if rank == epoch % ranks else []
    run = training.run(callbacks=callbacks, ckpt_path=ckpt_path, **options)
    is_whole = where not in (*SIGNALS, "max_steps")
    batches = [step[:2] for step in run.steps]
    done = batches.index((epoch, index)) + 1 if is_whole and (epoch, index) in batches else len(run.steps)
    return Stopped(run, path, done, is_whole)


# Playing a case.


@dataclass
class Played:
    """What a rank has seen of a case, or of its first or second half on another number of ranks."""

    wrong: str = ""
    refused: str = ""
    path: str = ""
    before: list[Step] = field(default_factory=list)  # steps until the stop, without those that are done again
    whole: list[Step] = field(default_factory=list)  # of a run on so many ranks that is not stopped
    after: list[Step] = field(default_factory=list)  # of the resumed run


def begin(case: Case, training: Training) -> tuple[Run, Stopped, Played]:
    """Train without a stop, and to the stop."""
    stopped = stop(training, case, case.stop, int(case.epoch))
    whole = stopped.run if stopped.is_whole else training.run()
    found = Played(path=stopped.path, whole=whole.steps)
    if len(whole.steps) != case.epochs * case.length(training.devices):
        found.wrong = f"an epoch has other lengths than {case.length(training.devices)}: {whole.steps}"
    elif stopped.run.steps != whole.steps[: len(stopped.run.steps)]:
        found.wrong = f"reads {stopped.run.steps} before the stop instead of {whole.steps}"
    elif not Path(stopped.path).exists():
        found.wrong = f"no checkpoint after {stopped.run.steps}, status {stopped.run.status}"
    elif case.stop in SIGNALS and stopped.run.status != 143:
        found.wrong = f"status {stopped.run.status} after SIGTERM"
    length = case.length(training.devices)
    in_epoch = stopped.done % length
    found.before = whole.steps[: stopped.done - in_epoch % case.accumulated]
    return whole, stopped, found


def resume(case: Case, training: Training, path: str) -> tuple[Run, str]:
    """Train from a checkpoint to the end; with a second stop as two runs that are returned as one."""
    if case.again == "no":
        return training.run(ckpt_path=path), ""
    second = stop(training, case, case.again, int(case.epoch) + 1, path)
    if not Path(second.path).exists():
        return second.run, f"did not save again: {second.run.steps}"
    third = training.run(ckpt_path=second.path)
    if second.is_whole:
        text = difference(training, second.run, second.done, third)
        return second.run, f"resumed again {text}" if text else ""
    earlier = [step for step in second.run.steps if not third.steps or step[:2] < third.steps[0][:2]]
    joined = replace(third, steps=[*earlier, *third.steps])
    is_same = joined.steps[: len(second.run.steps)] == second.run.steps
    return joined, "" if is_same else f"resumed again reads {third.steps} after {second.run.steps}"


def play(case: Case, rank: int, ranks: int, place: Path, path: str | None) -> Played:
    """What happens of a case on so many ranks; ``path`` is a checkpoint of the other number of ranks."""
    training = training_of(case, rank, ranks, place)
    try:
        if path is not None:
            whole = training.run()
            resumed, wrong = resume(case, training, path)
            return Played(wrong, whole=whole.steps, after=resumed.steps)
        run, stopped, found = begin(case, training)
        if not found.wrong and case.before == case.after:
            resumed, wrong = resume(case, training, found.path)
            text = difference(training, run, stopped.done, resumed)
            found.wrong = "; ".join(filter(None, [text, wrong]))
        return found
    except ResumeError as error:
        return Played(refused=str(error))


Half = tuple[Case, "str | None"]  # a case, and the checkpoint of its first half, if it is to be resumed elsewhere


def play_all(rank: int, ranks: int, directory: Path, halves: Sequence[Half]) -> None:
    """Play cases one after another, and write down each result, as a later case may end this process."""
    for number, (case, path) in enumerate(halves):
        place = directory / str(number)
        place.mkdir(exist_ok=True)
        played = play(case, rank, ranks, place, path)
        (place / f"{rank}.played").write_bytes(pickle.dumps(played))
