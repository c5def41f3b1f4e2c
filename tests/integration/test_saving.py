"""Checkpoint callbacks act on all ranks together, in the foreground and background. After
failed and killed saves every rank raises the same error, and a whole checkpoint is left.
"""

import os
import random
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

from lightning_ddp_ext import (
    CheckpointSaveError,
    DDPExtError,
    DDPExtStrategy,
    RankZeroCheckpoint,
    RankZeroCheckpointIO,
)
from tests.harness import ranks, training
from tests.integration import checkpointing

LARGE = 16 << 20  # bytes, which a background save still writes when the test starts to read


def files_at_every_step(
    kind: training.Kind, directory: Path, kept: Path, save_last: Literal["link"] | None
) -> list[list[str]]:
    """Save in the background after each step; return the files after each step, except
    links to no file.
    """
    names: list[list[str]] = []
    saver = checkpointing.checkpoint_callback(
        kind, dirpath=kept, filename="{step}", every_n_train_steps=1, save_last=save_last
    )

    def list_files(*_: Any) -> None:
        names.append([path.name for path in kept.glob("*.ckpt") if path.exists()])

    callbacks = [saver, LambdaCallback(on_train_batch_end=list_files)]
    io = checkpointing.make_io(is_background=True)
    # In each epoch, a rank has four steps.
    checkpointing.trainer_for(kind, directory, io, callbacks, max_epochs=3).fit(training.Net())
    return names


@pytest.mark.lowest
@pytest.mark.parametrize(
    ("kind", "save_last", "names_at_end"),
    [("ours", None, {"step=12.ckpt"}), ("stock", "link", {"step=12.ckpt", "last.ckpt"})],
)
def test_in_the_background_there_is_always_a_checkpoint(
    kind: training.Kind,
    save_last: Literal["link"] | None,
    names_at_end: set[str],
    tmp_path: Path,
) -> None:
    """No file is removed before its successor is on the disk, and a link has a target."""
    kept = tmp_path / "kept"
    names_by_step, _ = training.on_ranks(kind, files_at_every_step, tmp_path, kept, save_last)
    first = next(step for step, names in enumerate(names_by_step) if names)
    assert all(names_by_step[first:])
    assert {path.name for path in kept.iterdir()} == names_at_end
    assert all(torch.load(kept / name)["global_step"] == 12 for name in names_at_end)


def files_after_a_failure(kind: training.Kind, directory: Path) -> list[str]:
    """Return the error of the run, and the names of the callback's files that it leaves."""
    kept = directory.parent / "kept"
    saver = checkpointing.checkpoint_callback(
        kind, dirpath=kept, filename="{step}", every_n_train_steps=1
    )
    io = checkpointing.FailsWhenAwaited(lambda path: path.endswith("step=2.ckpt"))
    trainer = checkpointing.trainer_for(kind, directory, io, [saver], max_epochs=1)
    error = training.raised(CheckpointSaveError, trainer.fit, training.Net())
    return [str(error).partition(";")[0], *(path.name for path in kept.glob("step=*"))]


@pytest.mark.parametrize("kind", training.KINDS)
def test_a_failed_background_save_leaves_the_checkpoint_before_it(
    kind: training.Kind, tmp_path: Path
) -> None:
    """Every rank raises its error in the next save, and nothing is removed."""
    for error, *names in training.on_ranks(kind, files_after_a_failure, tmp_path):
        assert error == "cannot save checkpoint /dev/null/it.ckpt: File exists"
        assert names == ["step=1.ckpt"]


def test_the_strategy_completes_lightnings_wrapper() -> None:
    """``AsyncCheckpointIO()`` saves as our IO does, unless it wraps another one."""
    for inner in (None, TorchCheckpointIO()):
        io: Any = DDPExtStrategy(checkpoint_io=AsyncCheckpointIO(inner)).checkpoint_io
        assert type(io) is AsyncCheckpointIO
        assert type(io.checkpoint_io) is type(inner or RankZeroCheckpointIO())


def add_large(trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
    checkpoint["large"] = torch.zeros(LARGE, dtype=torch.uint8)


def read_while_writing(kind: training.Kind, directory: Path) -> None:
    """Save a large checkpoint in the background, and read it in the next step."""
    path = directory / "large.ckpt"
    enlarge = LambdaCallback(on_save_checkpoint=add_large)
    io = checkpointing.make_io(is_background=True)
    save = training.At("on_train_epoch_end", lambda trainer: trainer.save_checkpoint(path))
    read = training.At("on_train_epoch_end", lambda trainer: trainer.strategy.load_checkpoint(path))
    trainer = checkpointing.trainer_for(kind, directory, io, [enlarge, save, read], max_epochs=1)
    trainer.fit(training.Net())


@pytest.mark.parametrize("kind", training.KINDS)
def test_a_checkpoint_can_be_read_right_after_its_background_save(
    kind: training.Kind, tmp_path: Path
) -> None:
    """All ranks wait until the file is complete."""
    training.on_ranks(kind, read_while_writing, tmp_path)


class Scores(L.Callback):
    """Logs a score that rises on rank 0, and falls on the others."""

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        sign = 1 if trainer.global_rank == 0 else -1
        module.log("score", float(sign * trainer.current_epoch), rank_zero_only=False)


def save_the_best(kind: training.Kind, directory: Path) -> dict[str, Any]:
    """Save the weights with the two lowest scores, and everything after each step; return
    the record of the former.
    """
    best = checkpointing.checkpoint_callback(
        kind,
        dirpath=directory / "best",
        filename="{epoch}-{score:.1f}",
        monitor="score",
        save_top_k=2,
        save_weights_only=True,
    )
    every_step = checkpointing.checkpoint_callback(
        kind, dirpath=directory / "all", filename="{step}", every_n_train_steps=1
    )
    callbacks = [Scores(), best, every_step]
    checkpointing.trainer_for(kind, directory, None, callbacks, max_epochs=4).fit(training.Net())
    return best.state_dict()


@pytest.mark.lowest
@pytest.mark.parametrize("kind", training.KINDS)
def test_the_best_checkpoints_are_those_of_rank_zeros_scores(
    kind: training.Kind, tmp_path: Path
) -> None:
    """Every rank names the checkpoint that is best by rank 0's score, and the two best
    are kept.

    Weights alone are saved by the callback that is asked to, and by no other.
    """
    record, record_of_rank_1 = training.on_ranks(kind, save_the_best, tmp_path)
    assert record == record_of_rank_1
    assert Path(record["best_model_path"]).name == "epoch=0-score=0.0.ckpt"
    kept = {path.name for path in (tmp_path / kind / "best").iterdir()}
    assert kept == {"epoch=0-score=0.0.ckpt", "epoch=1-score=1.0.ckpt"}
    assert "optimizer_states" not in torch.load(record["best_model_path"])
    assert "optimizer_states" in torch.load(tmp_path / kind / "all" / "step=16.ckpt")


@pytest.mark.lowest
@pytest.mark.parametrize("plugins", [[], [checkpointing.make_io(is_background=True)]])
def test_the_callback_also_works_on_a_single_device(plugins: list[Any], tmp_path: Path) -> None:
    """It brings its IO unless the Trainer has another one, and leaves no method replaced."""
    callback = RankZeroCheckpoint(tmp_path)
    trainer = training.make_trainer(
        "auto",
        devices=1,
        callbacks=[RankZeroCheckpoint(every_n_epochs=2), callback],
        plugins=plugins,
        enable_checkpointing=True,
        max_epochs=1,
    )
    trainer.fit(training.Net())
    io = trainer.strategy.checkpoint_io
    assert io in plugins or type(io) is RankZeroCheckpointIO
    assert torch.load(callback.best_model_path)["epoch"] == 0
    replaced = {"save_checkpoint", "remove_checkpoint", "load_checkpoint", "teardown"}
    assert not replaced & {*vars(trainer.strategy), *vars(io)}


@pytest.mark.lowest
def test_the_callbacks_state_is_that_of_model_checkpoint() -> None:
    """A run that one of the callbacks started can be resumed with the other."""
    options = {"monitor": "loss", "save_top_k": 2}
    assert RankZeroCheckpoint(**options).state_key == ModelCheckpoint(**options).state_key


# Failed saves.


def add_ballast(trainer: L.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
    """Make the checkpoint of the second epoch too large for the disk."""
    if trainer.current_epoch == 1:
        checkpoint["ballast"] = torch.zeros(16 << 20, dtype=torch.uint8)


def fit_on_full_disk(
    kind: training.Kind, directory: Path, path: Path, is_background: bool, epochs: int
) -> tuple[str, int]:
    """Save at the end of each epoch; return the error, and the number of epochs before it."""
    saving = LambdaCallback(
        on_save_checkpoint=add_ballast,
        on_train_epoch_end=lambda trainer, module: trainer.save_checkpoint(path),
    )
    io = checkpointing.make_io(is_background=is_background)
    trainer = checkpointing.trainer_for(kind, directory, io, [saving], max_epochs=epochs)
    error = training.raised(CheckpointSaveError, trainer.fit, training.Net())
    return str(error), trainer.current_epoch


@pytest.mark.lowest
@pytest.mark.parametrize(
    ("kind", "is_background", "epochs", "ends_after"),
    [
        pytest.param("stock", False, 4, 1, id="raised"),
        pytest.param("ours", True, 4, 2, id="raised by the next save"),
        pytest.param("stock", True, 2, 2, id="raised at the end"),
    ],
)
def test_a_full_disk_fails_on_every_rank_and_harms_nothing(
    kind: training.Kind,
    is_background: bool,
    epochs: int,
    ends_after: int,
    disk: Path,
    tmp_path: Path,
) -> None:
    """Every rank raises the system's reason, and the earlier checkpoint stays whole.

    The error of a background save is raised by the next save, which is not attempted, or
    by the end of ``fit``.
    """
    path = disk / "it.ckpt"
    for error, epoch in training.on_ranks(
        kind, fit_on_full_disk, tmp_path, path, is_background, epochs
    ):
        assert error.startswith(f"cannot save checkpoint {path}: No space left on device; check")
        assert epoch == ends_after
    assert torch.load(path)["epoch"] == 0
    assert [file.name for file in disk.iterdir()] == ["it.ckpt"]


def saved_after_a_failure(kind: training.Kind, directory: Path) -> str:
    """Save after the training, where nothing would wait for it: to a device, whose error
    is returned, and to a file.
    """
    trainer = checkpointing.trainer_for(
        kind, directory, checkpointing.make_io(is_background=True), max_epochs=1
    )
    trainer.fit(training.Net())
    error = training.raised(CheckpointSaveError, trainer.save_checkpoint, "/dev/null/it.ckpt")
    trainer.save_checkpoint(directory / "it.ckpt")
    return str(error)


def test_a_save_after_the_training_is_finished_when_it_returns(tmp_path: Path) -> None:
    """Every rank raises its error once, and the next save succeeds."""
    for error in training.on_ranks("ours", saved_after_a_failure, tmp_path):
        assert error.startswith("cannot save checkpoint /dev/null/it.ckpt: ")
    assert torch.load(tmp_path / "ours" / "it.ckpt")["epoch"] == 1


def save_in_vain(trainer: L.Trainer) -> None:
    """Try to save, to a path of this rank, and handle the error."""
    with pytest.raises(CheckpointSaveError, match="cannot save checkpoint /dev/null/0"):
        trainer.save_checkpoint(f"/dev/null/{trainer.global_rank}")


def steps_after_a_failed_save(kind: training.Kind, directory: Path) -> int:
    trying = training.At("on_train_batch_end", save_in_vain)
    trainer = checkpointing.trainer_for(
        kind, directory, checkpointing.make_io(is_background=False), [trying], max_epochs=1
    )
    trainer.fit(training.Net())
    return trainer.global_step


def test_ranks_that_handle_a_failed_save_continue(tmp_path: Path) -> None:
    """They continue also if each of them gives another path, of which rank 0's counts."""
    steps = training.on_ranks("ours", steps_after_a_failed_save, tmp_path)
    assert steps == training.on_ranks("stock", steps_after_a_failed_save, tmp_path)


FAIL = training.At("on_train_batch_start", training.boom, earlier=2, ranks=[1])


def raises_in_training(
    kind: training.Kind, directory: Path, background: bool, callback: Any
) -> str:
    """Return the error of a training that fails on rank 1 in the third batch."""
    io = checkpointing.make_io(is_background=background)
    trainer = checkpointing.trainer_for(
        kind,
        directory,
        io,
        [FAIL, callback],
    )
    error = training.raised((ValueError, DDPExtError), trainer.fit, training.Net())
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("make", "background"),
    [
        pytest.param(OnExceptionCheckpoint, False, id="Lightning's"),
        pytest.param(
            partial(RankZeroCheckpoint, save_on_exception=True, save_last=True),
            True,
            id="ours, in the background",
        ),
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
    assert of_rank_1 == "BoomError: no such layer"
    assert "rank 1" in of_rank_0
    assert torch.load(tmp_path / "rest.ckpt")["global_step"] == 2


def fails_over_nccl(kind: training.Kind, directory: Path) -> list[str]:
    """Fail on rank 1 in a step, and save after ``fit``; return the errors of both."""
    earlier = directory / "rest.ckpt"
    callbacks = [
        training.At("on_train_start", lambda _: earlier.write_text("earlier")),
        FAIL,
        OnExceptionCheckpoint(directory, "rest"),
    ]
    strategy = training.make_strategy(
        "ours", directory, process_group_backend=training.backend("nccl_stand_in")
    )
    trainer = training.make_trainer(strategy, callbacks=callbacks, enable_checkpointing=True)
    error = training.raised((ValueError, DDPExtError), trainer.fit, training.Net())
    of_save = training.raised(CheckpointSaveError, trainer.save_checkpoint, earlier)
    return [f"{type(error).__name__}: {error}", str(of_save)]


def test_nothing_is_saved_once_nccl_was_aborted(tmp_path: Path) -> None:
    """A queued step may have used partial sums, so earlier files stay on every rank.

    ``fit`` still raises the cause. Before its abort, the rank that fails saves its step.
    """
    other, failed = training.on_ranks("ours", fails_over_nccl, tmp_path)
    assert other[0].startswith("RankFailedError: ")
    assert failed[0] == "BoomError: no such layer"
    for _, error_of_save in (other, failed):
        assert "NCCL was aborted after a failure" in error_of_save
    assert (tmp_path / "ours" / "rest.ckpt").read_text() == "earlier"
    [saved] = tmp_path.rglob("last-preempted.ckpt")
    assert torch.load(saved)["global_step"] == 2


# Ranks that die during a save, and killed saves.


class Waits:
    """Blocks its pickling until the test allows it."""

    def __reduce__(self) -> Any:
        ranks.hold("saving")
        return Waits, ()


def add_waits(trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
    checkpoint["waits"] = Waits()


def kill_rank_1_during_save(
    directory: Path, *, is_released: bool, save_deadline: float
) -> ranks.Outcome:
    """Kill rank 1 while rank 0 saves, which it does until it is released; return the end of
    rank 0.
    """
    save = partial(L.Trainer.save_checkpoint, filepath=directory / "it.ckpt")
    callbacks = [
        LambdaCallback(on_save_checkpoint=add_waits),
        training.At("on_train_epoch_end", save),
    ]
    strategy = {"save_deadline": save_deadline, "stop_checkpoint": None}
    with training.start_fit(
        2, directory, training.Net(), *callbacks, strategy=strategy
    ) as processes:
        processes.wait_for("saving", rank=0)
        processes.kill(1)
        processes.wait_for_output(
            "This rank will finish writing its checkpoint before it exits", rank=0
        )
        if is_released:
            processes.release(0)
        outcome, _ = processes.wait()
    assert outcome.exit_code != 0
    return outcome


class Holds(RankZeroCheckpointIO):
    """Waits for the test after it has written."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)
        ranks.hold("written")


def save_after_fit(rank: int, world_size: int, directory: Path) -> None:
    strategy = training.make_strategy("ours", directory, checkpoint_io=Holds())
    trainer = training.make_trainer(strategy, max_steps=1)
    trainer.fit(training.Net())
    trainer.save_checkpoint(directory / "it.ckpt")


def test_a_file_that_is_complete_stays_when_another_rank_dies(tmp_path: Path) -> None:
    """After the training, rank 0 saves alone only what it has not saved for all ranks."""
    with ranks.RankProcesses(save_after_fit, 2, tmp_path) as processes:
        processes.wait_for("written", rank=0)
        processes.kill(1)
        processes.release(0)
        outcome, _ = processes.wait()
    assert outcome.failure.type_name == "RankDiedError", outcome.story()
    section = torch.load(tmp_path / "it.ckpt", weights_only=False)["lightning_ddp_ext"]
    assert [state["rank"] for state in section["ranks"]] == [0, 1]


def test_a_save_is_finished_when_another_rank_dies(tmp_path: Path) -> None:
    """Rank 0 finishes its save, which needs no other rank, and then exits."""
    outcome = kill_rank_1_during_save(tmp_path, is_released=True, save_deadline=60)
    assert "rank 1" in outcome.failure.message
    assert torch.load(tmp_path / "it.ckpt", weights_only=False)["global_step"] == 4
    assert not list(tmp_path.glob(".ddpx-*.partial"))


def test_a_save_that_takes_too_long_when_another_rank_dies_is_given_up(tmp_path: Path) -> None:
    """Rank 0 exits after ``save_deadline`` seconds, and there is no checkpoint."""
    kill_rank_1_during_save(tmp_path, is_released=False, save_deadline=1)
    assert not (tmp_path / "it.ckpt").exists()


KILLS = max(50, int(os.environ.get("SOAK_COUNT", 0))) // 2
NAMES = "abcd"


def save_without_end(rank: int, world_size: int, path: Path) -> None:
    """Save one checkpoint after another, each filled with the number after the last one's."""
    number = torch.load(path)["number"] if path.exists() else 0
    while True:
        number += 1
        weights = {name: torch.full((50_000,), number) for name in NAMES}
        RankZeroCheckpointIO().save_checkpoint({"number": number, **weights}, path)
        ranks.announce("saved", number)


def spin(share: float) -> None:
    """Let a share of the time of about one save pass, in work rather than in sleep."""
    for _ in range(int(share * 4)):
        torch.rand(100_000).sort()


def test_a_killed_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Kills at random times leave a whole file, and at most one partial file each."""
    path = tmp_path / "it.ckpt"
    times = random.Random(1)
    interrupted = 0
    for _ in range(KILLS):
        with ranks.RankProcesses(save_without_end, 1, path) as writer:
            reported = writer.wait_for("saved", rank=0)
            spin(times.random())
            writer.kill(0)
        leftovers = list(tmp_path.glob(".ddpx-*.partial"))
        assert len(leftovers) <= 1
        assert {*tmp_path.iterdir()} == {path, *leftovers}
        for leftover in leftovers:
            leftover.unlink()
            interrupted += 1
        saved = RankZeroCheckpointIO().load_checkpoint(path)
        number = saved["number"]
        assert number >= reported, "a finished save is lost"
        assert all(torch.all(saved[name] == number) for name in NAMES), "it is of one save"
    assert interrupted > KILLS / 10, "too few kills at random times have interrupted a save"
