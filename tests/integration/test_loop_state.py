"""From the state that the loops have in any hook, a run goes on as if it had not been stopped there."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_ext.integration.compat import end_restart
from lightning_ddp_ext.integration.loop_state import Restart, Stopped, change_to, find_restart
from tests.harness.training import make_trainer

EPOCHS, BATCHES = 2, 4
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "validation in an epoch": {"val_check_interval": 2},
    "accumulation": {"accumulate_grad_batches": 3},
    "both": {"val_check_interval": 2, "accumulate_grad_batches": 3},
    "without validation": {"limit_val_batches": 0},
    "validation every other epoch": {"check_val_every_n_epoch": 2},
}
HOOKS = (
    "train_start",
    "train_epoch_start",
    "train_batch_start",
    "train_batch_end",
    "validation_start",
    "validation_batch_start",
    "validation_batch_end",
    "validation_end",
    "train_epoch_end",
    "train_end",
    "exception",
)
Loops = dict[str, Any]
Event = tuple[Any, ...]


@dataclass
class Saved:
    """What the loops were in one place: a hook, or "fetching" between two batches, or "validating" between two."""

    place: str
    loops: Loops
    stopped: Stopped | None = None


@dataclass
class Run:
    saved: list[Saved] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def at(self, place: str) -> list[Loops]:
        """The states that were saved in one place, in order."""
        return [saved.loops for saved in self.saved if saved.place == place]


class Numbers(Dataset[Tensor]):
    """Saves the loops between two batches, where a stop of all ranks would."""

    def __init__(self, length: int, tracked: Tracked, place: str, stopped: Stopped) -> None:
        self.length = length
        self.save = functools.partial(tracked.save, place, stopped)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.save()
        return torch.ones(1)


class Tracked(L.LightningModule):
    """Writes down what happens, and saves the loops in each hook."""

    def __init__(self, fail_at: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.fail_at = fail_at
        self.run = Run()

    def save(self, place: str, stopped: Stopped | None = None) -> None:
        self.run.saved.append(Saved(place, copy.deepcopy(self.trainer.fit_loop.state_dict()), stopped))

    def happens(self, what: str, *more: Any) -> None:
        self.run.events.append((what, self.trainer.fit_loop.epoch_progress.current.processed, *more))

    def on_train_epoch_start(self) -> None:
        self.happens("start")

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loops = self.trainer.fit_loop.state_dict()
        counts = loops["epoch_loop.state_dict"]["_batches_that_stepped"], self.trainer.global_step
        self.happens("train", index, *counts, loops["epoch_loop.batch_progress"]["total"]["ready"])
        if self.fail_at == (self.trainer.current_epoch, index):
            raise RuntimeError("the step fails")
        loss: Tensor = self.layer(batch).sum()
        return loss

    def on_validation_start(self) -> None:
        self.happens("validate", self.trainer.fit_loop.epoch_loop.batch_progress.current.processed)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.happens("validation batch", index)

    def on_train_epoch_end(self) -> None:
        self.run.events.append(("end", self.trainer.fit_loop.epoch_progress.current.processed - 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Numbers(BATCHES, self, "fetching", "batch"))

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Numbers(2, self, "validating", "validation"))


class Saves(L.Callback):
    """Saves the loops in each hook; a resumed run is told what the strategy would tell it."""

    def __init__(self, restart: Restart | None = None) -> None:
        self.restart = restart

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.restart is not None and self.restart.at == "epoch_start":
            end_restart(trainer.fit_loop)


def _saving(hook: str) -> Any:
    former = getattr(Saves, f"on_{hook}") if f"on_{hook}" in vars(Saves) else None

    def on_hook(self: Saves, trainer: L.Trainer, module: Tracked, *args: Any, **kwargs: Any) -> None:
        module.save(hook)
        if former is not None:
            former(self, trainer, module)

    return on_hook


for _hook in HOOKS:
    setattr(Saves, f"on_{_hook}", _saving(_hook))


def fit(
    loops: Loops | None = None,
    restart: Restart | None = None,
    *,
    fail_at: tuple[int, int] | None = None,
    **options: Any,
) -> Run:
    """Train in this process, from a state of the loops on if there is one."""
    module = Tracked(fail_at)
    options = {"max_epochs": EPOCHS, "num_sanity_val_steps": 0, **options}
    trainer = make_trainer("auto", devices=1, callbacks=[Saves(restart)], **options)
    if loops is not None:
        trainer.fit_loop.load_state_dict(copy.deepcopy(loops))
    if fail_at is None:
        trainer.fit(module)
    else:
        with pytest.raises(RuntimeError, match="the step fails"):
            trainer.fit(module)
    return module.run


@functools.cache
def whole(name: str) -> Run:
    """A run without a stop."""
    return fit(**CONFIGURATIONS[name])


def found_in(saved: Saved, name: str) -> Restart:
    accumulated = CONFIGURATIONS[name].get("accumulate_grad_batches", 1)
    return find_restart(saved.loops, accumulated=accumulated, stopped=saved.stopped)


def rest(events: list[Event], restart: Restart) -> list[Event]:
    """What a run without a stop does from a restart on."""
    first: dict[str, Event] = {
        "batch_end": ("train", restart.epoch, restart.done),
        "epoch_start": ("start", restart.epoch),  # also if its hooks had been called
        "validation": ("validate", restart.epoch, restart.done),
        "epoch_end": ("end", restart.epoch),
    }
    begin = first[restart.at]
    numbers = [number for number, event in enumerate(events) if event[: len(begin)] == begin]
    return events[numbers[0] :] if numbers else []


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_from_each_hook_the_run_goes_on_as_if_it_had_not_been_stopped(name: str) -> None:
    """The same batches, validations, hooks and counts follow, and nothing twice, wherever the loops were saved."""
    run, checked = whole(name), []
    assert len(run.saved) > 20
    for saved in run.saved:
        restart = found_in(saved, name)
        changed = change_to(saved.loops, restart, stopped=saved.stopped)
        if (restart, changed) in checked:
            continue
        checked.append((restart, changed))
        resumed = fit(changed, restart, **CONFIGURATIONS[name])
        assert resumed.events == rest(run.events, restart), (saved.place, restart)


def test_gradients_that_were_accumulated_are_made_again() -> None:
    """With three batches a step, a state after the fifth goes back to the third, and one after two to the start."""
    state = whole("accumulation").at("train_batch_end")[1]
    assert find_restart(state, accumulated=3) == Restart("epoch_start", 0, has_started=True)
    assert find_restart(state, accumulated=1) == Restart("batch_end", 0, 2)
    assert find_restart(with_batches(state, 5, last=False), accumulated=3) == Restart("batch_end", 0, 3)


def with_batches(loops: Loops, done: int, *, last: bool) -> Loops:
    """The same state after another number of batches, in ``on_train_batch_end``."""
    changed = copy.deepcopy(loops)
    counts = {"ready": done, "started": done, "processed": done, "completed": done - 1}
    changed["epoch_loop.batch_progress"].update(current=dict(counts), total=dict(counts), is_last_batch=last)
    return changed


@pytest.mark.parametrize("index", range(BATCHES))
@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_batch_that_raised_an_exception_is_trained_again(accumulated: int, index: int) -> None:
    """Also the last one of an epoch, and with it the batches whose gradients were accumulated."""
    options = {"accumulate_grad_batches": accumulated}
    run = fit(**options)
    (state,) = fit(fail_at=(1, index), **options).at("exception")
    restart = find_restart(state, accumulated=accumulated)
    done = index - index % accumulated
    assert restart == (Restart("batch_end", 1, done) if done else Restart("epoch_start", 1, has_started=True))
    assert fit(change_to(state, restart), restart, **options).events == rest(run.events, restart)


def test_a_stop_in_a_validation_within_an_accumulation_goes_back_to_the_last_step() -> None:
    """A validation that could not be followed by its gradients is not begun again."""
    state = whole("both").at("validating")[0]
    assert state["epoch_loop.batch_progress"]["current"]["processed"] == 2
    assert find_restart(state, accumulated=2, stopped="validation") == Restart("validation", 0, 2)
    found = find_restart(state, accumulated=3, stopped="validation")
    assert found == Restart("epoch_start", 0, has_started=True)


def test_epochs_of_earlier_runs_stay_counted() -> None:
    """Totals go on from what a ``Trainer`` had trained before its loops began to count anew."""
    state = copy.deepcopy(whole("plain").at("train_batch_end")[3])
    state["epoch_progress"]["total"] = {name: n + 5 for name, n in state["epoch_progress"]["total"].items()}
    changed = change_to(state, Restart("epoch_start", 1))
    counts = {"ready": 1, "started": 1, "processed": 1, "completed": 1}
    assert changed["epoch_progress"] == {"current": counts, "total": {name: n + 5 for name, n in counts.items()}}
