"""Checkpoint callbacks act on all ranks together, in the foreground and background.

``test_failed_saves`` shows saves that fail or are interrupted.
"""

from pathlib import Path
from typing import Any, Literal

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

from lightning_ddp_ext import (
    DDPExtStrategy,
    RankZeroCheckpoint,
    RankZeroCheckpointIO,
)
from tests.harness import training
from tests.integration import checkpointing

LARGE = 16 << 20  # bytes, which a background save still writes when the test starts to read


# In the background.


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

    checkpointing.trainer_for(
        kind,
        directory,
        checkpointing.make_io(is_background=True),
        [saver, LambdaCallback(on_train_batch_end=list_files)],
        max_epochs=3,  # of four steps each
    ).fit(training.Net())
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


def add_large(trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
    checkpoint["large"] = torch.zeros(LARGE, dtype=torch.uint8)


def read_while_writing(kind: training.Kind, directory: Path) -> None:
    """Start to save a large checkpoint in the background, and read it right afterwards."""
    path = directory / "large.ckpt"
    checkpointing.trainer_for(
        kind,
        directory,
        checkpointing.make_io(is_background=True),
        [
            LambdaCallback(on_save_checkpoint=add_large),
            training.At("on_train_epoch_end", lambda trainer: trainer.save_checkpoint(path)),
            training.At(
                "on_train_epoch_end", lambda trainer: trainer.strategy.load_checkpoint(path)
            ),
        ],
        max_epochs=1,
    ).fit(training.Net())


@pytest.mark.parametrize("kind", training.KINDS)
def test_a_checkpoint_can_be_read_right_after_its_background_save(
    kind: training.Kind, tmp_path: Path
) -> None:
    """All ranks wait until the file is complete."""
    training.on_ranks(kind, read_while_writing, tmp_path)


def test_the_strategy_completes_lightnings_wrapper() -> None:
    """``AsyncCheckpointIO()`` saves as our IO does, unless it wraps another one."""
    for inner in (None, TorchCheckpointIO()):
        io: Any = DDPExtStrategy(checkpoint_io=AsyncCheckpointIO(inner)).checkpoint_io
        assert type(io) is AsyncCheckpointIO
        assert type(io.checkpoint_io) is type(inner or RankZeroCheckpointIO())


# Which checkpoints are kept.


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
    checkpointing.trainer_for(
        kind, directory, callbacks=[Scores(), best, every_step], max_epochs=4
    ).fit(training.Net())
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
    assert record_of_rank_1 == record
    assert Path(record["best_model_path"]).name == "epoch=0-score=0.0.ckpt"
    kept = {path.name for path in (tmp_path / kind / "best").iterdir()}
    assert kept == {"epoch=0-score=0.0.ckpt", "epoch=1-score=1.0.ckpt"}
    assert "optimizer_states" not in torch.load(record["best_model_path"])
    assert "optimizer_states" in torch.load(tmp_path / kind / "all" / "step=16.ckpt")


# The callback beside Lightning's.


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
    replaced_in_fit = {"save_checkpoint", "remove_checkpoint", "load_checkpoint", "teardown"}
    assert not replaced_in_fit & {*vars(trainer.strategy), *vars(io)}


@pytest.mark.lowest
def test_the_callbacks_state_is_that_of_model_checkpoint() -> None:
    """A run that one of the callbacks started can be resumed with the other."""
    options = {"monitor": "loss", "save_top_k": 2}
    assert RankZeroCheckpoint(**options).state_key == ModelCheckpoint(**options).state_key
