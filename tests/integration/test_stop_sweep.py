"""A signal in any hook, beside any callback, and the same command again: as if there
had been none.

``make test`` plays a cover, ``make nightly`` cases of a new seed (``SWEEP_SEED``,
``SWEEP_COUNT``).
"""

from __future__ import annotations

import functools
import inspect
import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.core import hooks
from torch.optim.lr_scheduler import StepLR

from lightning_ddp_ext.errors import RankFailedError
from tests.harness import sweeps
from tests.harness.training import At, make_strategy, make_trainer
from tests.integration import continuing


class Swapping(L.Callback):
    """Validates with other weights, as users' averaging callbacks do; Lightning's
    callbacks swap one hook later.
    """

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self.other = [torch.zeros_like(each) for each in module.parameters()]

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for own, other in zip(module.parameters(), self.other, strict=True):
            own.data, other.data = other.data, own.data

    on_validation_end = on_validation_start


SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
EVALUATIONS = ("validate", "test", "predict")

# Made anew for each run, also as some are not in every Lightning.
SAVES = callbacks.ModelCheckpoint
KINDS: dict[str, Callable[[], Any]] = {
    "none": L.Callback,
    "saves": SAVES,
    "save_last": lambda: SAVES(save_last=True),
    "save_steps": lambda: SAVES(every_n_train_steps=2, save_top_k=-1, save_last="link"),
    "save_best": lambda: SAVES(monitor="result", save_top_k=2),
    "on_exception": lambda: callbacks.OnExceptionCheckpoint(Path("unused")),
    "ema": lambda: callbacks.EMAWeightAveraging(decay=0.5),
    "average": lambda: callbacks.WeightAveraging(),
    "swapping": Swapping,
    "swa": lambda: callbacks.StochasticWeightAveraging(0.01, 1),
    "accumulation": lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
    "finetuning": lambda: callbacks.BackboneFinetuning(1, lambda epoch: 2.0, verbose=False),
    "lr_monitor": callbacks.LearningRateMonitor,
    "early": lambda: callbacks.EarlyStopping("result", patience=1, mode="max"),
    "timer": lambda: callbacks.Timer("00:01:00:00"),
    "pruning": lambda: callbacks.ModelPruning("l1_unstructured", amount=0.2),
    "lambda": lambda: callbacks.LambdaCallback(
        on_validation_start=lambda *_: None, on_validation_end=lambda *_: None
    ),
    "tqdm": callbacks.TQDMProgressBar,
    "rich": callbacks.RichProgressBar,
    "throughput": lambda: callbacks.ThroughputMonitor(batch_size_fn=len),
    "devices": lambda: callbacks.DeviceStatsMonitor(cpu_stats=True),
    "summary": lambda: callbacks.ModelSummary(2),
}
LOGGED = ("lr_monitor", "throughput", "devices", "save_last")


def _named(*owners: type) -> set[str]:
    members = [
        name for owner in owners for name, _ in inspect.getmembers(owner, inspect.isfunction)
    ]
    # Called when a run is over, where a signal is that of the process; or by a resumed
    # run alone.
    left_out = (
        "_",
        "on_fit_end",
        "teardown",
        "on_exception",
        "on_load",
        "load_",
        "state_dict",
        "configure_sharded",
    )
    return {name for name in members if not name.startswith(left_out)}


OF_MODULES = _named(hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks) | {
    *("configure_optimizers", "training_step", "validation_step", "test_step", "predict_step"),
    *(
        "backward",
        "optimizer_step",
        "optimizer_zero_grad",
        "lr_scheduler_step",
        "configure_gradient_clipping",
    ),
}
HOOKS = sorted(
    [f"callback.{name}" for name in _named(L.Callback)] + [f"module.{name}" for name in OF_MODULES]
)


@dataclass(frozen=True)
class Case:
    """The signal that one of the ranks gets, and its moment.

    Its ``str`` in the variable ``SWEEP`` repeats it.
    """

    hook: str
    kind: str
    signal: str = "SIGTERM"
    ranks: int = 2
    earlier: int = 0  # calls of the hook
    function: str = "fit"

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in vars(self).items())

    @staticmethod
    def parse(text: str) -> Case:
        words = dict(word.split("=") for word in text.split())
        return Case(**{name: int(word) if word.isdigit() else word for name, word in words.items()})

    @property
    def phase(self) -> str:
        """The Trainer's stage in this hook."""
        name = self.hook.partition(".")[2]
        if name.startswith(("on_", "validation_")):
            for phase in ("sanity", "validation", "save", "epoch", "train_end", "start"):
                if phase in name and name != "on_train_batch_start":
                    return phase
        early = (
            "setup",
            "configure",
            "prepare",
            "train_data",
            "val_data",
            "test_data",
            "predict_data",
        )
        return "start" if name.startswith(early) and "clipping" not in name else "step"

    @property
    def is_played(self) -> bool:
        """Whether the hook belongs to the function."""
        if self.earlier and self.phase in ("start", "sanity", "train_end"):
            return False
        if self.kind == "on_exception" and self.function != "fit":
            return False
        others = {
            "fit": ("test", "predict"),
            "validate": ("test", "predict", "train", "backward", "optimizer", "grad"),
        }
        others |= {"test": (*others["validate"][1:], "validation", "val_", "sanity")}
        others |= {"predict": (*others["test"][1:], "test")}
        return not any(word in self.hook for word in others[self.function])


class Stopped(continuing.LongValidated):
    """A model with the parts that callbacks need: a backbone, and one scheduler."""

    samples = 10
    backbone = property(lambda self: self.layers[0])

    def happens(self, what: str, *results: float) -> None:
        if not self.trainer.sanity_checking:  # which a resumed run does once more
            super().happens(what, *results)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(
            [each for each in self.parameters() if each.requires_grad], lr=0.01
        )
        return [optimizer], [StepLR(optimizer, 1, 0.6)]

    def test_step(self, batch: torch.Tensor, index: int) -> None:
        self.layers(batch)

    predict_step = test_step

    def test_dataloader(self) -> Any:
        return self.val_dataloader()

    predict_dataloader = test_dataloader


sent: list[Case] = []  # cases whose signal this rank has sent


def send_signal(case: Case) -> None:
    sent.append(case)
    os.kill(os.getpid(), signal.Signals[case.signal])


class Signalled(Stopped):
    """Sends a signal in one of its methods."""

    def __init__(self, case: Case, *args: Any) -> None:
        super().__init__(*args)
        method = getattr(self, case.hook.partition(".")[2])
        calls = iter(range(case.earlier + 1))

        @functools.wraps(method)
        def signalling(*args: Any, **kwargs: Any) -> Any:
            if next(calls, -1) == case.earlier:
                send_signal(case)
            return method(*args, **kwargs)

        setattr(self, method.__name__, signalling)


def signals_of(case: Case, rank: int) -> tuple[Any, list[L.Callback]]:
    """Return the module and the callbacks that send the signal on a rank."""
    if rank != len(str(case)) % case.ranks:
        return Stopped, []
    owner, _, name = case.hook.partition(".")
    if owner == "module":
        return functools.partial(Signalled, case), []
    return Stopped, [At(name, lambda _: send_signal(case), earlier=case.earlier)]


def made(case: Case, place: Path) -> Any:
    """Return the case's callback."""
    return (
        callbacks.OnExceptionCheckpoint(place)
        if case.kind == "on_exception"
        else KINDS[case.kind]()
    )


wholes: dict[str, Any] = {}  # by callback: the run of these ranks that gets no signal


def play(case: Case, rank: int, ranks: int, place: Path) -> str:
    """Describe the faults of a case on this rank; empty without any."""
    try:
        return stop_and_resume(case, rank, place)
    except RankFailedError:
        raise  # no case can be played with the other ranks
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def stop_and_resume(case: Case, rank: int, place: Path) -> str:
    directory = place.parent
    status = 128 + signal.Signals[case.signal]
    is_saved = isinstance(KINDS[case.kind](), callbacks.Checkpoint)
    options: dict[str, Any] = {
        "max_epochs": 2,
        "limit_val_batches": 1.0,
        "num_sanity_val_steps": 1,
        "val_check_interval": 2,
    }
    options |= {
        "enable_checkpointing": is_saved,
        "logger": case.kind in LOGGED,
        "log_every_n_steps": 1,
    }
    options["enable_progress_bar"] = case.kind in ("tqdm", "rich")
    training = continuing.Training(
        continuing.shuffled(6 * case.ranks), directory, case.ranks, options
    )

    def run(
        at: Path, module: Any = Stopped, more: Sequence[L.Callback] = ()
    ) -> tuple[continuing.Run, str]:
        own = made(case, at)
        done = training.run(
            model=module, callbacks=[own, *more], default_root_dir=at, ckpt_path="last"
        )
        if case.ranks > 1:
            dist.barrier()  # one rank's run must not look for what the other one's removes
        is_compared = not isinstance(own, (callbacks.Checkpoint, callbacks.Timer))
        return done, repr(own.state_dict()) if is_compared else ""

    module, signalling = signals_of(case, rank)
    if case.function != "fit":
        return evaluate(case, module, signalling, place, options, status)
    if case.kind not in wholes:
        wholes[case.kind] = run(directory / f"whole {case.kind}")
    whole, state = wholes[case.kind]
    stopped, _ = run(place, module, signalling)
    if stopped.status is None and case not in sent:
        # The hook was not called that often.
        return continuing.difference(training, whole, 0, stopped)
    if stopped.status != status or stopped.steps != whole.steps[: len(stopped.steps)]:
        return f"ends with {stopped.status}, after {stopped.steps} instead of {whole.steps}"
    resumed, resumed_state = run(place)
    wrong = continuing.difference(training, whole, len(stopped.steps), resumed)
    # Without a step no callback's training begins.
    is_same = resumed_state == state or not resumed.steps
    return wrong or ("" if is_same else f"its callback has {resumed_state} instead of {state}")


def evaluate(
    case: Case,
    module: Any,
    signalling: list[L.Callback],
    place: Path,
    options: dict[str, Any],
    status: int,
) -> str:
    """Describe the faults of a finished evaluation; empty without any."""
    L.seed_everything(7, verbose=False)
    own = {
        **options,
        "devices": case.ranks,
        "callbacks": [made(case, place), *signalling],
        "default_root_dir": place,
    }
    trainer = make_trainer(make_strategy("ours", place.parent), **own)
    ended = None
    try:
        getattr(trainer, case.function)(
            module(continuing.shuffled()),
            **({} if case.function == "predict" else {"verbose": False}),
        )
    except SystemExit as end:
        ended = end.code
    if case.ranks > 1:
        dist.barrier()
    is_right = ended == status or (ended is None and case not in sent)
    return "" if is_right and not list(place.rglob("*preempted*")) else f"ends with {ended}"


# Cases that fail, with which others of the same cause are left out.
KNOWN: dict[str, Callable[[Case], bool]] = {
    # Lightning's callback saves weights that are pruned for good, and prunes those of a
    # resumed run anew.
    "hook=module.on_train_batch_end kind=pruning earlier=3 ranks=1": (
        lambda case: case.kind == "pruning"
    ),
    # Lightning's callback makes its scheduler when an epoch starts, and so not in one
    # that is resumed in its middle.
    "hook=module.on_train_batch_end kind=swa earlier=3 ranks=1": lambda case: case.kind == "swa",
    # Lightning's callback unfreezes the backbone when an epoch starts, and so not in
    # one that is resumed in its middle.
    "hook=callback.on_train_batch_start kind=finetuning earlier=3 ranks=1": (
        lambda case: case.kind == "finetuning"
    ),
    # Lightning's callback sets the accumulation when an epoch starts, and so not in one
    # that is resumed in its middle.
    "hook=module.on_train_batch_end kind=accumulation earlier=4 ranks=1": (
        lambda case: case.kind == "accumulation"
    ),
}
# Callbacks that the daily cover leaves to the nightly sweep: they do nearly what others
# do.
NIGHTLY = ("saves", "save_steps", "average", "summary", "lambda", "rich", "devices", "lr_monitor")
REPEAT = "SWEEP='{}' .venv/bin/python -m pytest tests/integration/test_stop_sweep.py -k stopped"


def drawn(chance: random.Random) -> Case:
    """Draw a case that can be played and is not known to fail."""
    while True:
        function = chance.choice(("fit",) * 9 + EVALUATIONS)
        case = Case(
            chance.choice(HOOKS),
            chance.choice([*KINDS]),
            chance.choice(SIGNALS),
            chance.choice((1, 2)),
            chance.choice((0, 0, 1, 3, 8)),
            function,
        )
        if case.is_played and not any(may_fail(case) for may_fail in KNOWN.values()):
            return case


def cover(seed: int = 0) -> list[Case]:
    """Return cases that try each hook, and each callback, signal and number of ranks in
    each phase, found greedily.

    A module's hook and that of a callback count as one, and so do those of the three
    evaluations.
    """
    chance = random.Random(seed)

    def tried_by(case: Case) -> set[tuple[object, ...]]:
        levels = ("kind", case.kind), ("signal", case.signal), ("ranks", case.ranks)
        is_fit = case.function == "fit"
        name = case.hook.partition(".")[2]
        return {
            (is_fit, name),
            (case.function, case.phase),
            *((is_fit, case.phase, *level) for level in levels),
        }

    cases = [case for _ in range(4000) if (case := drawn(chance)).kind not in NIGHTLY]
    tried = {case: tried_by(case) for case in cases}
    return sweeps.greedy_cover(tried, lambda case: case.ranks)


def play_all(cases: Sequence[Case], directory: Path) -> dict[Case, str]:
    """Play cases; by case, what is wrong."""
    played = sweeps.play_cases(play, cases, lambda case: case.ranks, directory)
    found = {
        case: texts if isinstance(texts, str) else max(texts, key=len)
        for case, texts in played.items()
    }
    return {case: text for case, text in found.items() if text}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stopped_run_continues_as_if_uninterrupted(ranks: int, tmp_path: Path) -> None:
    """Steps, validations and weights are the same, and no rank waits for another one in
    vain.
    """
    cases = [case for case in sweeps.chosen_cases(Case.parse, cover()) if case.ranks == ranks]
    sweeps.expect_nothing_wrong(play_all(cases, tmp_path), REPEAT)


@pytest.mark.nightly
@pytest.mark.timeout(0)  # SWEEP_COUNT says how long it takes
def test_cases_of_a_new_seed_do_so_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cases are drawn from all hooks, callbacks and signals."""
    seed, count = sweeps.new_seed(capsys, 300)
    chance = random.Random(seed)
    sweeps.expect_nothing_wrong(play_all([drawn(chance) for _ in range(count)], tmp_path), REPEAT)
