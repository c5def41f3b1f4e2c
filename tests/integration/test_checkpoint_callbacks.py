"""Checkpoint callbacks act on all ranks together, in the foreground and background."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ddp_ext import ConfigurationError, RankZeroCheckpoint, RankZeroCheckpointIO
from tests.harness import training
from tests.harness.training import Net
from tests.integration import checkpointing
from tests.integration.checkpointing import Keeper

EPOCHS = 3
STEPS = 4  # of each rank in an epoch
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
    kind: training.Kind, directory: Path, kept: Path, options: dict[str, Any]
) -> list[list[str]]:
    """Save in the background after each step; return the files after each step."""
    saver = checkpointing.checkpoint_callback(
        kind, dirpath=kept, filename="{step}", every_n_train_steps=1, **options
    )
    lists = ListsFiles(kept)
    io = RankZeroCheckpointIO(background=True)
    checkpointing.trainer_for(kind, directory, io, [saver, lists], max_epochs=EPOCHS).fit(Net())
    return lists.names


@pytest.mark.lowest
@pytest.mark.parametrize("kind", training.KINDS)
def test_in_the_background_there_is_always_a_checkpoint(
    kind: training.Kind, tmp_path: Path
) -> None:
    """No file is removed before its successor is on the disk, and a link has a target."""
    kept = tmp_path / "kept"
    options = {"save_last": "link"} if kind == "stock" else {}
    names_by_step = training.on_ranks(kind, files_at_every_step, tmp_path, kept, options)[0]
    first = next(step for step, names in enumerate(names_by_step) if names)
    assert all(names_by_step[first:])
    last_step = EPOCHS * STEPS
    names = {path.name for path in kept.iterdir()}
    assert names == {f"step={last_step}.ckpt"} | ({"last.ckpt"} if kind == "stock" else set())
    assert all(torch.load(kept / name)["global_step"] == last_step for name in names)


def read_while_writing(kind: training.Kind, directory: Path) -> None:
    """Save a large checkpoint in the background, and read it immediately."""
    path = directory / "large.ckpt"
    keeper = Keeper(torch.zeros(LARGE, dtype=torch.uint8))
    io = RankZeroCheckpointIO(background=True)
    trainer = checkpointing.trainer_for(kind, directory, io, [keeper], max_epochs=1)
    trainer.fit(Net())
    trainer.save_checkpoint(path)
    trainer.test(Net(), ckpt_path=path, verbose=False)


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
        save_weights_only=True,
    )
    third_epoch = checkpointing.checkpoint_callback(
        kind, dirpath=directory / "third", filename="{epoch}", every_n_epochs=3
    )
    checkpointing.trainer_for(
        kind, directory, None, [Scores(), best, third_epoch], max_epochs=4
    ).fit(Net())
    return {name: value for name, value in best.state_dict().items() if name != "dirpath"}


@pytest.mark.lowest
@pytest.mark.parametrize("kind", training.KINDS)
def test_the_best_scores_are_rank_zeros_on_every_rank(kind: training.Kind, tmp_path: Path) -> None:
    """All ranks name the same best checkpoints, of which a later one must be better on
    every rank; another callback also saves.
    """
    record, of_rank_1 = training.on_ranks(kind, save_the_best, tmp_path)
    assert record == of_rank_1
    assert Path(record["best_model_path"]).name == "epoch=0-score=0.0.ckpt"
    names = ["epoch=0-score=0.0.ckpt", "epoch=1-score=1.0.ckpt"]
    assert sorted(path.name for path in (tmp_path / kind / "best").iterdir()) == names
    assert "optimizer_states" not in torch.load(record["best_model_path"])
    assert "optimizer_states" in torch.load(tmp_path / kind / "third" / "epoch=2.ckpt")


def single_device_trainer(*callbacks: RankZeroCheckpoint, plugins: Any = ()) -> L.Trainer:
    return training.make_trainer(
        "auto",
        devices=1,
        callbacks=[*callbacks],
        plugins=list(plugins),
        enable_checkpointing=True,
        max_epochs=1,
    )


@pytest.mark.lowest
def test_the_callback_brings_its_io_to_a_single_device(tmp_path: Path) -> None:
    """The callback saves without a strategy of several ranks, and then undoes its changes.

    An earlier callback without an IO uses the same one.
    """
    io = RankZeroCheckpointIO(background=True)
    callback = RankZeroCheckpoint(tmp_path, checkpoint_io=io)
    trainer = single_device_trainer(RankZeroCheckpoint(every_n_epochs=2), callback)
    trainer.fit(Net())
    assert trainer.strategy.checkpoint_io is io
    assert torch.load(callback.best_model_path)["epoch"] == 0
    replaced = {"save_checkpoint", "remove_checkpoint", "load_checkpoint", "teardown"}
    assert not replaced & {*vars(trainer.strategy), *vars(io)}


@pytest.mark.lowest
def test_a_callback_and_a_trainer_cannot_have_different_ios(tmp_path: Path) -> None:
    """The error names the IO that the callback would replace."""
    callback = RankZeroCheckpoint(tmp_path, checkpoint_io=RankZeroCheckpointIO())
    trainer = single_device_trainer(callback, plugins=[RankZeroCheckpointIO()])
    with pytest.raises(
        ConfigurationError, match="would replace the Trainer's RankZeroCheckpointIO"
    ):
        trainer.fit(Net())


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
