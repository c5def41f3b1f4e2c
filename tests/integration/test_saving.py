"""Failed saves: every rank raises the same error, and the previous file stays whole."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_ddp_ext import (
    CheckpointSaveError,
    DDPExtError,
    RankZeroCheckpoint,
)
from tests.harness import training
from tests.harness.training import Net
from tests.integration import checkpointing


class SaveEachEpoch(L.Callback):
    """Saves at the end of each epoch; the second checkpoint is too large for the disk.

    Attributes:
        errors: the error, under the name of the call that raised it.
    """

    def __init__(self, path: Path, *, catch: bool) -> None:
        self.path = path
        self.catch = catch
        self.errors: dict[str, str] = {}

    def on_save_checkpoint(
        self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.current_epoch == 1:
            checkpoint["ballast"] = torch.zeros(16 << 20, dtype=torch.uint8)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        try:
            trainer.save_checkpoint(self.path)
        except DDPExtError as error:
            self.errors["save"] = f"{type(error).__name__}: {error}"
            if not self.catch:
                raise


class Fitted(NamedTuple):
    errors: dict[str, str]  # by the call that raised it: the save, ``fit``, or both
    epoch: int


def fit_on_full_disk(
    kind: training.Kind, directory: Path, callback: SaveEachEpoch, background: bool, epochs: int
) -> Fitted:
    io = checkpointing.make_io(is_background=background)
    trainer = checkpointing.trainer_for(kind, directory, io, [callback], max_epochs=epochs)
    try:
        trainer.fit(Net())
    except DDPExtError as error:
        callback.errors["fit"] = f"{type(error).__name__}: {error}"
    return Fitted(callback.errors, trainer.current_epoch)


class FullDisk(NamedTuple):
    """How a run saves on a full disk, and which calls raise the error.

    Attributes:
        kind: whose strategy the Trainer has; our checkpoint IO saves in both.
        background: whether saves are in the background.
        catch: whether the callback catches an error.
        epochs: the number of epochs to train.
        raised_by: the calls that raise the error.
        ends_after: the number of epochs after which ``fit`` ends.
    """

    kind: training.Kind
    background: bool
    catch: bool
    epochs: int
    raised_by: set[str]
    ends_after: int


# The save of the second epoch fails. If it was in the background, the save of the third
# epoch raises its error, or the end of fit if there is no third one.
FULL_DISKS = {
    "caught": FullDisk(
        "ours", background=False, catch=True, epochs=2, raised_by={"save"}, ends_after=2
    ),
    "raised": FullDisk(
        "stock", background=False, catch=False, epochs=4, raised_by={"save", "fit"}, ends_after=1
    ),
    "raised by the next save": FullDisk(
        "ours", background=True, catch=False, epochs=4, raised_by={"save", "fit"}, ends_after=2
    ),
    "raised at the end": FullDisk(
        "stock", background=True, catch=True, epochs=2, raised_by={"fit"}, ends_after=2
    ),
}


@pytest.mark.lowest
@pytest.mark.parametrize("case", FULL_DISKS.values(), ids=FULL_DISKS)
def test_a_full_disk_fails_on_every_rank_and_harms_nothing(
    case: FullDisk, disk: Path, tmp_path: Path
) -> None:
    """Every rank raises the system's reason, and the earlier checkpoint stays whole.

    The error of a background save is raised by the next save, which is not attempted, or
    by the end of ``fit``.
    """
    path = disk / "it.ckpt"
    callback = SaveEachEpoch(path, catch=case.catch)
    fitted, of_rank_1 = training.on_ranks(
        case.kind, fit_on_full_disk, tmp_path, callback, case.background, case.epochs
    )
    assert fitted == of_rank_1
    assert fitted.errors.keys() == case.raised_by
    assert fitted.epoch == case.ends_after
    reason = f"CheckpointSaveError: cannot save checkpoint {path}: No space left on device; check"
    assert all(error.startswith(reason) for error in fitted.errors.values()), fitted.errors
    assert torch.load(path)["epoch"] == 0
    assert [file.name for file in disk.iterdir()] == ["it.ckpt"]


def saved_with_a_function(kind: training.Kind, directory: Path) -> list[str]:
    """Return the errors of saving a function in a run: in the foreground, and in the
    background.
    """

    class Adds(L.Callback):
        def on_save_checkpoint(
            self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]
        ) -> None:
            checkpoint["function"] = lambda: None

    errors = []
    save = training.At(
        "on_train_epoch_end", lambda trainer: trainer.save_checkpoint(directory / "it.ckpt")
    )
    for is_background in (False, True):
        io = checkpointing.make_io(is_background=is_background)
        trainer = checkpointing.trainer_for(kind, directory, io, [Adds(), save], max_epochs=1)
        with pytest.raises(DDPExtError) as caught:
            trainer.fit(Net())
        errors.append(str(caught.value))
    return errors


def saved_after_a_failure(kind: training.Kind, directory: Path) -> list[str]:
    """Return the errors of saving after the training, where nothing would wait for it."""
    trainer = checkpointing.trainer_for(
        kind, directory, checkpointing.make_io(is_background=True), max_epochs=1
    )
    trainer.fit(Net())
    errors = []
    for name in ("missing\0", "it.ckpt"):
        try:
            trainer.save_checkpoint(directory / name)
        except (DDPExtError, ValueError) as error:
            errors.append(str(error))
    return errors


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    """The error names the object on every rank, and nothing is left."""
    errors, of_rank_1 = training.on_ranks("ours", saved_with_a_function, tmp_path)
    assert errors == of_rank_1
    assert all("saved_with_a_function.<locals>.Adds" in error for error in errors)
    assert not list((tmp_path / "ours").glob("*.ckpt"))


def test_a_save_after_the_training_is_finished_when_it_returns(tmp_path: Path) -> None:
    """Every rank raises its error once, and the next save succeeds."""
    errors, of_rank_1 = training.on_ranks("ours", saved_after_a_failure, tmp_path)
    assert errors == of_rank_1
    [error] = errors
    assert "embedded null byte" in error
    assert torch.load(tmp_path / "ours" / "it.ckpt")["epoch"] == 1


def fail_on_rank_1(trainer: L.Trainer) -> None:
    if trainer.global_rank == 1:
        raise ValueError("on purpose")


def raises_in_training(
    kind: training.Kind, directory: Path, background: bool, callback: Any
) -> str:
    """Return the error of a training that fails on rank 1 in the third batch."""
    io = checkpointing.make_io(is_background=background)
    trainer = checkpointing.trainer_for(
        kind,
        directory,
        io,
        [training.At("on_train_batch_start", fail_on_rank_1, earlier=2), callback],
    )
    with pytest.raises((ValueError, DDPExtError)) as caught:
        trainer.fit(Net())
    return f"{caught.type.__name__}: {caught.value}"


OURS_ON_EXCEPTION = partial(RankZeroCheckpoint, save_on_exception=True, save_last=True)


@pytest.mark.parametrize(
    ("make", "background"),
    [
        pytest.param(OnExceptionCheckpoint, False, id="Lightning's"),
        pytest.param(OURS_ON_EXCEPTION, True, id="ours, in the background"),
    ],
)
def test_an_exception_leaves_its_checkpoint(make: Any, background: bool, tmp_path: Path) -> None:
    """After a failure on rank 1, a callback that saves on an exception has its file, and
    rank 0 names the rank.
    """
    callback = make(dirpath=tmp_path, filename="rest")
    of_rank_0, of_rank_1 = training.on_ranks(
        "ours", raises_in_training, tmp_path, background, callback
    )
    assert of_rank_1 == "ValueError: on purpose"
    assert "rank 1" in of_rank_0
    assert torch.load(tmp_path / "rest.ckpt")["global_step"] == 2


class ErrorsAfterAbort(NamedTuple):
    """The error that ``fit`` raised, and the one that a save after it raised."""

    fitting: str
    saving: str


def fails_over_nccl(kind: training.Kind, directory: Path) -> ErrorsAfterAbort:
    """Fail on rank 1 in a step, and save after ``fit``."""

    def write_earlier(trainer: L.Trainer) -> None:
        for name in ("rest.ckpt", "last.ckpt"):
            (directory / name).write_text("earlier")

    callbacks = [
        training.At("on_train_start", write_earlier),
        training.At("on_train_batch_start", fail_on_rank_1, earlier=2),
        OnExceptionCheckpoint(directory, "rest"),
        RankZeroCheckpoint(directory, save_on_exception=True, save_last=True),
    ]
    strategy = training.make_strategy(
        "ours", directory, process_group_backend=training.backend("nccl_stand_in")
    )
    trainer = training.make_trainer(strategy, callbacks=callbacks, enable_checkpointing=True)
    with pytest.raises((ValueError, DDPExtError)) as fitting:
        trainer.fit(Net())
    with pytest.raises(CheckpointSaveError) as saving:
        trainer.save_checkpoint(directory / "rest.ckpt")
    return ErrorsAfterAbort(f"{fitting.type.__name__}: {fitting.value}", str(saving.value))


def test_nothing_is_saved_once_nccl_was_aborted(tmp_path: Path) -> None:
    """A queued step may have used partial sums, so earlier files stay on every rank.

    ``fit`` still raises the cause. Before its abort, the rank that fails saves its step.
    """
    other, failed = training.on_ranks("ours", fails_over_nccl, tmp_path)
    assert other.fitting.startswith("RankFailedError: ")
    assert failed.fitting == "ValueError: on purpose"
    for errors in (other, failed):
        assert "NCCL was aborted after a failure" in errors.saving
    directory = tmp_path / "ours"
    assert [(directory / name).read_text() for name in ("rest.ckpt", "last.ckpt")] == [
        "earlier"
    ] * 2
    [saved] = directory.rglob("last-preempted.ckpt")
    assert torch.load(saved)["global_step"] == 2
