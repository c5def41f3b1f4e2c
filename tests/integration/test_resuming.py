"""A run that is resumed at any point, and one that was resumed before, goes on as if it had not been stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.harness.ranks import by_hand_env, run_ranks
from tests.harness.training import make_strategy, make_trainer
from tests.integration.continuing import Moment, Net, Numbers, Stream
from tests.integration.resumed_runs import Points, Training, difference, generations, ordered, workers

MOMENTS: tuple[Moment, ...] = ("train_batch_start", "train_batch_end", "validation_end", "train_epoch_end", "train_end")
# Epochs have four batches, and a validation after each second one. Each is resumed from each of the line before.
FIRST = (
    ("train_batch_start-3", "train_batch_end-1", "train_batch_end-4", "validation_end-2", "validation_end-4"),
    ("train_epoch_end-4", "train_batch_start-4"),
)
SECOND = ("train_batch_start-7", "train_batch_end-5", "train_batch_end-8", "validation_end-6", "validation_end-8")
SAMPLES = 16


@dataclass(frozen=True)
class Case:
    """Loaders of a rank, how training goes, and what is resumed from: of a whole run, of that one, and so on."""

    loaders: Callable[[int], Any]
    chosen: tuple[Points, ...]
    moments: tuple[Moment, ...] = MOMENTS
    options: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)

    def check(self, rank: int, world_size: int, directory: Path, name: str) -> dict[str, str]:
        training = Training(lambda: self.loaders(rank), directory, world_size, self.options, self.strategy, name)
        return generations(training, self.moments, *self.chosen)


def shuffled(samples: int = SAMPLES, **options: Any) -> Callable[[int], Any]:
    return lambda rank: ordered("lightning's", samples, rank, 2, **options)


def combined(mode: Any, **options: Any) -> Callable[[int], Any]:
    """Two batches of one loader beside nine of the other."""
    return lambda rank: CombinedLoader([shuffled(6, **options)(rank), shuffled(36)(rank)], mode)


def own(mode: Any) -> Callable[[int], Any]:
    """The same with samplers of the user's own."""
    return lambda rank: CombinedLoader([ordered("distributed", 6, rank, 2), ordered("plain", 36, rank, 2)], mode)


def streams(mode: Any, **options: Any) -> Callable[[int], Any]:
    """Two batches of one stream beside nine of the other; neither has a length."""
    return lambda rank: CombinedLoader([_stream(3, rank, **options), _stream(17, rank + 5)], mode)


def _stream(samples: int, rank: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Stream(samples, rank), batch_size=2, **options)


class InTwos(BatchSampler):
    """A batch sampler of the user's own."""

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        return iter([indices[begin : begin + 2] for begin in range(0, len(indices), 2)])


def read(data: Callable[[int], Any], kind: Any = DataLoader, **options: Any) -> Callable[[int], Any]:
    return lambda rank: kind(data(rank), **{"batch_size": 2, **options})


def samples(rank: int) -> Numbers:
    return Numbers(SAMPLES)


def nine(rank: int) -> Stream:
    return Stream(9, rank)


EPOCH: tuple[Moment, ...] = ("train_batch_end", "train_epoch_end")
WITHIN = (("train_batch_end-1", "train_batch_end-3", "train_epoch_end-4"), ("train_batch_end-6", "train_epoch_end-8"))
IN_STREAM = (("train_batch_end-1", "train_batch_end-5", "train_epoch_end-5"), ("train_batch_end-7",))
VALIDATING = {"limit_val_batches": 1.0, "val_check_interval": 2, "dropout": False}
# The short loader is read for the second time from its third batch on.
CYCLED = (("train_batch_end-2", "train_batch_end-3"), ("train_batch_end-4", "train_batch_end-5", "train_batch_end-12"))
CASES = {
    "in a validation": Case(
        shuffled(),
        (("validation_batch_end-2", "validation_batch_end-4", "train_epoch_start-4"), ("validation_batch_end-6",)),
        ("validation_batch_end", "train_epoch_start"),
        VALIDATING,
    ),
    "dropout and validation": Case(
        shuffled(),
        (("validation_end-2",), ("validation_end-6",)),
        ("validation_end",),
        {"limit_val_batches": 1.0, "val_check_interval": 2},
    ),
    # Saved in the last on_train_batch_end, the epoch's end is left out, and with it what would have been updated there.
    "plateau": Case(
        shuffled(),
        (("train_batch_start-2", "train_batch_start-4"), ("train_batch_start-7",)),
        ("train_batch_start",),
        {"plateau": True},
    ),
    "scalable": Case(shuffled(), WITHIN, EPOCH, strategy={"sampler": "scalable"}),
    "workers": Case(shuffled(**workers(2)), WITHIN, EPOCH),
    "no batches": Case(
        read(samples, batch_size=None, shuffle=True), (("train_batch_end-3",), ("train_batch_end-9",)), EPOCH
    ),
    "a batch sampler of one's own": Case(
        lambda rank: DataLoader(samples(rank), batch_sampler=InTwos(RandomSampler(range(SAMPLES)), 2, False)),
        WITHIN,
        EPOCH,
    ),
    "no distributed sampler": Case(
        read(lambda rank: Numbers(8), shuffle=True), WITHIN, EPOCH, {"use_distributed_sampler": False}
    ),
    "no distributed sampler, workers": Case(
        read(lambda rank: Numbers(8), shuffle=True, **workers()), WITHIN, EPOCH, {"use_distributed_sampler": False}
    ),
    # Loaders are made twice in an epoch, but once after a resume, and making them draws a number.
    "reloaded": Case(shuffled(), WITHIN, EPOCH, {"reload_dataloaders_every_n_epochs": 1, "dropout": False}),
    "one stream": Case(read(nine), IN_STREAM, EPOCH),
    "one stream, workers": Case(read(nine, **workers()), IN_STREAM[:1], EPOCH),
    "torchdata": Case(read(samples, StatefulDataLoader, shuffle=True), WITHIN, EPOCH),
    "torchdata, workers": Case(
        read(samples, StatefulDataLoader, shuffle=True, **workers()), (("train_batch_end-1",),), EPOCH
    ),
    "torchdata, scalable, accumulation": Case(
        read(samples, StatefulDataLoader, shuffle=True),
        (("train_batch_end-1", "train_batch_end-3"), ("train_batch_end-7",)),
        ("train_batch_end",),
        {"accumulate_grad_batches": 2},
        {"sampler": "scalable"},
    ),
    "torchdata, stream": Case(read(nine, StatefulDataLoader), IN_STREAM, EPOCH, {"dropout": False}),
    "each moment": Case(shuffled(), (FIRST[0], (*SECOND, "train_epoch_end-8")), options=VALIDATING),
    "each moment of an epoch's end": Case(shuffled(), (FIRST[1], (*SECOND, "train_epoch_end-8")), options=VALIDATING),
    "dropout": Case(
        shuffled(),
        ({"train_batch_end-1", "train_batch_end-4"}, {"train_batch_end-6", "train_batch_end-8"}, {"train_batch_end-9"}),
        ("train_batch_end",),
    ),
    "a third time": Case(
        shuffled(),
        ({"validation_end-4", "train_batch_end-4"}, {"train_batch_end-8", "train_epoch_end-8"}, {"train_batch_end-12"}),
        options=VALIDATING,
    ),
    "workers that stay": Case(
        shuffled(**workers(persistent_workers=True)),
        ({"train_batch_end-1", "train_batch_end-4"}, {"train_batch_end-6", "train_epoch_end-8"}),
        ("train_batch_end", "train_epoch_end"),
    ),
    "max_steps": Case(
        shuffled(),
        ({"train_batch_end-3", "train_batch_end-4", "train_epoch_end-4"}, {"train_batch_end-8", "train_epoch_end-8"}),
        options={"max_epochs": -1, "max_steps": 11},
    ),
    "max_steps, a third time": Case(
        shuffled(),
        ({"train_epoch_end-4"}, {"train_epoch_end-8"}, {"train_epoch_end-12", "train_batch_end-12"}),
        options={"max_epochs": -1, "max_steps": 15},
    ),
    "accumulation": Case(
        shuffled(),
        ({"train_batch_end-1", "train_batch_end-3", "train_batch_end-4"}, {"train_batch_end-5", "train_batch_end-7"}),
        ("train_batch_end",),
        {"accumulate_grad_batches": 2},
    ),
    "accumulation that an epoch cuts short": Case(
        shuffled(),
        ({"train_batch_end-2", "train_batch_end-3", "train_batch_end-4"}, {"train_batch_end-6", "train_batch_end-8"}),
        ("train_batch_end",),
        {"accumulate_grad_batches": 3},
    ),
    "accumulation and validation": Case(
        shuffled(),
        ({"validation_end-2", "validation_end-4", "train_epoch_end-4"}, {"validation_end-6", "train_epoch_end-8"}),
        options={**VALIDATING, "accumulate_grad_batches": 3},
    ),
    "limit": Case(
        shuffled(20),
        ({"train_batch_end-1", "train_batch_end-4"}, {"train_batch_end-6", "train_batch_end-8"}),
        ("train_batch_end",),
        {"limit_train_batches": 4},
    ),
    "two loaders, min_size": Case(
        combined("min_size"),
        ({"train_batch_end-1", "train_epoch_end-2"}, {"train_batch_end-3", "train_batch_end-4"}),
        ("train_batch_end", "train_epoch_end"),
    ),
    "two loaders, max_size": Case(combined("max_size"), CYCLED, ("train_batch_end",)),
    "two loaders, max_size_cycle": Case(combined("max_size_cycle"), CYCLED, ("train_batch_end",), {"max_epochs": 2}),
    "two loaders, max_size_cycle, a worker": Case(
        combined("max_size_cycle", **workers()),
        (["train_batch_end-3"], ["train_batch_end-5"]),
        ("train_batch_end",),
        {"max_epochs": 2},
    ),
    "two loaders, max_size_cycle, own samplers": Case(
        own("max_size_cycle"), CYCLED, ("train_batch_end",), {"max_epochs": 2, "use_distributed_sampler": False}
    ),
    "two loaders, max_size_cycle, accumulation": Case(
        combined("max_size_cycle"),
        CYCLED,
        ("train_batch_end",),
        {"max_epochs": 2, "accumulate_grad_batches": 2, "dropout": False},
    ),
    "two streams, max_size": Case(streams("max_size"), CYCLED, ("train_batch_end",), {"max_epochs": 2}),
    "two streams, max_size_cycle": Case(streams("max_size_cycle"), CYCLED, ("train_batch_end",), {"max_epochs": 2}),
    "two streams, max_size_cycle, a worker": Case(
        streams("max_size_cycle", **workers()),
        (["train_batch_end-3"], ["train_batch_end-5"]),
        ("train_batch_end",),
        {"max_epochs": 2},
    ),
}


def run_cases(rank: int, world_size: int, directory: Path, names: list[str]) -> dict[str, dict[str, str]]:
    return {name: CASES[name].check(rank, world_size, directory, name) for name in names}


TELLING = ["in a validation", "plateau", "no distributed sampler"]
OTHERS = [name for name in CASES if name not in TELLING]


@pytest.mark.parametrize(
    "names",
    [pytest.param(TELLING, marks=pytest.mark.lowest), *(OTHERS[start::6] for start in range(6))],
    ids=["telling", *(f"part {part}" for part in range(1, 7))],
)
def test_a_resumed_run_can_be_resumed(names: list[str], tmp_path: Path) -> None:
    """However often it was stopped, the batches that are left are the same, and so are the weights, bit for bit."""
    found = run_ranks(run_cases, 2, tmp_path, names, env=by_hand_env(2), time_limit=110)
    assert found == [{name: {} for name in names}] * 2


def fail_again_and_again(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    training = Training(lambda: shuffled()(rank), directory, world_size, {"dropout": False})
    whole = training.run()
    found: dict[str, str] = {}
    done, path = 0, None
    for number, fail_at in enumerate([(0, 1), (0, 3), (1, 0), (1, 3), None]):
        run = training.saving(f"{number}", "exception", ckpt_path=path, fail_at=fail_at)
        expected = whole.steps[done:] if fail_at is None else whole.steps[done : 4 * fail_at[0] + fail_at[1]]
        if run.steps != expected:
            found[f"{fail_at}"] = f"reads {run.steps} instead of {expected}"
        if fail_at is not None:
            path, done = run.saved[0][0], done + len(run.steps)
    return found or ({"weights": wrong} if (wrong := difference(training, whole, done, run)) else {})


def test_a_run_that_fails_again_and_again_trains_on_each_batch_once(tmp_path: Path) -> None:
    """Saved each time that a batch raises, first, last or within an epoch, the run goes on with that batch."""
    assert run_ranks(fail_again_and_again, 2, tmp_path, env=by_hand_env(2), time_limit=60) == [{}, {}]


def go_on_after_a_validation(rank: int, world_size: int, directory: Path) -> str:
    training = Training(lambda: shuffled(20)(rank), directory, world_size, {"max_epochs": 3, "dropout": False})
    whole, path = training.run(), str(directory / "validated.ckpt")
    L.seed_everything(7, verbose=False)
    net = Net(training.loaders)
    net.layers[1] = nn.Identity()
    trainer = make_trainer(make_strategy("ours", directory), max_epochs=1, num_sanity_val_steps=0, limit_val_batches=0)
    trainer.fit(net)
    trainer.validate(net, verbose=False)
    trainer.save_checkpoint(path)
    return difference(training, whole, len(net.steps), training.run(ckpt_path=path))


def test_what_is_saved_after_a_validation_goes_on_as_what_is_saved_after_training(tmp_path: Path) -> None:
    """The seed of the orders is in it, so the next epochs have those that they would have had."""
    assert run_ranks(go_on_after_a_validation, 2, tmp_path, env=by_hand_env(2)) == ["", ""]


def go_on_in_a_stream(rank: int, world_size: int, directory: Path) -> str:
    training = Training(lambda: read(nine)(rank), directory, world_size, {"max_epochs": 2})
    path, done = training.saving("cut", "train_end", max_epochs=-1, max_steps=3).saved[0]
    return difference(training, training.run(), done, training.run(ckpt_path=path))


def test_a_stream_without_a_length_goes_on_where_max_steps_has_cut_it_short(tmp_path: Path) -> None:
    """The rest of the epoch comes, as it does of an epoch whose length is known."""
    assert run_ranks(go_on_in_a_stream, 2, tmp_path, env=by_hand_env(2)) == ["", ""]


def resumed_without_validation(rank: int, world_size: int, directory: Path) -> bool:
    training = Training(lambda: shuffled()(rank), directory, world_size, {"limit_val_batches": 1.0, "max_epochs": 2})
    whole = training.saving("whole", "validation_end")
    path, done = whole.saved[0]
    return training.run(ckpt_path=path, limit_val_batches=0).steps == whole.steps[done:]


def test_an_epoch_that_was_saved_at_its_validation_is_not_trained_again_without_it(tmp_path: Path) -> None:
    """Whether a validation is due or not when the run is resumed, the next epoch comes."""
    assert run_ranks(resumed_without_validation, 2, tmp_path, env=by_hand_env(2)) == [True, True]
