"""A run that has been resumed saves checkpoints that can be resumed, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from tests.integration.continuing import Moment, Stream
from tests.integration.resumed_runs import Points, Training, difference, generations, ordered, workers
from tests.ranks import by_hand_env, run_ranks

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

    def check(self, rank: int, world_size: int, directory: Path, name: str) -> dict[str, str]:
        training = Training(lambda: self.loaders(rank), directory, world_size, self.options, name=name)
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


VALIDATING = {"limit_val_batches": 1.0, "val_check_interval": 2, "dropout": False}
# The short loader is read for the second time from its third batch on.
CYCLED = (("train_batch_end-2", "train_batch_end-3"), ("train_batch_end-4", "train_batch_end-5", "train_batch_end-12"))
CASES = {
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


@pytest.mark.parametrize(
    "names",
    [
        ["each moment"],
        ["each moment of an epoch's end", "a third time"],
        [name for name in CASES if "max_steps" in name or "accumulation" in name],
        [name for name in CASES if name.startswith("two")],
        ["dropout", "workers that stay", "limit"],
    ],
    ids=["each moment", "third time", "steps and accumulation", "two loaders", "others"],
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
