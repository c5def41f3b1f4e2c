"""A resumed run equals one that did not stop, where ``test_resume_sweep`` draws no case:
loaders with a state of their own or of several lengths, several failures, a save after
``fit``, and a resume as stock's.

``test_starting_again`` has the runs whose epoch starts again.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.harness.ranks import run_ranks
from tests.harness.training import (
    At,
    Kind,
    assert_same,
    make_strategy,
    make_trainer,
    on_both,
    on_ranks,
    signalled,
    warnings_with,
)
from tests.integration import continuing

SAMPLES = 16  # two ranks read them in four batches of two
MIDDLE = "train_batch_end-2"  # of the first epoch
NO_DIFFERENCE = ["", ""]  # of a resumed run, on both ranks

# Loaders that keep their own state.


class ByHand(DataLoader[Any]):
    """Loads a stream, and has no more than the two methods that Lightning needs for its state.

    Like torchdata's loader, it counts a batch when it is fetched, and a restored state
    is for the next iterator only.
    """

    given = start = 0

    def __iter__(self) -> Any:
        self.given = self.start
        self.start = 0
        return self._batches(self.given)

    def _batches(self, start: int) -> Any:
        for batch in islice(super().__iter__(), start, None):
            self.given += 1
            yield batch
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "first": self.dataset.numbers[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # As a reader of files continues at its place in the file.
        self.dataset.numbers = range(state["first"], state["first"] + len(self.dataset.numbers))
        self.start = state["given"]


class LikeLitdata(ByHand):
    """Forgets a restored state only when an iterator is read to its end, as litdata's
    loader does.
    """

    def __iter__(self) -> Any:
        self.given = self.start
        yield from self._batches(self.start)
        self.start = 0


def stateful_stream(rank: int, **options: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(continuing.Stream(12, rank), batch_size=2, **options)


# Loaders of several lengths.


def short_and_long() -> CombinedLoader:
    """Return loaders of 4 and 10 batches, of which the first one does not begin again."""
    long = DataLoader(
        continuing.Numbers(20), 2, shuffle=True, generator=torch.Generator().manual_seed(20)
    )
    return CombinedLoader([DataLoader(continuing.Numbers(8), 2, shuffle=True), long], "max_size")


# Models and callbacks that read batches themselves.


class Iterating(continuing.Net):
    """Fetches its batches itself."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:
        ready = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return super().training_step(next(dataloader_iter)[0], ready - 1)


class Looks(L.Callback):
    """Reads a batch of the loader before each step."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        next(iter(trainer.train_dataloader))


WITHOUT_DROPOUT = {"model": continuing.WITHOUT_DROPOUT}
IN_STEP = {
    **WITHOUT_DROPOUT,  # random numbers within a step are not repeated
    "use_distributed_sampler": False,
    "accumulate_grad_batches": 2,
}


class Case(NamedTuple):
    """A run, and the points at which it is saved and resumed, see ``continuing.Saver``.

    Attributes:
        loaders: makes the loaders of a rank.
        saved_at: points of the whole run.
        saved_again_at: points of the resumed runs, by default before their first batch.
        options: of the Trainer.
    """

    loaders: Callable[[int], Any]
    saved_at: Sequence[str] = (MIDDLE,)
    saved_again_at: Sequence[str] = ("train_batch_start-2",)
    options: Mapping[str, Any] = WITHOUT_DROPOUT


def shuffled(rank: int) -> Any:
    return continuing.shuffled(SAMPLES)()


CASES = {
    # Each epoch has five batches, and a step has two of them or the last one.
    "the state of each rank": Case(
        lambda rank: ByHand(continuing.Stream(9, rank), batch_size=2),
        saved_at=["train_batch_end-1", "train_batch_end-4"],
        saved_again_at=["train_batch_end-7"],
        options={"max_epochs": 2, **IN_STEP},
    ),
    "a state that is kept until the epoch's end": Case(
        lambda rank: LikeLitdata(continuing.Stream(9, rank), batch_size=2),
        saved_again_at=["train_batch_end-8"],
        options=IN_STEP,
    ),
    "a stream in torchdata's loader": Case(stateful_stream, saved_again_at=["train_epoch_end-6"]),
    "its workers": Case(
        lambda rank: stateful_stream(rank, **continuing.workers(2)),
        saved_again_at=["train_batch_end-9"],
    ),
    "a state before a step": Case(
        lambda rank: StatefulDataLoader(continuing.Numbers(SAMPLES), 2, shuffle=True)
    ),
    # The point is within a step that begins after the first loader's end.
    "max_size": Case(
        lambda rank: short_and_long(),
        saved_at=["train_batch_end-7"],
        saved_again_at=(),
        options=IN_STEP,
    ),
    # A callback sets the number when an epoch begins.
    "a schedule of accumulation": Case(
        shuffled,
        saved_again_at=["train_batch_end-4"],
        options={"callbacks": [GradientAccumulationScheduler({0: 2, 1: 4})], **WITHOUT_DROPOUT},
    ),
    "dataloader_iter": Case(shuffled, options={"model": partial(Iterating, dropout=0.0)}),
    "a limit": Case(shuffled, options={"limit_train_batches": 3, **WITHOUT_DROPOUT}),
    "loaders that are made again": Case(
        shuffled, options={"reload_dataloaders_every_n_epochs": 1, **WITHOUT_DROPOUT}
    ),
    "a callback that reads": Case(shuffled, options={"callbacks": [Looks()], **WITHOUT_DROPOUT}),
}


def continue_case(rank: int, world_size: int, directory: Path, name: str) -> dict[str, str]:
    """Return the differences of runs that resume, and resume again."""
    case = CASES[name]
    return continuing.generations(
        continuing.Training(partial(case.loaders, rank), directory, options=dict(case.options)),
        case.saved_at,
        case.saved_again_at,
    )


@pytest.mark.parametrize("name", CASES)
def test_a_run_continues_from_each_of_its_checkpoints(name: str, tmp_path: Path) -> None:
    """No batch is lost or repeated, also where a run resumes within an optimiser step."""
    assert run_ranks(continue_case, 2, tmp_path, name) == [{}, {}]


# Failures and stops.

# The batches that raise, by epoch and number, and the points at which they do.
FAILURES = {
    "exception-1": (0, 1),  # within an epoch
    "exception-3": (0, 3),  # the last batch of an epoch
    "exception-4": (1, 0),  # the first batch of an epoch
}


def fail_again_and_again(rank: int, world_size: int, directory: Path) -> str:
    """Describe how a run that fails three times differs from one that does not."""
    # The workers of the training loader persist from epoch to epoch.
    loaders = continuing.shuffled(SAMPLES, **continuing.KEPT)
    training = continuing.Training(loaders, directory, options=WITHOUT_DROPOUT)
    whole = training.run()
    done = 0
    path = None
    for point, epoch_and_batch in FAILURES.items():
        run = training.run(point, ckpt_path=path, fail_at=epoch_and_batch)
        assert run.steps == whole.steps[done : done + len(run.steps)]
        path = run.saved[point]
        done += len(run.steps)
    return continuing.difference(whole, done, training.run(ckpt_path=path))


@pytest.mark.lowest
def test_a_run_that_fails_again_and_again_trains_on_each_batch_once(tmp_path: Path) -> None:
    """A run continues with the batch that raised.

    The batch is the first, the last or another one of an epoch.
    """
    assert run_ranks(fail_again_and_again, 2, tmp_path) == NO_DIFFERENCE


def stop_before_first_batch(rank: int, world_size: int, directory: Path) -> str:
    """Describe how a run differs that a signal stops when its second epoch has begun, and
    that resumes with a hook that loads the data before the checkpoint.
    """
    training = continuing.Training(
        continuing.shuffled(SAMPLES),
        directory,
        options={"max_epochs": 2, "default_root_dir": directory / "run"},
    )
    whole = training.run()
    stopped = training.run(callbacks=[signalled("on_train_epoch_start", earlier=1)])
    assert stopped.status is not None
    loads = At("setup", lambda trainer: trainer.estimated_stepping_batches)
    resumed = training.run(ckpt_path="last", callbacks=[loads])
    return continuing.difference(whole, len(stopped.steps), resumed)


def test_an_epoch_that_was_stopped_before_its_first_batch_continues(tmp_path: Path) -> None:
    """The seeds of its workers were drawn before the random state was saved. The order is
    that of the checkpoint's seed, although a hook has loaded the data with another one.
    """
    assert run_ranks(stop_before_first_batch, 2, tmp_path) == NO_DIFFERENCE


# Checkpoints that are saved after a fit.


def save_after_fit(directory: Path, *functions: str, **limits: int) -> str:
    """Fit, call these functions of the Trainer, and save."""
    L.seed_everything(7, verbose=False)
    module = continuing.Net(continuing.shuffled(20))
    trainer = make_trainer(
        make_strategy("ours", directory), num_sanity_val_steps=0, limit_val_batches=0, **limits
    )
    for function in ("fit", *functions):
        getattr(trainer, function)(module)
    path = directory / "finished.ckpt"
    trainer.save_checkpoint(path)
    return str(path)


def resume_after_fit(
    rank: int, world_size: int, directory: Path
) -> tuple[list[str], continuing.Resumed]:
    """Describe how runs differ that resume after ``fit`` has returned; also return one that
    resumes after ``validate``.
    """
    training = continuing.Training(continuing.shuffled(20), directory, options={"max_epochs": 2})
    whole = training.run()
    differences = []
    for done, limits in ((5, {"max_epochs": 1}), (3, {"max_steps": 3})):
        resumed = training.run(ckpt_path=save_after_fit(directory, **limits))
        differences.append(continuing.difference(whole, done, resumed))
    return differences, continuing.resume(
        training, save_after_fit(directory, "validate", max_steps=3)
    )


def test_a_finished_run_continues_where_training_was(tmp_path: Path) -> None:
    """A checkpoint that is saved after ``fit`` has returned continues the training.

    After ``validate`` the Trainer has dropped the loaders, so an unfinished epoch of two
    starts again, with a warning.
    """
    by_rank = run_ranks(resume_after_fit, 2, tmp_path)
    for differences, after_validate in by_rank:
        assert differences == ["", ""]
        assert len(after_validate.run.steps) == 2 * 5
    assert len(by_rank[0][1].warned) == 1


# Lightning's own way to resume.

LEFT = "ended before the epoch ended"  # in Lightning's warning of a resume within an epoch
FIRST_EPOCH_END = "train_epoch_end-4"


def training_of(kind: Kind, directory: Path) -> continuing.Training:
    """Return a training on a shuffled loader for two epochs."""
    return continuing.Training(
        continuing.shuffled(SAMPLES), directory, options={"max_epochs": 2}, side=kind
    )


def save_at(kind: Kind, directory: Path, *points: str) -> list[str]:
    """Return the checkpoints of a training at these points."""
    return [*training_of(kind, directory).run(*points).saved.values()]


def resume_as_stock(
    kind: Kind, directory: Path, paths: list[str]
) -> tuple[list[continuing.Run], int]:
    """Resume, after an exact resume with ours; return the runs, and the number of Lightning's
    warnings that an epoch was left.
    """
    training = training_of(kind, directory)
    with warnings_with(LEFT) as shown:
        if kind == "ours":
            training.run(ckpt_path=paths[0])
            training.strategy = {"resume_data": "stock"}
        runs = [training.run(ckpt_path=path) for path in paths]
    return runs, len(shown)


def test_data_and_random_numbers_can_be_left_to_stock(tmp_path: Path) -> None:
    """With ``resume_data="stock"``, batches and weights are those of stock's resume.

    Rank 0 shows Lightning's warning, which is hidden only where an epoch continues.
    """
    paths, _ = on_ranks("ours", save_at, tmp_path, MIDDLE, FIRST_EPOCH_END)
    ours, stock = on_both(resume_as_stock, tmp_path, paths)
    for (own_runs, own_shown), (stock_runs, shown) in zip(ours, stock, strict=True):
        assert [run.steps for run in own_runs] == [run.steps for run in stock_runs]
        assert_same([run.weights for run in own_runs], [run.weights for run in stock_runs])
        assert own_shown == shown
    assert ours[0][1] == 1
