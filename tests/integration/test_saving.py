"""Saves that fail or are killed: ranks raise the same error, and the checkpoint before
is left untouched.
"""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_ddp_ext import (
    CheckpointSaveError,
    ConfigurationError,
    DDPExtError,
    RankZeroCheckpoint,
    RankZeroCheckpointIO,
)
from lightning_ddp_ext.checkpoint.archive import Archive
from tests.harness import ranks, training
from tests.harness.training import Net
from tests.integration import checkpointing
from tests.integration.checkpointing import Keeper


class Ballast(L.Callback):
    """Makes the checkpoints of some epochs too large for the disk."""

    def __init__(self, epochs: tuple[int, ...]) -> None:
        self.epochs = epochs

    def on_save_checkpoint(
        self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.current_epoch in self.epochs:
            checkpoint["ballast"] = torch.zeros(16 << 20, dtype=torch.uint8)


class SaveEachEpoch(Ballast):
    """Saves at the end of each epoch, of which the second does not fit; with ``catch``,
    trains on.
    """

    def __init__(self, path: Path, *, catch: bool) -> None:
        super().__init__((1,))
        self.path = path
        self.catch = catch
        self.errors: list[str] = []

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        try:
            trainer.save_checkpoint(self.path)
        except DDPExtError as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            if not self.catch:
                raise


class Fitted(NamedTuple):
    """The errors that the callback met, the one that ended ``fit``, and the epoch."""

    met: list[str]
    raised: str | None
    epoch: int


def fit_on_full_disk(
    kind: training.Kind, directory: Path, callback: SaveEachEpoch, background: bool, epochs: int
) -> Fitted:
    io = RankZeroCheckpointIO(background=background)
    trainer = checkpointing.trainer_for(kind, directory, io, [callback], max_epochs=epochs)
    raised = None
    try:
        trainer.fit(Net())
    except DDPExtError as error:
        raised = f"{type(error).__name__}: {error}"
    return Fitted(callback.errors, raised, trainer.current_epoch)


class FullDisk(NamedTuple):
    """Whether saves are in the background, whether the callback catches an error, and
    what follows from both: who gets the error, and after how many epochs ``fit`` ends.
    """

    kind: training.Kind
    background: bool
    catch: bool
    is_met: bool
    is_raised: bool
    ends_after: int
    epochs: int = 4


FULL_DISKS = [
    FullDisk("ours", False, catch=True, is_met=True, is_raised=False, ends_after=2, epochs=2),
    FullDisk("stock", False, catch=False, is_met=True, is_raised=True, ends_after=1),
    # The save of the second epoch fails; that of the third one raises its error, or the
    # end of fit does.
    FullDisk("ours", True, catch=False, is_met=True, is_raised=True, ends_after=2),
    FullDisk("stock", True, catch=True, is_met=False, is_raised=True, ends_after=2, epochs=2),
]


@pytest.mark.lowest
@pytest.mark.parametrize("case", FULL_DISKS)
def test_a_full_disk_fails_on_every_rank_and_harms_nothing(
    case: FullDisk, disk: Path, tmp_path: Path
) -> None:
    """The error has the system's reason, the earlier checkpoint stays whole, and training
    ends or continues.

    In the background the error comes with the next save, which is not tried, or at the
    end.
    """
    path = disk / "it.ckpt"
    callback = SaveEachEpoch(path, catch=case.catch)
    found, others = training.on_ranks(
        case.kind, fit_on_full_disk, tmp_path, callback, case.background, case.epochs
    )
    assert found == others
    assert bool(found.met) is case.is_met
    assert (found.raised is not None) is case.is_raised
    assert found.epoch == case.ends_after
    told = [*found.met, found.raised][0]
    assert told.startswith(
        f"CheckpointSaveError: cannot save checkpoint {path}: No space left on device; check its"
    )
    assert torch.load(path)["epoch"] == 0
    assert [file.name for file in disk.iterdir()] == ["it.ckpt"]


def saved_with_a_function(kind: training.Kind, directory: Path) -> list[str]:
    """Return the error of saving a function, in the foreground and in the background."""

    class Adds(L.Callback):
        def on_save_checkpoint(
            self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]
        ) -> None:
            checkpoint["mine"] = lambda: None

    io = RankZeroCheckpointIO()
    errors = []
    trainer = checkpointing.trainer_for(kind, directory, io, [Adds()], max_epochs=1)
    trainer.fit(Net())
    for io.background in (False, True):
        with pytest.raises(DDPExtError) as caught:
            trainer.save_checkpoint(directory / "it.ckpt")
        errors.append(str(caught.value))
    return errors


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    """The error names the object on every rank, and nothing is left."""
    one, other = training.on_ranks("ours", saved_with_a_function, tmp_path)
    assert one == other
    assert all("saved_with_a_function.<locals>.Adds" in text for text in one)
    assert not list((tmp_path / "ours").glob("*.ckpt"))


def fail(trainer: L.Trainer) -> None:
    if trainer.global_rank == 1:
        raise ValueError("on purpose")


def raises_in_training(
    kind: training.Kind, directory: Path, background: bool, callback: Any
) -> str:
    io = RankZeroCheckpointIO(background=background)
    trainer = checkpointing.trainer_for(
        kind, directory, io, [training.At("on_train_batch_start", fail, earlier=2), callback]
    )
    with pytest.raises((ValueError, DDPExtError)) as caught:
        trainer.fit(Net())
    return f"{caught.type.__name__}: {caught.value}"


OURS_ON_EXCEPTION = partial(RankZeroCheckpoint, save_on_exception=True, save_last=True)


@pytest.mark.parametrize(
    ("make", "background"), [(OnExceptionCheckpoint, False), (OURS_ON_EXCEPTION, True)]
)
def test_an_exception_leaves_its_checkpoint(make: Any, background: bool, tmp_path: Path) -> None:
    """After a failure on one rank, callbacks that save on an exception have their file,
    and the cause is raised.
    """
    callback = make(dirpath=tmp_path, filename="rest")
    told, failed = training.on_ranks("ours", raises_in_training, tmp_path, background, callback)
    assert failed == "ValueError: on purpose"
    assert "rank 1" in told
    assert torch.load(tmp_path / "rest.ckpt")["global_step"] == 2


class Errors(NamedTuple):
    """The errors of ``fit``, and of a save after it."""

    fitting: str
    saving: str


def fails_over_nccl(kind: training.Kind, directory: Path) -> Errors:

    def write_earlier(trainer: L.Trainer) -> None:
        for name in ("rest.ckpt", "last.ckpt"):
            (directory / name).write_text("earlier")

    callbacks = [
        training.At("on_train_start", write_earlier),
        training.At("on_train_batch_start", fail, earlier=2),
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
    return Errors(f"{fitting.type.__name__}: {fitting.value}", str(saving.value))


def test_nothing_is_saved_once_nccl_was_aborted(tmp_path: Path) -> None:
    """Waiting kernels then return, and a queued step uses partial sums; the error is
    still the cause.
    """
    told, failed = training.on_ranks("ours", fails_over_nccl, tmp_path)
    assert told.fitting.startswith("RankFailedError: ")
    assert failed.fitting == "ValueError: on purpose"
    for errors in (told, failed):
        assert "NCCL was aborted after rank 1 (host " in errors.saving
    assert {path.read_text() for path in (tmp_path / "ours").glob("*.ckpt")} == {"earlier"}


def files_at_every_step(
    kind: training.Kind, directory: Path, place: Path, options: dict[str, Any]
) -> list[list[str]]:
    seen: list[list[str]] = []

    class Looks(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            names = sorted(path.name for path in place.glob("*.ckpt")) if place.exists() else []
            seen.append([name for name in names if (place / name).exists()])

    io = RankZeroCheckpointIO(background=True)
    callback = checkpointing.checkpoint_callback(
        kind, dirpath=place, filename="{step}", every_n_train_steps=1, **options
    )
    trainer = checkpointing.trainer_for(
        kind, directory, io, [callback, Looks(), Ballast((3,))], max_epochs=3
    )
    trainer.fit(Net())
    trainer.save_checkpoint(directory / "large.ckpt")
    trainer.test(Net(), ckpt_path=directory / "large.ckpt", verbose=False)
    return seen


@pytest.mark.lowest
@pytest.mark.parametrize("kind", training.KINDS)
def test_in_the_background_there_is_always_a_checkpoint(
    kind: training.Kind, tmp_path: Path
) -> None:
    """No file is removed before its successor is on the disk, a link always has a
    target, and files are readable.
    """
    place = tmp_path / "kept"
    options = {"save_last": "link"} if kind == "stock" else {}
    seen = training.on_ranks(kind, files_at_every_step, tmp_path, place, options)[0]
    first = next(index for index, names in enumerate(seen) if names)
    assert all(names for names in seen[first:])
    # Three epochs have four steps each.
    names = {path.name for path in place.iterdir()}
    assert names == {"step=12.ckpt"} | ({"last.ckpt"} if kind == "stock" else set())
    assert all(torch.load(place / name)["global_step"] == 12 for name in names)


def best_by_rank(kind: training.Kind, directory: Path) -> dict[str, Any]:
    """Return a score that differs between ranks, so that each alone would choose
    another checkpoint.
    """

    class Scores(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            mine = trainer.current_epoch if trainer.global_rank == 0 else -trainer.current_epoch
            module.log("score", float(mine), rank_zero_only=False)

    options = {"save_top_k": 2, "save_weights_only": True}
    callback = RankZeroCheckpoint(
        directory / "best", "{epoch}-{score:.1f}", monitor="score", **options
    )
    other = RankZeroCheckpoint(directory / "other", "{epoch}", every_n_epochs=3)
    checkpointing.trainer_for(kind, directory, None, [Scores(), callback, other], max_epochs=4).fit(
        Net()
    )
    return {name: value for name, value in callback.state_dict().items() if name != "dirpath"}


@pytest.mark.lowest
def test_the_best_scores_are_rank_zeros_on_every_rank(tmp_path: Path) -> None:
    """All ranks name the same best checkpoint; another callback also saves."""
    one, other = training.on_ranks("stock", best_by_rank, tmp_path)
    assert one == other
    assert Path(one["best_model_path"]).name == "epoch=0-score=0.0.ckpt"
    names = ["epoch=0-score=0.0.ckpt", "epoch=1-score=1.0.ckpt"]
    assert sorted(path.name for path in (tmp_path / "stock" / "best").iterdir()) == names
    assert "optimizer_states" not in torch.load(one["best_model_path"])
    assert "optimizer_states" in torch.load(tmp_path / "stock" / "other" / "epoch=2.ckpt")


@pytest.mark.lowest
def test_the_callback_brings_its_io_to_a_single_device(tmp_path: Path) -> None:
    """The callback saves without a strategy of several ranks; another IO in the Trainer
    is an error.
    """
    callback = RankZeroCheckpoint(tmp_path, checkpoint_io=RankZeroCheckpointIO(background=True))
    options = {"devices": 1, "callbacks": [callback], "enable_checkpointing": True, "max_epochs": 1}
    trainer, other = (
        training.make_trainer("auto", plugins=plugins, **options)
        for plugins in ([], [RankZeroCheckpointIO()])
    )
    trainer.fit(Net())
    assert isinstance(trainer.strategy.checkpoint_io, RankZeroCheckpointIO)
    assert torch.load(callback.best_model_path)["epoch"] == 0
    replaced = {"save_checkpoint", "remove_checkpoint", "load_checkpoint", "teardown"}
    assert not replaced & {
        *vars(trainer.strategy),
        *vars(trainer.strategy.checkpoint_io),
    }, "a run leaves no methods"
    with pytest.raises(
        ConfigurationError, match="would replace the Trainer's RankZeroCheckpointIO"
    ):
        other.fit(Net())


@pytest.mark.lowest
def test_the_callbacks_state_is_that_of_model_checkpoint() -> None:
    """A run that was started with Lightning's callback can be resumed with ours, and
    the other way round.
    """
    ours, stock = (
        kind(monitor="loss", save_top_k=2) for kind in (RankZeroCheckpoint, ModelCheckpoint)
    )
    assert ours.state_key == stock.state_key
    with pytest.raises(TypeError, match="save_topk"):
        RankZeroCheckpoint(save_topk=2)


class Waits:
    """Blocks its pickling until the test allows it."""

    def __reduce__(self) -> Any:
        ranks.hold("saving")
        return Waits, ()


class OwnIO(RankZeroCheckpointIO):
    """A user's checkpoint IO."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        torch.save(checkpoint, path)


def saves_slowly(
    rank: int,
    world_size: int,
    directory: Path,
    io: type[RankZeroCheckpointIO],
    save_deadline: float,
) -> None:
    save = training.At(
        "on_train_epoch_end", lambda trainer: trainer.save_checkpoint(directory / "it.ckpt")
    )
    strategy = training.make_strategy(
        "ours", directory, checkpoint_io=io(), save_deadline=save_deadline
    )
    training.make_trainer(strategy, callbacks=[Keeper(Waits()), save], max_epochs=1).fit(Net())


@pytest.mark.parametrize(
    ("io", "save_deadline", "is_finished"),
    [(RankZeroCheckpointIO, 60, True), (OwnIO, 60, True), (RankZeroCheckpointIO, 1, False)],
)
def test_a_save_is_finished_when_another_rank_dies(
    io: type[RankZeroCheckpointIO], save_deadline: float, is_finished: bool, tmp_path: Path
) -> None:
    """A save does not need the other ranks, so rank 0 finishes it before it exits, or
    exits at the deadline.
    """
    with ranks.RankProcesses(saves_slowly, 2, tmp_path, io, save_deadline) as processes:
        processes.wait_for("saving", rank=0)
        processes.kill(1)
        processes.wait_for_output(
            "This rank will finish writing its checkpoint before it exits", rank=0
        )
        if is_finished:
            processes.release(0)
        outcome, _ = processes.wait()
    assert outcome.exit_code != 0
    assert (tmp_path / "it.ckpt").exists() == is_finished
    if is_finished:
        assert "rank 1" in outcome.failure.message
        assert torch.load(tmp_path / "it.ckpt", weights_only=False)["global_step"] == 4
        assert not list(tmp_path.glob(".ddpx-*.partial"))


KILLS = max(50, int(os.environ.get("SOAK_COUNT", 0))) // 2
NAMES = "abcd"


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_a_killed_save_leaves_a_whole_checkpoint(background: bool, tmp_path: Path) -> None:
    """Many kills at random moments each leave a whole file and at most one leftover,
    which the next start removes.
    """
    [hits] = ranks.run_ranks(kill_writers, 1, tmp_path / "it.ckpt", background, time_limit=170)
    assert hits > KILLS / 10, "kills that came in the midst of writing"


def kill_writers(rank: int, world_size: int, path: Path, background: bool) -> int:
    """Fork one writer after another, and kill each; how many left something
    half-written.
    """
    moments = random.Random(1)
    number = hits = 0
    for _ in range(KILLS):
        number, was_hit = kill_once(path, background, number, moments.uniform(0, 3))
        hits += was_hit
    assert number > 0
    return hits


def kill_once(path: Path, background: bool, first: int, saves: float) -> tuple[int, bool]:
    """Kill a writer about in its ``saves``-th save; return the next number, and whether
    the save was hit.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        save_without_end(path, background, first, writer)
    os.close(writer)
    with os.fdopen(reader) as told:
        for _ in range(int(saves) + 1):
            last = int(told.readline())
        spin(saves % 1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    leftovers = list(path.parent.glob(".ddpx-*.partial"))
    for leftover in leftovers:
        os.utime(leftover, (0, 0))  # an hour passes
    assert {*path.parent.iterdir()} <= {path, *leftovers}
    assert len(leftovers) <= 1, "those of earlier kills are removed when a writer starts"
    if not path.exists():  # in the background the first may not be there yet
        assert background
        assert first == 0
        return 0, bool(leftovers)
    content: dict[str, Any] = torch.load(path)
    Archive.open(path).check()
    assert all(torch.all(content[name] == content["number"]) for name in NAMES), (
        "the content is of one moment"
    )
    assert content["number"] >= last - (2 if background else 0), "what was saved before is not lost"
    return int(content["number"]) + 1, bool(leftovers)


def save_without_end(path: Path, background: bool, number: int, told: int) -> None:
    """Save one checkpoint after another, each filled with its number."""
    from lightning_ddp_ext import RankZeroCheckpointIO

    io = RankZeroCheckpointIO(background=background)
    weights = {name: torch.full((50_000,), number) for name in NAMES}
    while True:
        io.save_checkpoint({"number": number, **weights}, path)
        os.write(told, b"%d\n" % number)
        number += 1
        for weight in weights.values():
            weight.fill_(number)


def spin(share: float) -> None:
    """Let a share of the time of about one save pass, in work rather than in sleep."""
    for _ in range(int(share * 4)):
        torch.rand(100_000).sort()
