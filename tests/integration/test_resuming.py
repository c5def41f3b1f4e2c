"""A run that is resumed at any point, and one that was resumed before, goes on as if it had not been stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext import ScalableDistributedSampler
from tests.harness.ranks import by_hand_env, run_ranks
from tests.harness.training import make_strategy, make_trainer
from tests.integration.continuing import (
    Net,
    Numbers,
    Order,
    Points,
    Stream,
    Training,
    difference,
    generations,
    ordered,
    workers,
)

Loaders = Callable[[int, int], Any]  # of a rank among so many


class ValidatesWithWorkers(Net):
    """Has a worker for its validation, too, that stays."""

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbers(4), batch_size=1, **KEPT)


class Plans(Net):
    """Has Lightning make its loaders before anything is restored."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


def shuffled(samples: int = 16, kind: Any = DataLoader, **options: Any) -> Loaders:
    return lambda rank, size: kind(Numbers(samples), **{"batch_size": 2, "shuffle": True, **options})


def sampled(order: Order, samples: int, **options: Any) -> Loaders:
    return lambda rank, size: ordered(order, samples, rank, size, **options)


def stream(samples: int = 9, kind: Any = DataLoader, number: int = 0, **options: Any) -> Loaders:
    return lambda rank, size: kind(Stream(samples, rank + number), batch_size=2, **options)


def beside(mode: Any, first: Loaders, second: Loaders) -> Loaders:
    return lambda rank, size: CombinedLoader([first(rank, size), second(rank, size)], mode)


@dataclass(frozen=True)
class Case:
    """Loaders, what is resumed from (of a whole run, of that one, and so on), and how training goes."""

    loaders: Loaders
    chosen: tuple[Points, ...]
    options: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)

    def check(self, rank: int, world_size: int, directory: Path, name: str) -> dict[str, str]:
        loaders, moments = self.loaders, {each.rpartition("-")[0] for points in self.chosen for each in points}
        training = Training(lambda: loaders(rank, world_size), directory, world_size, self.options, self.strategy, name)
        return generations(training, moments, *self.chosen)


KEPT = workers(persistent_workers=True)
STATEFUL = StatefulDataLoader
VALIDATING = {"limit_val_batches": 1.0, "val_check_interval": 2, "dropout": False}
UNSHARED = {"use_distributed_sampler": False}
TWO_EPOCHS = {"max_epochs": 2}
MAX_STEPS = {"max_epochs": -1, "max_steps": 15}
IN_TWOS = {"accumulate_grad_batches": 2, "dropout": False}
# Epochs have four batches, and a validation after each second one.
EACH = (
    *("train_batch_start-3", "train_batch_start-4", "train_batch_end-1", "train_batch_end-4", "train_epoch_start-4"),
    *("validation_batch_end-2", "validation_batch_end-4", "validation_end-2", "validation_end-4", "train_epoch_end-4"),
)
LATER = ("train_batch_end-8",)
STAYING = (
    *("train_batch_start-4", "train_batch_end-1", "train_batch_end-4", "train_batch_end-6"),
    *("validation_end-2", "validation_end-4", "train_epoch_end-4", "train_end-16"),
)
WITHIN = (("train_batch_end-3", "train_epoch_end-4"), ("train_batch_end-6",))
# Epochs of five batches.
OF_FIVE = (("train_batch_end-3", "train_epoch_end-5"), ("train_batch_end-7",))
# Beside nine batches of the other loader, the short one is read for the second time from its third batch on.
CYCLED = (("train_batch_end-2", "train_batch_end-3"), ("train_batch_end-4", "train_batch_end-12"))
SHORT, LONG = shuffled(6), shuffled(36)
CASES = {
    "each moment": Case(shuffled(), (EACH, LATER), VALIDATING),
    "random numbers of a validation": Case(
        shuffled(), (["validation_end-2"], ["validation_end-6"]), {**VALIDATING, "dropout": True}
    ),
    "a third time": Case(shuffled(), (*WITHIN, ["train_batch_end-9", "train_batch_end-12"])),
    # Saved in the last on_train_batch_end, the epoch's end is left out, and with it what would have been updated there.
    "plateau": Case(
        shuffled(), (["train_batch_start-2", "train_batch_start-4"], ["train_batch_start-7"]), {"plateau": True}
    ),
    "scalable": Case(shuffled(), WITHIN, strategy={"sampler": "scalable"}),
    "workers": Case(shuffled(**workers(2)), WITHIN),
    "no batches": Case(shuffled(batch_size=None), (["train_batch_end-3"], ["train_batch_end-9"])),
    "no distributed sampler": Case(shuffled(8), WITHIN, UNSHARED),
    # Loaders are made twice in an epoch, but once after a resume, and making them draws a number.
    "reloaded": Case(shuffled(), WITHIN, {"reload_dataloaders_every_n_epochs": 1, "dropout": False}),
    "limit": Case(shuffled(20), WITHIN, {"limit_train_batches": 4}),
    "max_steps": Case(
        shuffled(), (WITHIN[0], ["train_batch_end-8", "train_epoch_end-8"], ["train_epoch_end-12"]), MAX_STEPS
    ),
    "accumulation": Case(
        shuffled(), (["train_batch_end-1", "train_batch_end-4"], ["train_batch_end-5", "train_batch_end-7"]), IN_TWOS
    ),
    "accumulation that an epoch cuts short": Case(
        shuffled(),
        (["train_batch_end-2", "validation_end-2", "train_epoch_end-4"], ["validation_end-6", "train_batch_end-8"]),
        {**VALIDATING, "accumulate_grad_batches": 3},
    ),
    "validation by the clock": Case(
        shuffled(), WITHIN, {"val_check_interval": timedelta(hours=1), "limit_val_batches": 1.0, "dropout": False}
    ),
    "a plan of the steps": Case(shuffled(), WITHIN, {"kind": Plans, "accumulate_grad_batches": 2, "dropout": False}),
    "a plan of the steps of streams": Case(
        beside("max_size", shuffled(), stream(**KEPT)), OF_FIVE, {"kind": Plans, "max_epochs": -1, "max_steps": 15}
    ),
    "a stream": Case(stream(), OF_FIVE),
    "torchdata": Case(shuffled(kind=STATEFUL), WITHIN),
    "torchdata, stream": Case(stream(kind=STATEFUL), OF_FIVE, {"dropout": False}),
    "torchdata beside a stream": Case(beside("max_size", shuffled(20, STATEFUL), stream(5, number=5)), OF_FIVE),
    "torchdata beside a shorter stream": Case(beside("min_size", shuffled(28, STATEFUL), stream(number=5)), OF_FIVE),
    # The stream with a state has three of five batches; it was asked for a fourth when the first of these are saved.
    "torchdata that has ended": Case(
        beside("max_size", stream(5, STATEFUL), stream(number=5)),
        (["train_batch_end-3", "train_batch_end-4"], ["train_batch_end-5", "train_batch_end-9"]),
        {"dropout": False},
    ),
    "two loaders, min_size": Case(
        beside("min_size", SHORT, LONG),
        (["train_batch_end-1", "train_epoch_end-2"], ["train_batch_end-3", "train_batch_end-4"]),
    ),
    "two loaders, max_size": Case(beside("max_size", SHORT, LONG), CYCLED, TWO_EPOCHS),
    "cycled": Case(beside("max_size_cycle", SHORT, LONG), CYCLED, TWO_EPOCHS),
    "cycled, own samplers": Case(
        beside("max_size_cycle", sampled("distributed", 6), sampled("plain", 36)), CYCLED, {**TWO_EPOCHS, **UNSHARED}
    ),
    "cycled streams": Case(beside("max_size_cycle", stream(3), stream(17, number=5)), CYCLED, TWO_EPOCHS),
    "workers that stay, drawn": Case(sampled("drawn", 7, **KEPT), WITHIN, UNSHARED),
    "workers that stay, limit": Case(shuffled(20, **KEPT), WITHIN, {"limit_train_batches": 4, "dropout": False}),
}
TELLING = ["random numbers of a validation", "plateau", "no distributed sampler"]
OTHERS = [name for name in CASES if name not in (*TELLING, "each moment")]


def run_cases(rank: int, world_size: int, directory: Path, names: list[str]) -> dict[str, dict[str, str]]:
    return {name: CASES[name].check(rank, world_size, directory, name) for name in names}


@pytest.mark.parametrize(
    "names",
    [pytest.param(TELLING, marks=pytest.mark.lowest), ["each moment"], *(OTHERS[start::8] for start in range(8))],
    ids=["telling", "each moment", *(f"part {part}" for part in range(1, 9))],
)
def test_a_resumed_run_can_be_resumed(names: list[str], tmp_path: Path) -> None:
    """However often it was stopped, the batches that are left are the same, and so are the weights, bit for bit."""
    found = run_ranks(run_cases, 2, tmp_path, names, env=by_hand_env(2), time_limit=110)
    assert found == [{name: {} for name in names}] * 2


def stay(rank: int, world_size: int, directory: Path, order: Order) -> dict[str, str]:
    options = {**VALIDATING, "kind": ValidatesWithWorkers, "use_distributed_sampler": order != "plain"}
    case = Case(sampled(order, 7 * world_size, **KEPT), (STAYING,), options)
    return case.check(rank, world_size, directory, "run")


@pytest.mark.parametrize(("world_size", "order"), [(1, "lightning's"), (2, "distributed"), (2, "plain")])
def test_workers_that_stay_read_what_is_left_and_then_whole_epochs(
    world_size: int, order: Order, tmp_path: Path
) -> None:
    """Saved at any moment, with any sampler, on one device or two."""
    found = run_ranks(stay, world_size, tmp_path, order, env=by_hand_env(world_size), time_limit=110)
    assert found == [{}] * world_size


def fail_again_and_again(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, options in {"no workers": {}, "workers that stay": KEPT}.items():
        training = Training(
            lambda options=options: shuffled(**options)(rank, 2), directory, 2, {"dropout": False}, name=name
        )  # type: ignore[misc]
        whole = training.run()
        done, path = 0, None
        for number, fail_at in enumerate([(0, 1), (0, 3), (1, 0), (1, 3), None]):
            run = training.saving(f"{number}", "exception", ckpt_path=path, fail_at=fail_at)
            expected = whole.steps[done:] if fail_at is None else whole.steps[done : 4 * fail_at[0] + fail_at[1]]
            if run.steps != expected:
                found[f"{name} {fail_at}"] = f"reads {run.steps} instead of {expected}"
            if fail_at is not None:
                path, done = run.saved[0][0], done + len(run.steps)
        found |= {name: wrong} if (wrong := difference(training, whole, done, run)) else {}
    training.options["accumulate_grad_batches"] = 2
    path, done = training.saving("accumulated", "exception", fail_at=(1, 3)).saved[0]
    wrong = difference(training, training.run(), done, training.run(ckpt_path=path))
    return {**found, "accumulated": wrong} if wrong else found


def test_a_run_that_fails_again_and_again_trains_on_each_batch_once(tmp_path: Path) -> None:
    """Saved when a batch raises, first, last or within an epoch, the run goes on with that batch, or its whole step."""
    assert run_ranks(fail_again_and_again, 2, tmp_path, env=by_hand_env(2), time_limit=60) == [{}, {}]


def resume_ended_runs(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """What is done otherwise after a validation, after ``max_steps``, and without the validation that was due."""
    training = Training(lambda: shuffled(20)(rank, 2), directory, 2, {"max_epochs": 3, "dropout": False})
    validated = str(directory / "validated.ckpt")
    L.seed_everything(7, verbose=False)
    net = Net(training.loaders)
    net.layers[1] = nn.Identity()
    trainer = make_trainer(make_strategy("ours", directory), max_epochs=1, num_sanity_val_steps=0, limit_val_batches=0)
    trainer.fit(net)
    trainer.validate(net, verbose=False)
    trainer.save_checkpoint(validated)
    after_validation = difference(training, training.run(), len(net.steps), training.run(ckpt_path=validated))
    streams = Training(lambda: stream()(rank, 2), directory, 2, TWO_EPOCHS, name="stream")
    path, done = streams.saving("cut", "train_end", max_epochs=-1, max_steps=3).saved[0]
    cut_short = difference(streams, streams.run(), done, streams.run(ckpt_path=path))
    validating = Training(lambda: shuffled()(rank, 2), directory, 2, TWO_EPOCHS, name="validating")
    whole = validating.saving("whole", "validation_end", limit_val_batches=1.0)
    path, done = whole.saved[0]
    without = validating.run(ckpt_path=path).steps == whole.steps[done:]
    return {"validated": after_validation, "max_steps": cut_short, "without validation": without}


def test_a_run_that_had_ended_goes_on_where_training_was(tmp_path: Path) -> None:
    """Saved after ``validate``, cut short in a stream by ``max_steps``, or resumed without its validation."""
    expected = {"validated": "", "max_steps": "", "without validation": True}
    assert run_ranks(resume_ended_runs, 2, tmp_path, env=by_hand_env(2), time_limit=60) == [expected] * 2


class Planning(Net):
    """Has Lightning make its training loader in the middle of the sanity check, and validates the same loader."""

    def on_validation_start(self) -> None:
        assert self.trainer.estimated_stepping_batches == 6
        self.validated = 0

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.validated += len(batch)

    def on_validation_end(self) -> None:
        assert self.trainer.sanity_checking or self.validated == 12

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def share_a_sampler(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    loader = DataLoader(Numbers(24), 2, sampler=ScalableDistributedSampler(Numbers(24), seed=1))
    options = {"num_sanity_val_steps": 1, "max_epochs": 1, "val_check_interval": 3, "limit_val_batches": 1.0}
    training = Training(lambda: loader, directory, options={**options, "kind": Planning, "dropout": False})
    return generations(training, ["train_batch_end"], ["train_batch_end-1"])


def test_loaders_of_training_that_are_made_or_validated_elsewhere_are_resumed(tmp_path: Path) -> None:
    """Made in a sanity check they are loaders of training, and a sampler that was entered is validated whole."""
    assert run_ranks(share_a_sampler, 2, tmp_path, env=by_hand_env(2)) == [{}, {}]
