"""A run that a signal stops in any hook continues as if there had been no signal, also
beside each of Lightning's callbacks that can continue exactly.

1. Draw: a case is a hook and one of its calls, in which one rank gets a signal.
2. Play: each rank trains without the signal, with it, and from the stop on.
3. Judge: the run from the stop on must go on as the one without the signal.

``make test`` plays a few cases, ``make nightly`` those of a new seed (``SWEEP_SEED``,
``SWEEP_COUNT``).
"""

import functools
import inspect
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.core import hooks
from torch.utils.data import DataLoader

from tests.harness import sweeps
from tests.integration import continuing


class Case(NamedTuple):
    """The signal that one of the ranks gets, and its moment.

    Its ``str`` in the variable ``SWEEP`` repeats it.

    Attributes:
        hook: a hook, with its owner.
        earlier: how often the hook is called before the signal.
        callback: the name of the callback beside which the run is stopped.
        signal: the signal's name.
        rank: the rank that gets it.
        ranks: the number of ranks.
    """

    hook: str
    earlier: int
    callback: str
    signal: str
    rank: int
    ranks: int

    def __str__(self) -> str:
        return " ".join(map(str, self))

    @staticmethod
    def parse(text: str) -> "Case":
        hook, earlier, callback, signal, rank, ranks = text.split()
        return Case(hook, int(earlier), callback, signal, int(rank), int(ranks))


DAILY = [
    Case("module.setup", 0, "none", "SIGTERM", rank=0, ranks=1),
    Case("callback.on_validation_batch_start", 3, "ema", "SIGINT", rank=0, ranks=1),
    Case("module.on_save_checkpoint", 0, "save_last", "SIGTERM", rank=0, ranks=1),
    Case("callback.on_train_end", 0, "timer", "SIGINT", rank=0, ranks=1),
    Case("callback.on_sanity_check_start", 0, "tqdm", "SIGTERM", rank=1, ranks=2),
    Case("module.training_step", 3, "throughput", "SIGINT", rank=1, ranks=2),
    Case("module.on_before_optimizer_step", 1, "early", "SIGTERM", rank=0, ranks=2),
    Case("callback.on_validation_start", 1, "swapping", "SIGTERM", rank=1, ranks=2),
    Case("module.on_train_epoch_end", 0, "save_best", "SIGTERM", rank=0, ranks=2),
    Case("callback.on_train_batch_end", 3, "on_exception", "SIGINT", rank=1, ranks=2),
]


REPEAT = "SWEEP='{}' .venv/bin/python -m pytest tests/integration/test_stop_sweep.py -k stopped"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stopped_run_continues_as_if_uninterrupted(ranks: int, tmp_path: Path) -> None:
    """Steps, validations and weights are those of a run without a signal."""
    cases = [case for case in sweeps.chosen_cases(Case.parse, DAILY) if case.ranks == ranks]
    expect_continued(cases, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(0)  # SWEEP_COUNT says how long it takes
def test_runs_of_a_new_seed_continue_as_if_uninterrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This holds for cases that are drawn from all hooks, callbacks and signals."""
    seed, count = sweeps.new_seed(capsys, 300)
    chance = random.Random(seed)
    expect_continued([draw(chance) for _ in range(count)], tmp_path)


# Drawing cases.


class Swapping(L.Callback):
    """Validates with other weights, as users' averaging callbacks do; Lightning's
    callbacks swap one hook later.
    """

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self.other = [torch.zeros_like(own) for own in module.parameters()]

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for own, other in zip(module.parameters(), self.other, strict=True):
            weights = own.data
            own.data = other.data
            other.data = weights

    on_validation_end = on_validation_start


# Callbacks beside which a run is stopped; each run makes one, in its folder. They are made
# by functions because some are not in every Lightning. These are left out:
# - StochasticWeightAveraging, BackboneFinetuning and GradientAccumulationScheduler act when
#   an epoch starts, so a run that resumes within an epoch does not continue exactly.
# - ModelPruning saves weights that are pruned for good.
CALLBACKS: dict[str, Callable[[Path], L.Callback]] = {
    "none": lambda _: L.Callback(),
    "save_last": lambda _: callbacks.ModelCheckpoint(save_last=True),
    "save_steps": lambda _: callbacks.ModelCheckpoint(
        every_n_train_steps=2, save_top_k=-1, save_last="link"
    ),
    "save_best": lambda _: callbacks.ModelCheckpoint(monitor="result", save_top_k=2),
    "on_exception": lambda place: callbacks.OnExceptionCheckpoint(place),
    "ema": lambda _: callbacks.EMAWeightAveraging(decay=0.5),
    "average": lambda _: callbacks.WeightAveraging(),
    "swapping": lambda _: Swapping(),
    "lr_monitor": lambda _: callbacks.LearningRateMonitor(),
    "early": lambda _: callbacks.EarlyStopping("result", patience=1, mode="max"),
    "timer": lambda _: callbacks.Timer("00:01:00:00"),
    "lambda": lambda _: callbacks.LambdaCallback(
        on_validation_start=lambda *_: None, on_validation_end=lambda *_: None
    ),
    "tqdm": lambda _: callbacks.TQDMProgressBar(),
    "rich": lambda _: callbacks.RichProgressBar(),
    "throughput": lambda _: callbacks.ThroughputMonitor(batch_size_fn=len),
    "devices": lambda _: callbacks.DeviceStatsMonitor(cpu_stats=True),
    "summary": lambda _: callbacks.ModelSummary(2),
}

LEFT_OUT = (  # beginnings of the names of methods
    "_",
    # Hooks that ``fit`` does not call.
    *("on_test", "test_", "on_predict", "predict_"),
    # Hooks after a run, when a signal ends the process.
    *("on_fit_end", "teardown", "on_exception"),
    # Hooks of which only a resumed run calls some.
    *("on_load", "load_", "state_dict"),
    "configure_sharded",  # deprecated
)


def names_of_hooks(owner: type) -> set[str]:
    names = {name for name, _ in inspect.getmembers(owner, inspect.isfunction)}
    return {name for name in names if not name.startswith(LEFT_OUT)}


MODULE_HOOKS = {
    *names_of_hooks(hooks.ModelHooks),
    *names_of_hooks(hooks.DataHooks),
    *names_of_hooks(hooks.CheckpointHooks),
    "configure_optimizers",
    "training_step",
    "validation_step",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "configure_gradient_clipping",
}
HOOKS = sorted(
    [f"callback.{name}" for name in names_of_hooks(L.Callback)]
    + [f"module.{name}" for name in MODULE_HOOKS]
)


def draw(chance: random.Random) -> Case:
    ranks = chance.choice((1, 2))
    return Case(
        hook=chance.choice(HOOKS),
        earlier=chance.choice((0, 0, 1, 3, 8)),
        callback=chance.choice([*CALLBACKS]),
        signal=chance.choice(("SIGTERM", "SIGINT")),
        rank=chance.randrange(ranks),
        ranks=ranks,
    )


# Playing a case on each rank: three runs, which are not judged there.


class Stoppable(continuing.Net):
    """Can be stopped in the middle of a validation.

    Its ranks stay in step, or one might finish it before the stop.
    """

    def val_dataloader(self) -> Any:
        return DataLoader(continuing.Numbers(10), batch_size=1)

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        dist.all_reduce(torch.zeros(1))
        self.log("result", self.layers(batch).sum(), sync_dist=True)

    def on_validation_end(self) -> None:
        self.happens("result", float(self.trainer.callback_metrics["result"]))

    def happens(self, what: str, *results: float) -> None:
        """Record an event, but none of the sanity check, which a resumed run repeats."""
        if not self.trainer.sanity_checking:
            super().happens(what, *results)


class Ended(NamedTuple):
    """A run, and the state of its callback; ``None`` if it is not compared."""

    run: continuing.Run
    callback_state: str | None


class Played(NamedTuple):
    """A rank's runs of a case.

    Attributes:
        whole: the run without a signal.
        signalled: the run in which the case's rank sends the signal.
        has_sent: whether this rank has sent it.
        resumed: the run from the checkpoint of the stop on; ``None`` if no stop ended the
            run with the signal on this rank.
    """

    whole: Ended
    signalled: continuing.Run
    has_sent: bool
    resumed: Ended | None


class Sender:
    """Sends a case's signal to this process, in the chosen call of the chosen hook.

    Attributes:
        case: the case.
        calls: how often the hook has been called.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.calls = 0

    def watch(self, owner: Any) -> Any:
        """Return the owner of the hook, with a method in the hook's place that can send.

        A callback cannot do this in general, because most hooks are the module's.
        """
        name = self.case.hook.partition(".")[2]
        hook = getattr(owner, name)

        @functools.wraps(hook)
        def sending(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.case.earlier + 1:
                os.kill(os.getpid(), signal.Signals[self.case.signal])
            return hook(*args, **kwargs)

        setattr(owner, name, sending)
        return owner


def train(
    name: str,
    ranks: int,
    directory: Path,
    *others: L.Callback,
    make_model: Callable[[Any], Any] = Stoppable,
) -> Ended:
    """Train beside the callback of this name, and others, from the last checkpoint in
    ``directory``, or from the beginning.
    """
    options = {
        "max_epochs": 2,
        "limit_val_batches": 1.0,
        "num_sanity_val_steps": 1,
        "val_check_interval": 2,
        "log_every_n_steps": 1,
        "enable_checkpointing": True,
        "enable_progress_bar": True,
        "logger": True,
        "default_root_dir": directory,
    }
    callback = CALLBACKS[name](directory)
    training = continuing.Training(continuing.shuffled(6 * ranks), directory.parent, ranks, options)
    run = training.run(model=make_model, callbacks=[callback, *others], ckpt_path="last")
    if ranks > 1:
        dist.barrier()  # one rank's run must not look for what the other one's removes
    # These states have a path of the run, or a time.
    is_compared = not isinstance(callback, (callbacks.Checkpoint, callbacks.Timer))
    return Ended(run, repr(callback.state_dict()) if is_compared else None)


@functools.cache
def train_without_signal(name: str, ranks: int, directory: Path) -> Ended:
    """Train once for all cases of this process that have the callback of this name."""
    return train(name, ranks, directory / f"whole {name}")


def play(case: Case, rank: int, ranks: int, directory: Path) -> Played:
    """Train without a signal, with one, and from the stop on."""
    train_in_directory = functools.partial(train, case.callback, ranks, directory)
    whole = train_without_signal(case.callback, ranks, directory.parent)
    sender = Sender(case)
    if rank != case.rank:
        signalled = train_in_directory()
    elif case.hook.startswith("module."):
        signalled = train_in_directory(make_model=lambda loaders: sender.watch(Stoppable(loaders)))
    else:
        signalled = train_in_directory(sender.watch(L.Callback()))
    resumed = None if signalled.run.status is None else train_in_directory()
    return Played(whole, signalled.run, sender.calls > case.earlier, resumed)


# Judging what the ranks have played.


def expect_continued(cases: Sequence[Case], directory: Path) -> None:
    """Play cases; fail with the faults of each case on each rank."""
    wrong: dict[Case, str] = {}
    for case, results in sweeps.play_cases(play, cases, lambda case: case.ranks, directory).items():
        if isinstance(results, str):  # the ranks died
            faults = [results]
        else:
            faults = [
                f"on rank {rank} it {fault}"
                for rank, played in enumerate(results)
                for fault in faults_of(case, played)
                if fault  # a ``difference`` may be empty
            ]
        if faults:
            wrong[case] = "\n    ".join(faults)
    sweeps.expect_nothing_wrong(wrong, REPEAT)


def faults_of(case: Case, played: Played) -> Iterator[str]:
    """Describe how a rank's runs differ from its run without a signal."""
    if played.resumed is None:
        yield from faults_without_stop(case, played)
    else:
        yield from faults_of_stop(case, played)
        yield from faults_after_stop(played, played.resumed)


def faults_without_stop(case: Case, played: Played) -> Iterator[str]:
    """Describe what is wrong with a run that was not stopped on this rank.

    Only a drawn case may name a call of its hook that never happens; its run is then like
    the one without a signal.
    """
    if played.has_sent or case in DAILY:
        yield f"is not stopped, and trains {played.signalled.steps}"
    else:
        yield continuing.difference(played.whole.run, 0, played.signalled)


def faults_of_stop(case: Case, played: Played) -> Iterator[str]:
    """Describe a wrong exit status, and steps before the stop that differ."""
    steps = played.signalled.steps
    whole_steps = played.whole.run.steps
    status = 128 + signal.Signals[case.signal]
    if played.signalled.status != status:
        yield f"ends with {played.signalled.status} instead of {status}"
    if steps != whole_steps[: len(steps)]:
        yield f"trains {steps} before the stop, and {whole_steps} without one"


def faults_after_stop(played: Played, resumed: Ended) -> Iterator[str]:
    """Describe how the resumed run or its callback differs."""
    whole = played.whole
    yield continuing.difference(whole.run, len(played.signalled.steps), resumed.run)
    has_trained = bool(resumed.run.steps)  # otherwise no callback's training has begun
    if has_trained and resumed.callback_state != whole.callback_state:
        yield f"has the callback's {resumed.callback_state} instead of {whole.callback_state}"
