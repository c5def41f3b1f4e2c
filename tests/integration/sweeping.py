"""Cases of the resume sweep: what a run reads, where it stops, on which ranks it goes on; and playing one."""

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
from torch import Tensor, randperm
from torch.utils import data as torch_data
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext import DistributedBatchSamplerWrapper, ScalableDistributedSampler
from lightning_ddp_ext.errors import ResumeError
from tests.integration.continuing import Net, Run, Step, Training, difference

LONG, SHORT = 18, 12  # samples that the ranks share out; 1, 2 and 3 ranks divide them
OF_STREAM = {LONG: 12, SHORT: 8}  # samples of each rank
STREAMS, STATES = ("stream", "sized"), ("stateful",)
WITH_RANKS = ("scalable", "distributed", "dealt")  # share out by themselves
INJECTED = ("sequential", "shuffled", "own", "weighted", "replacement")  # are shared out by the strategy's sampler
HOOKS = {
    "middle": "on_train_batch_end",
    "last": "on_train_batch_end",
    "end": "on_train_epoch_end",
    "validation": "on_validation_end",
    "sigterm": "on_train_batch_end",
    "sigval": "on_validation_batch_start",
    "max_steps": "on_train_end",
    "first": "on_train_batch_end",
}
SIGNALS = ("sigterm", "sigval")
ENDING = (*SIGNALS, "max_steps")  # stops that end the run


def levels(*names: str) -> Any:
    """The levels of a factor, the first of which is its default."""
    return field(default=names[0], metadata={"levels": names})


@dataclass(frozen=True)
class Case:
    """One level of each factor. Its ``str``, given in the variable ``SWEEP``, plays it again."""

    sampler: str = levels("shuffled", "sequential", *INJECTED[2:], *WITH_RANKS, "batches", *STREAMS, *STATES)
    stop: str = levels(*HOOKS)
    loaders: str = levels("one", "list", "dict", "min_size", "max_size", "max_size_cycle")
    beside: str = levels("same", "shuffled", "stream")  # what the second of two loaders reads
    ranks: str = levels("2", "1", "3", "1>2", "1>3", "2>1", "2>3", "3>1", "3>2")
    workers: str = levels("none", "fresh", "kept")
    again: str = levels("no", *HOOKS)  # where the resumed run stops, in the epoch after
    epoch: str = levels("0", "1")  # in which it stops
    optimizing: str = levels("each", "third", "manual")  # at which batches
    generator: str = levels("global", "own", "shared")
    injected: str = levels("yes", "no")  # Trainer(use_distributed_sampler=...)

    def __str__(self) -> str:
        chosen = [f"{factor}={level}" for factor, level in vars(self).items() if level != FACTORS[factor][0]]
        return " ".join(chosen or [f"sampler={self.sampler}"])

    @staticmethod
    def parse(text: str) -> Case:
        return Case(**dict(word.split("=") for word in text.split()))

    @property
    def is_valid(self) -> bool:
        """Whether it can be played, and each level makes a difference."""
        if self.loaders == "one" and (self.beside != "same" or self.generator == "shared"):
            return False
        if "last" in (self.stop, self.again) and {"validation", "sigval"} & {self.stop, self.again}:
            return False  # a validation that is due after the last batch's save is skipped, so there are none
        return self.again != "max_steps" or self.before == self.after  # else nobody knows how many steps there were

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
        """What the loaders read, the longer one first."""
        second = self.sampler if self.beside == "same" else self.beside
        return (self.sampler,) if self.loaders == "one" else (self.sampler, second)

    @property
    def epochs(self) -> int:
        return int(self.epoch) + (2 if self.again == "no" else 3)

    @property
    def accumulated(self) -> int:
        return 3 if self.optimizing == "third" else 1

    def can_share(self, kind: str) -> bool:
        """Whether other ranks can share what is left of an epoch."""
        return kind in ("scalable", "dealt") or (kind in INJECTED and self.injected == "yes")

    def batches(self, kind: str, samples: int, ranks: int) -> int:
        """Batches of an epoch on each rank."""
        if kind == "dealt":
            return -(-samples // 2 // ranks)
        if kind in STREAMS:
            return OF_STREAM[samples] // 2
        return -(-samples // (2 * ranks if self.injected == "yes" or kind in WITH_RANKS else 2))

    def length(self, ranks: int) -> int:
        """Steps of an epoch."""
        lengths = [self.batches(kind, size, ranks) for kind, size in zip(self.kinds, (LONG, SHORT), strict=False)]
        return min(lengths) if self.loaders == "min_size" else max(lengths)

    def index(self, stop: str, ranks: int) -> int:
        """The batch of the epoch after which a run stops; no validation is due after "first" and "middle"."""
        length = self.length(ranks)
        others = {"validation": 1, "sigval": 1, "max_steps": min(self.accumulated, length) - 1, "first": 0}
        return length - 1 if stop in ("last", "end") else others.get(stop, min(4, (length - 2) // 2 * 2))


FACTORS: dict[str, tuple[str, ...]] = {each.name: each.metadata["levels"] for each in fields(Case)}


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


class Stream(torch_data.IterableDataset[Tensor]):
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
        drawn: list[int] = randperm(length).tolist()
        return drawn


def loaders_of(case: Case, rank: int, ranks: int) -> Any:
    """What the module's ``train_dataloader`` returns."""
    shared = torch.Generator().manual_seed(rank)
    generators = {"global": None, "shared": shared, "own": torch.Generator().manual_seed(rank + 10)}
    made = [loader_of(case, case.kinds[0], LONG, 0, rank, ranks, generators[case.generator])]
    if case.loaders == "one":
        return made[0]
    generators["own"] = torch.Generator().manual_seed(rank + 20)
    made.append(loader_of(case, case.kinds[1], SHORT, 100, rank, ranks, generators[case.generator]))
    if case.loaders in ("list", "dict"):
        return made if case.loaders == "list" else {"first": made[0], "second": made[1]}
    return CombinedLoader(made, case.loaders)  # type: ignore[arg-type]


def loader_of(case: Case, kind: str, samples: int, first: int, rank: int, ranks: int, generator: Any) -> Any:
    options: dict[str, Any] = {"generator": generator}
    if case.workers != "none":
        options |= {"num_workers": 1 if first else 2, "multiprocessing_context": "fork"}
        options["persistent_workers"] = case.workers == "kept"
    if kind in STREAMS:
        numbers = range(first + 1000 * rank, first + 1000 * rank + OF_STREAM[samples])
        return DataLoader((Stream if kind == "stream" else Sized)(numbers), batch_size=2, **options)
    data: Any = [torch.tensor([float(number)]) for number in range(first, first + samples)]
    drawn = partial(RandomSampler, data, generator=generator)
    weights: Any = range(1, samples + 1)
    chosen: dict[str, Callable[[], dict[str, Any]]] = {
        "sequential": lambda: {"batch_size": 2},
        "own": lambda: {"batch_size": 2, "sampler": Own(samples)},
        "weighted": lambda: {
            "batch_size": 2,
            "sampler": torch_data.WeightedRandomSampler(weights, samples, generator=generator),
        },
        "replacement": lambda: {"batch_size": 2, "sampler": drawn(replacement=True, num_samples=samples)},
        "scalable": lambda: {"batch_size": 2, "sampler": ScalableDistributedSampler(data, seed=1)},
        "distributed": lambda: {"batch_size": 2, "sampler": torch_data.DistributedSampler(data, ranks, rank, seed=1)},
        "batches": lambda: {"batch_sampler": Backwards(drawn(), 2, False)},
        "dealt": lambda: {"batch_sampler": DistributedBatchSamplerWrapper(BatchSampler(drawn(), 2, False))},
    }
    loader_class = StatefulDataLoader if kind in STATES else DataLoader
    return loader_class(data, **chosen.get(kind, lambda: {"batch_size": 2, "shuffle": True})(), **options)


# What is trained.


class Swept(Net):
    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step(list(batch.values()) if isinstance(batch, dict) else batch, index)


class Manual(Swept):
    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        optimizer, (scheduler, _) = self.optimizers(), self.lr_schedulers()  # type: ignore[misc]
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
        "kind": Manual if case.optimizing == "manual" else Swept,
        **({} if "last" in (case.stop, case.again) else {"limit_val_batches": 1.0, "val_check_interval": 2}),
    }
    # DDP rebuilds its buckets after the first step otherwise, and three ranks then add up in another order.
    strategy = {"find_unused_parameters": True} if ranks == 3 else {}
    return Training(lambda: loaders_of(case, rank, ranks), place.parent, ranks, options, strategy, name=place.name)


# Where it stops.


class After(L.Callback):
    """Calls ``do(trainer)`` in a hook, once the run has done this batch of this epoch and before it does another."""

    def __init__(self, hook: str, batch: tuple[int, int], do: Callable[[L.Trainer], object]) -> None:
        self.batch, self.do, self.is_done = batch, do, False
        setattr(self, hook, self.call)

    def call(self, trainer: Any, *_: Any, **__: Any) -> None:
        steps = trainer.lightning_module.steps
        if steps and steps[-1][:2] == self.batch and not self.is_done:
            self.is_done = True
            self.do(trainer)


@dataclass
class Stopped:
    """A run that was stopped after ``done`` steps; one that was only saved then is there as a whole."""

    run: Run
    path: str
    done: int
    wrong: str


def run_to(stop: str, epoch: int, case: Case, training: Training, ckpt_path: str | None = None) -> Stopped:
    ranks, options = training.devices, dict[str, Any]()
    place, batch = training.directory / training.name / f"{stop}-{epoch}", (epoch, case.index(stop, ranks))
    path = str(place / ("preempted.ckpt" if stop in SIGNALS else "save.ckpt"))
    callbacks = [After(HOOKS[stop], batch, lambda trainer: trainer.save_checkpoint(path))]
    if stop == "max_steps":
        options["max_steps"] = epoch * -(-case.length(ranks) // case.accumulated) + 1
    if stop in SIGNALS:
        options["default_root_dir"] = place
        kill = After(HOOKS[stop], batch, lambda trainer: os.kill(os.getpid(), signal.SIGTERM))
        callbacks = [kill] if int(os.environ["RANK"]) == epoch % ranks else []
    run = training.run(callbacks=callbacks, ckpt_path=ckpt_path, **options)
    if not Path(path).exists():
        raise NotSaved(f"nothing is saved at {stop} of {run.steps}, status {run.status}")
    done = sum(step[:2] <= batch for step in run.steps) if stop not in ENDING else len(run.steps)
    return Stopped(run, path, done, f"status {run.status}" if stop in SIGNALS and run.status != 143 else "")


class NotSaved(Exception):
    """No checkpoint to go on from, on any rank."""


# Playing a case. A rank that finds something wrong plays on, as the other ones do.

Half = tuple[Case, "str | None"]  # a case, and the checkpoint of its first half, if it is to be resumed elsewhere


@dataclass
class Played:
    """What a rank has seen of a case, or of one half on other ranks."""

    wrong: str = ""
    refused: str = ""
    path: str = ""
    whole: list[Step] = field(default_factory=list)  # without a stop
    before: list[Step] = field(default_factory=list)  # until the stop, without what is done again
    after: list[Step] = field(default_factory=list)


def resume(case: Case, training: Training, path: str) -> tuple[Run, str]:
    """Train from a checkpoint to the end; with a second stop as two runs that are returned as one."""
    if case.again == "no":
        return training.run(ckpt_path=path), ""
    second = run_to(case.again, int(case.epoch) + 1, case, training, path)
    third = training.run(ckpt_path=second.path)
    if case.again not in ENDING:
        text = difference(training, second.run, second.done, third)
        return second.run, text and f"resumed again {text}"
    earlier = [step for step in second.run.steps if step[:2] < (third.steps or [(99,)])[0][:2]]
    joined = replace(third, steps=[*earlier, *third.steps])
    is_same = joined.steps[: len(second.run.steps)] == second.run.steps
    return joined, second.wrong or ("" if is_same else f"resumed again reads {third.steps} after {second.run.steps}")


def play(case: Case, rank: int, ranks: int, place: Path, path: str | None) -> Played:
    """Play what happens on so many ranks; ``path`` is a checkpoint of other ones."""
    training, length = training_of(case, rank, ranks, place), case.length(ranks)
    try:
        if path is not None:
            whole = training.run()
            resumed, wrong = resume(case, training, path)
            return Played(wrong, whole=whole.steps, after=resumed.steps)
        stopped = run_to(case.stop, int(case.epoch), case, training)
        whole = training.run() if case.stop in ENDING else stopped.run
        texts = [stopped.wrong]
        if len(whole.steps) != case.epochs * length or stopped.run.steps != whole.steps[: len(stopped.run.steps)]:
            texts.append(f"reads {stopped.run.steps} before the stop, in epochs of {length} steps: {whole.steps}")
        if case.before == case.after:
            resumed, wrong = resume(case, training, stopped.path)
            texts += [difference(training, whole, stopped.done, resumed), wrong]
        done_again = stopped.done % length % case.accumulated  # since the last optimiser step
        before = whole.steps[: stopped.done - done_again]
        return Played("; ".join(filter(None, texts)), path=stopped.path, whole=whole.steps, before=before)
    except ResumeError as error:
        return Played(refused=str(error))
    except NotSaved as error:
        return Played(str(error))


def play_all(rank: int, ranks: int, directory: Path, halves: Sequence[Half]) -> None:
    """Play cases one after another, and write down each result, as a later case may end this process."""
    for number, (case, path) in enumerate(halves):
        place = directory / str(number)
        place.mkdir(exist_ok=True)
        played = play(case, rank, ranks, place, path)
        (place / f"{rank}.played").write_bytes(pickle.dumps(played))
