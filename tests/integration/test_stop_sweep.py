"""A run that a signal stops in any hook continues as if there had been no signal, also
beside each of Lightning's callbacks that can continue exactly.

A case is a hook, a callback of some kind, a signal and a rank that gets it. ``make test``
plays a cover, ``make nightly`` cases of a new seed (``SWEEP_SEED``, ``SWEEP_COUNT``).
"""

import functools
import inspect
import itertools
import os
import random
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.core import hooks

from lightning_ddp_ext.errors import RankFailedError
from tests.harness import sweeps
from tests.harness.training import At, make_strategy, make_trainer
from tests.integration import continuing


class Swapping(L.Callback):
    """Validates with other weights, as users' averaging callbacks do; Lightning's
    callbacks swap one hook later.
    """

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self.other = [torch.zeros_like(own) for own in module.parameters()]

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for own, other in zip(module.parameters(), self.other, strict=True):
            own.data, other.data = other.data, own.data

    on_validation_end = on_validation_start


class CallbackKind(NamedTuple):
    """A callback beside which a run is stopped.

    Attributes:
        make: makes it, for each run anew.
        is_logging: whether it needs a logger.
        is_daily: whether the daily cover has it, because it does what no other does.
    """

    make: Callable[[Path], L.Callback]
    is_logging: bool = False
    is_daily: bool = True


# Some are not in every Lightning. Callbacks that do something when an epoch starts do not
# continue exactly in its middle: StochasticWeightAveraging, BackboneFinetuning and
# GradientAccumulationScheduler. ModelPruning saves weights that are pruned for good.
CALLBACK_KINDS = {
    "none": CallbackKind(lambda _: L.Callback()),
    "saves": CallbackKind(lambda _: callbacks.ModelCheckpoint(), is_daily=False),
    "save_last": CallbackKind(lambda _: callbacks.ModelCheckpoint(save_last=True), is_logging=True),
    "save_steps": CallbackKind(
        lambda _: callbacks.ModelCheckpoint(every_n_train_steps=2, save_top_k=-1, save_last="link"),
        is_daily=False,
    ),
    "save_best": CallbackKind(lambda _: callbacks.ModelCheckpoint(monitor="result", save_top_k=2)),
    "on_exception": CallbackKind(lambda place: callbacks.OnExceptionCheckpoint(place)),
    "ema": CallbackKind(lambda _: callbacks.EMAWeightAveraging(decay=0.5)),
    "average": CallbackKind(lambda _: callbacks.WeightAveraging(), is_daily=False),
    "swapping": CallbackKind(lambda _: Swapping()),
    "lr_monitor": CallbackKind(
        lambda _: callbacks.LearningRateMonitor(), is_logging=True, is_daily=False
    ),
    "early": CallbackKind(lambda _: callbacks.EarlyStopping("result", patience=1, mode="max")),
    "timer": CallbackKind(lambda _: callbacks.Timer("00:01:00:00")),
    "lambda": CallbackKind(
        lambda _: callbacks.LambdaCallback(
            on_validation_start=lambda *_: None, on_validation_end=lambda *_: None
        ),
        is_daily=False,
    ),
    "tqdm": CallbackKind(lambda _: callbacks.TQDMProgressBar()),
    "rich": CallbackKind(lambda _: callbacks.RichProgressBar(), is_daily=False),
    "throughput": CallbackKind(
        lambda _: callbacks.ThroughputMonitor(batch_size_fn=len), is_logging=True
    ),
    "devices": CallbackKind(
        lambda _: callbacks.DeviceStatsMonitor(cpu_stats=True), is_logging=True, is_daily=False
    ),
    "summary": CallbackKind(lambda _: callbacks.ModelSummary(2), is_daily=False),
}

# Hooks.

# Beginnings of the names of hooks that are called after a run, when a signal ends the
# process, or by a resumed run alone.
LEFT_OUT = (
    "_",
    "on_fit_end",
    "teardown",
    "on_exception",
    "on_load",
    "load_",
    "state_dict",
    "configure_sharded",
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
    "test_step",
    "predict_step",
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
# The phase of a run in which a hook is called: that of the first pattern in its name.
PHASES = (
    ("^(setup|configure_(?!gradient)|prepare|train_data|val_data|test_data|predict_data)", "start"),
    ("^on_train_batch_start|^(?!on_|validation_)", "step"),
    ("sanity", "sanity"),
    ("validation", "validation"),
    ("save", "save"),
    ("epoch", "epoch"),
    ("train_end", "train_end"),
    ("start", "start"),
    ("", "step"),
)
ONCE = ("start", "sanity", "train_end")  # phases whose hooks are called once in a run
# Parts of the names of hooks that a function of the Trainer does not call.
FOREIGN = {
    "fit": "test|predict",
    "validate": "test|predict|train|backward|optimizer|grad",
    "test": "predict|train|backward|optimizer|grad|validation|val_|sanity",
    "predict": "test|train|backward|optimizer|grad|validation|val_|sanity",
}


@dataclass(frozen=True)
class Case:
    """The signal that one of the ranks gets, and its moment.

    Its ``str`` in the variable ``SWEEP`` repeats it.

    Attributes:
        hook: a hook, with its owner.
        earlier: how often the hook is called before the signal.
        kind: the callback beside which the run is stopped.
        signal: the signal's name.
        rank: the rank that gets it.
        ranks: the number of ranks.
        function: the function of the Trainer that is stopped.
    """

    hook: str
    earlier: int
    kind: str
    signal: str
    rank: int
    ranks: int
    function: str

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in vars(self).items())

    @staticmethod
    def parse(text: str) -> "Case":
        words = dict(word.split("=") for word in text.split())
        return Case(**{name: int(word) if word.isdigit() else word for name, word in words.items()})

    @property
    def method(self) -> str:
        """The name of the hook, without its owner."""
        return self.hook.partition(".")[2]

    @property
    def status(self) -> int:
        """The exit status of a stopped run."""
        return 128 + signal.Signals[self.signal]

    @property
    def phase(self) -> str:
        """The phase of the run in which the hook is called."""
        return next(phase for pattern, phase in PHASES if re.search(pattern, self.method))

    @property
    def is_played(self) -> bool:
        """Whether the function calls the hook, often enough."""
        if self.earlier and self.phase in ONCE:
            return False
        if self.kind == "on_exception" and self.function != "fit":
            return False
        return not re.search(FOREIGN[self.function], self.hook)


class Stoppable(continuing.LongValidated):
    """Can be stopped in all functions of the Trainer."""

    samples = 10  # of each evaluation

    def happens(self, what: str, *results: float) -> None:
        """Record an event, but none of the sanity check, which a resumed run repeats."""
        if not self.trainer.sanity_checking:
            super().happens(what, *results)

    def test_step(self, batch: torch.Tensor, index: int) -> None:
        self.layers(batch)

    predict_step = test_step
    test_dataloader = predict_dataloader = continuing.LongValidated.val_dataloader


# Playing a case on a rank.

sent: list[Case] = []  # cases whose signal this process has sent, of all that it plays


def send_signal(case: Case) -> None:
    sent.append(case)
    os.kill(os.getpid(), signal.Signals[case.signal])


class Signalling(Stoppable):
    """Sends a signal in one of its methods."""

    def __init__(self, case: Case, *args: Any) -> None:
        super().__init__(*args)
        method = getattr(self, case.method)
        numbers_of_calls = itertools.count()

        @functools.wraps(method)
        def signalling(*args: Any, **kwargs: Any) -> Any:
            if next(numbers_of_calls) == case.earlier:
                send_signal(case)
            return method(*args, **kwargs)

        setattr(self, case.method, signalling)


def signals_of(case: Case, rank: int) -> tuple[Any, list[L.Callback]]:
    """Return the module and the callbacks that send the signal on a rank."""
    if rank != case.rank:
        return Stoppable, []
    if case.hook.startswith("module."):
        return functools.partial(Signalling, case), []
    return Stoppable, [At(case.method, lambda _: send_signal(case), earlier=case.earlier)]


class Ended(NamedTuple):
    """A run, and the state of its callback; empty if it is not compared."""

    run: continuing.Run
    callback_state: str


# By the kind of callback: a run without a signal. The cases that a process plays share it.
wholes: dict[str, Ended] = {}


def play(case: Case, rank: int, ranks: int, place: Path) -> str:
    """Describe the faults of a case on this rank; empty without any."""
    stop = stop_and_resume if case.function == "fit" else stop_evaluation
    try:
        return stop(case, rank, place)
    except RankFailedError:
        raise  # no case can be played with the other ranks
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def options_of(case: Case, place: Path) -> dict[str, Any]:
    """Return the Trainer's options."""
    return {
        "max_epochs": 2,
        "limit_val_batches": 1.0,
        "num_sanity_val_steps": 1,
        "val_check_interval": 2,
        "log_every_n_steps": 1,
        "enable_checkpointing": isinstance(
            CALLBACK_KINDS[case.kind].make(place), callbacks.Checkpoint
        ),
        "enable_progress_bar": case.kind in ("tqdm", "rich"),
        "logger": CALLBACK_KINDS[case.kind].is_logging,
        "default_root_dir": place,
    }


def training_of(case: Case, place: Path) -> continuing.Training:
    loaders = continuing.shuffled(6 * case.ranks)
    return continuing.Training(loaders, place.parent, case.ranks, options_of(case, place))


def train(
    case: Case, place: Path, module: Any = Stoppable, signalling: Sequence[L.Callback] = ()
) -> Ended:
    """Train from the last checkpoint in ``place``, or from the beginning; ``module`` and
    the callbacks ``signalling`` may send a signal.
    """
    callback = CALLBACK_KINDS[case.kind].make(place)
    run = training_of(case, place).run(
        model=module, callbacks=[callback, *signalling], ckpt_path="last"
    )
    if case.ranks > 1:
        dist.barrier()  # one rank's run must not look for what the other one's removes
    is_compared = not isinstance(callback, (callbacks.Checkpoint, callbacks.Timer))
    return Ended(run, repr(callback.state_dict()) if is_compared else "")


def stop_and_resume(case: Case, rank: int, place: Path) -> str:
    """Stop a training and resume it; describe what is not as without a signal."""
    if case.kind not in wholes:
        wholes[case.kind] = train(case, place.parent / f"whole {case.kind}")
    whole = wholes[case.kind]
    module, signalling = signals_of(case, rank)
    stopped = train(case, place, module, signalling).run
    if stopped.status is None and case not in sent:
        # The hook was not called that often.
        return continuing.difference(training_of(case, place), whole.run, 0, stopped)
    done = len(stopped.steps)
    if stopped.status != case.status or stopped.steps != whole.run.steps[:done]:
        return f"ends with {stopped.status}, after {stopped.steps} instead of {whole.run.steps}"
    resumed = train(case, place)
    wrong = continuing.difference(training_of(case, place), whole.run, done, resumed.run)
    has_trained = bool(resumed.run.steps)  # otherwise no callback's training has begun
    if not wrong and has_trained and resumed.callback_state != whole.callback_state:
        return f"its callback has {resumed.callback_state} instead of {whole.callback_state}"
    return wrong


def stop_evaluation(case: Case, rank: int, place: Path) -> str:
    """Signal an evaluation; describe how it did not stop on all ranks, without a file."""
    L.seed_everything(7, verbose=False)
    module, signalling = signals_of(case, rank)
    trainer = make_trainer(
        make_strategy("ours", place.parent),
        devices=case.ranks,
        callbacks=[CALLBACK_KINDS[case.kind].make(place), *signalling],
        **options_of(case, place),
    )
    quiet = {} if case.function == "predict" else {"verbose": False}
    status = None
    try:
        getattr(trainer, case.function)(module(continuing.shuffled()), **quiet)
    except SystemExit as end:
        status = end.code
    was_sent = [case in sent] * case.ranks
    if case.ranks > 1:
        dist.all_gather_object(was_sent, case in sent)
    if list(place.rglob("*preempted*")):
        return "saves a stop checkpoint"
    expected = case.status if any(was_sent) else None  # the hook may not be called that often
    return "" if status == expected else f"ends with {status} instead of {expected}"


REPEAT = "SWEEP='{}' .venv/bin/python -m pytest tests/integration/test_stop_sweep.py -k stopped"


def draw(chance: random.Random) -> Case:
    """Draw a case that can be played."""
    while True:
        ranks = chance.choice((1, 2))
        case = Case(
            hook=chance.choice(HOOKS),
            earlier=chance.choice((0, 0, 1, 3, 8)),
            kind=chance.choice([*CALLBACK_KINDS]),
            signal=chance.choice(("SIGTERM", "SIGINT")),
            rank=chance.randrange(ranks),
            ranks=ranks,
            function=chance.choice(("fit",) * 9 + ("validate", "test", "predict")),
        )
        if case.is_played:
            return case


def tried_by(case: Case) -> set[tuple[object, ...]]:
    """Return what a case tries.

    A module's hook and that of a callback count as one, and so do those of the three
    evaluations.
    """
    is_fit = case.function == "fit"
    return {
        (is_fit, case.method),
        (case.function, case.phase),
        (is_fit, case.phase, "kind", case.kind),
        (is_fit, case.phase, "signal", case.signal),
        (is_fit, case.phase, "rank", case.rank, case.ranks),
    }


def cover() -> list[Case]:
    """Return cases that try each hook, and each signal, rank and daily callback in each
    phase, found greedily.
    """
    chance = random.Random(0)
    cases = [draw(chance) for _ in range(4000)]
    tried = {case: tried_by(case) for case in cases if CALLBACK_KINDS[case.kind].is_daily}
    return sweeps.greedy_cover(tried, lambda case: case.ranks)


def faults_of(cases: Sequence[Case], directory: Path) -> dict[Case, str]:
    """Play cases; describe one rank's fault of each case that has some."""
    played = sweeps.play_cases(play, cases, lambda case: case.ranks, directory)
    faults = {}
    for case, results in played.items():
        # The result is a text if the ranks died; a rank without a fault has an empty one.
        fault = results if isinstance(results, str) else max(results, key=len)
        if fault:
            faults[case] = fault
    return faults


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stopped_run_continues_as_if_uninterrupted(ranks: int, tmp_path: Path) -> None:
    """Steps, validations and weights are the same. An evaluation stops without a file."""
    cases = [case for case in sweeps.chosen_cases(Case.parse, cover()) if case.ranks == ranks]
    sweeps.expect_nothing_wrong(faults_of(cases, tmp_path), REPEAT)


@pytest.mark.nightly
@pytest.mark.timeout(0)  # SWEEP_COUNT says how long it takes
def test_cases_of_a_new_seed_do_so_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that are stopped in cases drawn from all hooks, callbacks and signals
    continue in the same way.
    """
    seed, count = sweeps.new_seed(capsys, 300)
    chance = random.Random(seed)
    sweeps.expect_nothing_wrong(faults_of([draw(chance) for _ in range(count)], tmp_path), REPEAT)
