"""Checkpoint callbacks act on all ranks together, in the foreground and background."""

from pathlib import Path
from typing import Any, Literal

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

from lightning_ddp_ext import (
    CheckpointSaveError,
    DDPExtStrategy,
    RankZeroCheckpoint,
    RankZeroCheckpointIO,
)
from tests.harness import training
from tests.harness.training import Net
from tests.integration import checkpointing
from tests.integration.checkpointing import Keeper

LARGE = 16 << 20  # bytes, which a background save still writes when the test starts to read


class ListsFiles(L.Callback):
    """Lists the checkpoints in a directory after each step, except links to no file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.names: list[list[str]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        paths = sorted(self.directory.glob("*.ckpt"))
        self.names.append([path.name for path in paths if path.exists()])


def files_at_every_step(
    kind: training.Kind, directory: Path, kept: Path, save_last: Literal["link"] | None
) -> list[list[str]]:
    """Save in the background after each step; return the files after each step."""
    saver = checkpointing.checkpoint_callback(
        kind, dirpath=kept, filename="{step}", every_n_train_steps=1, save_last=save_last
    )
    lists = ListsFiles(kept)
    io = checkpointing.make_io(is_background=True)
    # In each epoch, a rank has four steps.
    checkpointing.trainer_for(kind, directory, io, [saver, lists], max_epochs=3).fit(Net())
    return lists.names


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


class FailsAtSecond(RankZeroCheckpointIO):
    """Cannot save the checkpoint of the second step."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        is_second = checkpoint["global_step"] == 2
        super().save_checkpoint(checkpoint, "/dev/null/it" if is_second else path, storage_options)


def files_after_a_failure(kind: training.Kind, directory: Path) -> list[str]:
    """Return the error of the run, and the names of the callback's files that it leaves."""
    kept = directory.parent / "kept"
    saver = checkpointing.checkpoint_callback(
        kind, dirpath=kept, filename="{step}", every_n_train_steps=1
    )
    io = AsyncCheckpointIO(FailsAtSecond())
    trainer = checkpointing.trainer_for(kind, directory, io, [saver], max_epochs=1)
    with pytest.raises(CheckpointSaveError) as caught:
        trainer.fit(Net())
    return [str(caught.value).partition(";")[0], *(path.name for path in kept.glob("step=*"))]


@pytest.mark.parametrize("kind", training.KINDS)
def test_a_failed_background_save_leaves_the_checkpoint_before_it(
    kind: training.Kind, tmp_path: Path
) -> None:
    """Every rank raises its error in the next save, and nothing is removed."""
    for error, *names in training.on_ranks(kind, files_after_a_failure, tmp_path):
        assert error == "cannot save checkpoint /dev/null/it: File exists"
        assert names == ["step=1.ckpt"]


def test_the_strategy_completes_lightnings_wrapper() -> None:
    """``AsyncCheckpointIO()`` saves as our IO does, unless it wraps another one."""
    wrapper = AsyncCheckpointIO()
    other = AsyncCheckpointIO(TorchCheckpointIO())
    assert DDPExtStrategy(checkpoint_io=wrapper).checkpoint_io is wrapper
    assert type(wrapper.checkpoint_io) is RankZeroCheckpointIO
    assert DDPExtStrategy(checkpoint_io=other).checkpoint_io is other
    assert type(other.checkpoint_io) is TorchCheckpointIO


def read_while_writing(kind: training.Kind, directory: Path) -> None:
    """Save a large checkpoint in the background, and read it in the next step."""
    path = directory / "large.ckpt"
    keeper = Keeper(torch.zeros(LARGE, dtype=torch.uint8))
    io = checkpointing.make_io(is_background=True)
    save = training.At("on_train_epoch_end", lambda trainer: trainer.save_checkpoint(path))
    read = training.At("on_train_epoch_end", lambda trainer: trainer.strategy.load_checkpoint(path))
    trainer = checkpointing.trainer_for(kind, directory, io, [keeper, save, read], max_epochs=1)
    trainer.fit(Net())


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
    """Return the callback's record of the two checkpoints with the lowest scores."""
    best = checkpointing.checkpoint_callback(
        kind,
        dirpath=directory / "best",
        filename="{epoch}-{score:.1f}",
        monitor="score",
        save_top_k=2,
    )
    checkpointing.trainer_for(kind, directory, None, [Scores(), best], max_epochs=4).fit(Net())
    return best.state_dict()


@pytest.mark.lowest
@pytest.mark.parametrize("kind", training.KINDS)
def test_the_best_checkpoints_are_those_of_rank_zeros_scores(
    kind: training.Kind, tmp_path: Path
) -> None:
    """Every rank names the checkpoint that is best by rank 0's score, and the two best
    are kept.
    """
    record, record_of_rank_1 = training.on_ranks(kind, save_the_best, tmp_path)
    assert record == record_of_rank_1
    assert Path(record["best_model_path"]).name == "epoch=0-score=0.0.ckpt"
    kept = {path.name for path in (tmp_path / kind / "best").iterdir()}
    assert kept == {"epoch=0-score=0.0.ckpt", "epoch=1-score=1.0.ckpt"}


def save_weights(kind: training.Kind, directory: Path) -> None:
    saver = checkpointing.checkpoint_callback(
        kind, dirpath=directory / "weights", filename="{epoch}", save_weights_only=True
    )
    every_step = checkpointing.checkpoint_callback(
        kind, dirpath=directory / "all", filename="{step}", every_n_train_steps=1
    )
    checkpointing.trainer_for(kind, directory, None, [saver, every_step], max_epochs=1).fit(Net())


@pytest.mark.lowest
@pytest.mark.parametrize("kind", training.KINDS)
def test_a_callback_that_saves_weights_only_does_not_affect_another(
    kind: training.Kind, tmp_path: Path
) -> None:
    """Only the other callback's file has the states of optimisers."""
    training.on_ranks(kind, save_weights, tmp_path)
    assert "optimizer_states" not in torch.load(tmp_path / kind / "weights" / "epoch=0.ckpt")
    assert "optimizer_states" in torch.load(tmp_path / kind / "all" / "step=4.ckpt")


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
    trainer.fit(Net())
    io = trainer.strategy.checkpoint_io
    assert io in plugins or type(io) is RankZeroCheckpointIO
    assert torch.load(callback.best_model_path)["epoch"] == 0
    replaced = {"save_checkpoint", "remove_checkpoint", "load_checkpoint", "teardown"}
    assert not replaced & {*vars(trainer.strategy), *vars(io)}


@pytest.mark.lowest
def test_the_callbacks_state_is_that_of_model_checkpoint() -> None:
    """A run that one of the callbacks started can be resumed with the other."""
    ours = RankZeroCheckpoint(monitor="loss", save_top_k=2)
    stock = ModelCheckpoint(monitor="loss", save_top_k=2)
    assert ours.state_key == stock.state_key


def test_a_misspelt_argument_of_the_callback_is_refused() -> None:
    """As with ``ModelCheckpoint``, the error names the argument."""
    with pytest.raises(TypeError, match="save_topk"):
        RankZeroCheckpoint(save_topk=2)
