"""After a failed save, every rank raises the same error; after a killed one, and after the
death of a rank, a whole checkpoint is left.
"""

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, OnExceptionCheckpoint

from lightning_ddp_ext import (
    CheckpointSaveError,
    DDPExtError,
    RankZeroCheckpoint,
    RankZeroCheckpointIO,
)
from tests.harness import ranks, training
from tests.integration import checkpointing

# Saves that fail.


def add_ballast(trainer: L.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
    """Make the checkpoint of the second epoch too large for the disk of 4 MiB."""
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
    trainer = checkpointing.trainer_for(
        kind,
        directory,
        checkpointing.make_io(is_background=is_background),
        [saving],
        max_epochs=epochs,
    )
    error = training.raised(CheckpointSaveError, trainer.fit, training.Net())
    return str(error), trainer.current_epoch


@pytest.mark.lowest
@pytest.mark.parametrize(
    ("kind", "is_background", "epochs", "ends_after"),
    [  # Our strategy, and our callback beside stock, each wait for background saves.
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


def files_after_a_failure(kind: training.Kind, directory: Path) -> tuple[str, list[str]]:
    """Return the error of a run that saves after each step, of which the second save fails,
    and the names of the checkpoints that it leaves.
    """
    kept = directory.parent / "kept"
    saver = checkpointing.checkpoint_callback(
        kind, dirpath=kept, filename="{step}", every_n_train_steps=1
    )
    io = checkpointing.FailsWhenAwaited(lambda path: path.endswith("step=2.ckpt"))
    trainer = checkpointing.trainer_for(kind, directory, io, [saver], max_epochs=1)
    error = training.raised(CheckpointSaveError, trainer.fit, training.Net())
    return str(error), [path.name for path in kept.glob("step=*")]


@pytest.mark.parametrize("kind", training.KINDS)
def test_a_failed_background_save_leaves_the_checkpoint_before_it(
    kind: training.Kind, tmp_path: Path
) -> None:
    """Every rank raises its error in the next save, and nothing is removed."""
    for error, names in training.on_ranks(kind, files_after_a_failure, tmp_path):
        assert error.startswith("cannot save checkpoint /dev/null/it.ckpt: File exists;")
        assert names == ["step=1.ckpt"]


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
    trainer = checkpointing.trainer_for(
        kind,
        directory,
        checkpointing.make_io(is_background=False),
        [training.At("on_train_batch_end", save_in_vain)],
        max_epochs=1,
    )
    trainer.fit(training.Net())
    return trainer.global_step


def test_ranks_that_handle_a_failed_save_continue(tmp_path: Path) -> None:
    """They continue also if each of them gives another path, of which rank 0's counts."""
    steps = training.on_ranks("ours", steps_after_a_failed_save, tmp_path)
    assert steps == training.on_ranks("stock", steps_after_a_failed_save, tmp_path)


# Ranks that fail in training.


FAIL_ON_RANK_1 = training.At("on_train_batch_start", training.boom, earlier=2, ranks=[1])


def error_in_training(
    kind: training.Kind, directory: Path, is_background: bool, callback: Any
) -> str:
    """Return the error of a training that fails on rank 1 in the third batch."""
    io = checkpointing.make_io(is_background=is_background)
    trainer = checkpointing.trainer_for(kind, directory, io, [FAIL_ON_RANK_1, callback])
    error = training.raised((ValueError, DDPExtError), trainer.fit, training.Net())
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("make_callback", "is_background"),
    [
        pytest.param(OnExceptionCheckpoint, False, id="Lightning's"),
        pytest.param(
            partial(RankZeroCheckpoint, save_on_exception=True, save_last=True),
            True,
            id="ours, in the background",
        ),
    ],
)
def test_an_exception_leaves_its_checkpoint(
    make_callback: Any, is_background: bool, tmp_path: Path
) -> None:
    """After a failure on rank 1, a callback that saves on an exception has its file, and
    rank 0 names the rank.
    """
    callback = make_callback(dirpath=tmp_path, filename="rest")
    error_of_rank_0, error_of_rank_1 = training.on_ranks(
        "ours", error_in_training, tmp_path, is_background, callback
    )
    assert error_of_rank_1 == "BoomError: no such layer"
    assert "rank 1" in error_of_rank_0
    assert torch.load(tmp_path / "rest.ckpt")["global_step"] == 2


def errors_over_nccl(kind: training.Kind, directory: Path) -> dict[str, str]:
    """Fail on rank 1 in a step, and save after ``fit``; return the errors of both calls."""
    earlier = directory / "rest.ckpt"
    backend = training.backend("nccl_stand_in")
    trainer = training.make_trainer(
        training.make_strategy("ours", directory, process_group_backend=backend),
        callbacks=[
            training.At("on_train_start", lambda _: earlier.write_text("earlier")),
            FAIL_ON_RANK_1,
            OnExceptionCheckpoint(directory, "rest"),
        ],
        enable_checkpointing=True,
    )
    error = training.raised((ValueError, DDPExtError), trainer.fit, training.Net())
    error_of_save = training.raised(CheckpointSaveError, trainer.save_checkpoint, earlier)
    return {"fit": f"{type(error).__name__}: {error}", "save": str(error_of_save)}


def test_nothing_is_saved_once_nccl_was_aborted(tmp_path: Path) -> None:
    """A queued step may have used partial sums, so earlier files stay on every rank.

    ``fit`` still raises the cause. Before its abort, the rank that fails saves its step.
    """
    errors_of_rank_0, errors_of_rank_1 = training.on_ranks("ours", errors_over_nccl, tmp_path)
    assert errors_of_rank_0["fit"].startswith("RankFailedError: ")
    assert errors_of_rank_1["fit"] == "BoomError: no such layer"
    for errors in (errors_of_rank_0, errors_of_rank_1):
        assert "NCCL was aborted after a failure" in errors["save"]
    assert (tmp_path / "ours" / "rest.ckpt").read_text() == "earlier"
    [saved] = tmp_path.rglob("last-preempted.ckpt")
    assert torch.load(saved)["global_step"] == 2


# Ranks that die during a save.


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
    with training.start_fit(
        2,
        directory,
        training.Net(),
        LambdaCallback(on_save_checkpoint=add_waits),
        training.At("on_train_epoch_end", save),
        strategy={"save_deadline": save_deadline, "stop_checkpoint": None},
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
    strategy = {"checkpoint_io": Holds()}
    trainer = training.fit("ours", directory, training.Net(), strategy=strategy, max_steps=1)
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


# Killed saves.


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
