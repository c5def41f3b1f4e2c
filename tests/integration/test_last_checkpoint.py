"""``ckpt_path="last"`` means the newest file of this fit that rank 0 finds."""

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ddp_ext import CheckpointError, RankZeroCheckpointIO
from tests.checkpoint.content import flip
from tests.harness import training
from tests.harness.ranks import free_port
from tests.integration import checkpointing


def last_on_rank_zero(kind: training.Kind, directory: Path) -> dict[str, Any]:
    """Resume from "last" in a directory that differs by rank, and is empty on rank 1."""
    callback = checkpointing.checkpoint_callback(
        kind, dirpath=directory / os.environ["RANK"], save_last=True
    )
    return checkpointing.fit_from(
        checkpointing.trainer_for(kind, directory, None, [callback], max_epochs=2), "last"
    )


@pytest.mark.lowest
@pytest.mark.parametrize("kind", training.KINDS)
def test_last_is_what_rank_zero_finds(kind: training.Kind, tmp_path: Path) -> None:
    """A rank whose disk has no `last.ckpt` resumes from rank 0's."""
    for rank in ("0", "1"):
        (tmp_path / kind / rank).mkdir(parents=True)
    before = checkpointing.train_and_save(tmp_path / kind / "0" / "last.ckpt")
    for state in training.on_ranks(kind, last_on_rank_zero, tmp_path):
        training.assert_same(state, before)


STEPS = 4  # of an epoch
EPOCHS = 10  # so that the ranks have time to agree on a stop


class CommandRun(NamedTuple):
    """The steps at which a run began and ended."""

    first_step: int
    last_step: int


def run_command(
    kind: training.Kind, directory: Path, kept: Path | str, *callbacks: L.Callback
) -> CommandRun:
    """Run one command line, from its newest file on."""
    begun: list[int] = []
    begin = training.At("on_train_start", lambda trainer: begun.append(trainer.global_step))
    saver = ModelCheckpoint(kept, save_last=True)
    io = RankZeroCheckpointIO()
    options = {"max_epochs": EPOCHS, "default_root_dir": directory}
    trainer = checkpointing.trainer_for(kind, directory, io, [begin, saver, *callbacks], **options)
    with suppress(SystemExit):
        trainer.fit(checkpointing.Net(), ckpt_path="last")
    return CommandRun(begun[0], trainer.global_step)


def run_until_stopped(kind: training.Kind, directory: Path, kept: Path) -> CommandRun:
    """Send SIGTERM to rank 1 in the second epoch."""
    stop = training.signalled("on_train_batch_end", STEPS + 1, ranks=[1])
    return run_command(kind, directory, kept, stop)


def refused_command(kind: training.Kind, directory: Path, kept: Path | str) -> str:
    """Return the error of a command that resumes."""
    with pytest.raises(CheckpointError) as caught:
        run_command(kind, directory, kept)
    return f"{caught.type.__name__}: {caught.value}"


def make_unreadable(path: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/self/mem")  # where nothing is mapped, reading is an error


def test_last_is_the_stop_checkpoint_even_if_it_cannot_be_read(tmp_path: Path) -> None:
    """Every rank names the file, also if its time is that of `last.ckpt`, as in a store that
    rounds times.

    Once it is deleted, the same command continues with the one before, also if that has a
    version in its name.
    """
    kept = tmp_path / "kept"
    stopped, _ = training.on_ranks("ours", run_until_stopped, tmp_path, kept)
    assert stopped.first_step == 0
    assert stopped.last_step > STEPS + 1
    [newest] = kept.glob("*/last-preempted.ckpt")
    (kept / "last.ckpt").rename(kept / "last-v1.ckpt")
    remedy = "use an earlier checkpoint (with ckpt_path='last', delete this file)"
    errors = {
        partial(flip, record="data/1"): (
            "DamagedCheckpointError: checkpoint {} is damaged: ",
            remedy,
        ),
        make_unreadable: ("CheckpointError: checkpoint {} could not be read: OSError: ", ""),
    }
    for damage, (begin, end) in errors.items():
        damage(newest)
        for file in kept.rglob("*.ckpt"):
            os.utime(file, (0, 0), follow_symlinks=False)
        own, of_rank_1 = training.on_ranks("ours", refused_command, tmp_path, kept)
        assert of_rank_1 == own
        assert own.startswith(begin.format(newest))
        assert end in own
    newest.unlink()
    resumed, _ = training.on_ranks("ours", run_command, tmp_path, kept)
    assert resumed.first_step in range(STEPS, stopped.last_step + 1, STEPS), "an epoch's end"
    assert resumed.last_step == EPOCHS * STEPS


def resumed_from_a_store(kind: training.Kind, directory: Path) -> list[int]:
    """Return the steps at which two runs begin that save to the same URL."""
    begun: list[int] = []
    for epochs in (1, 2):
        saving = ModelCheckpoint("memory://bucket/run", save_last=True)
        begin = training.At("on_train_start", lambda trainer: begun.append(trainer.global_step))
        options: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": epochs}
        model = training.Net()
        training.fit(kind, directory, model, saving, begin, ckpt_path="last", **options)
    return begun


def test_last_is_found_at_a_url(tmp_path: Path) -> None:
    """A file system lists files without the protocol of the URL."""
    assert training.on_ranks("ours", resumed_from_a_store, tmp_path) == [[0, 4]] * 2


def test_a_url_that_cannot_be_reached_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """It has the reason of the rank that searched, and a remedy."""
    url = f"http://127.0.0.1:{free_port()}/run"
    error, of_rank_1 = training.on_ranks("ours", refused_command, tmp_path, url)
    assert of_rank_1 == error
    assert error.startswith(f"CheckpointError: cannot search {url} for checkpoints: ")
    assert "check that it can be reached, or pass the path of a checkpoint" in error
