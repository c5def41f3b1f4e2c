"""``ckpt_path="last"`` means the newest file of this fit that rank 0 finds."""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import fsspec
import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ddp_ext import CheckpointError, RankZeroCheckpointIO
from tests.checkpoint.content import flip
from tests.harness import training
from tests.integration import checkpointing
from tests.integration.checkpointing import Keeper, Net
from tests.integration.continuing import signalled


def last_on_rank_zero(kind: training.Kind, directory: Path) -> dict[str, Any]:
    """Resume from "last" in a directory that differs by rank, and is empty on rank 1."""
    callback = checkpointing.checkpoint_callback(
        kind, dirpath=directory / os.environ["RANK"], save_last=True
    )
    return checkpointing.fit_from(
        checkpointing.trainer_for(kind, directory, None, [callback, Keeper()], max_epochs=2), "last"
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


class Distilled(L.Callback):
    """Knows the file of a teacher, whose weights a student learns to imitate."""

    def __init__(self, ckpt_path: Path) -> None:
        self.ckpt_path = ckpt_path


def train_with_a_teacher(kind: training.Kind, directory: Path, teacher: Path) -> int:
    """Return the step at which a run without its own checkpoint begins."""
    trainer = checkpointing.trainer_for(kind, directory, None, [Distilled(teacher)], max_epochs=1)
    first_step: int = checkpointing.fit_from(trainer, "last")["step"]
    return first_step


def test_last_ignores_a_file_that_a_users_callback_names(tmp_path: Path) -> None:
    """The run starts anew, although a callback's ``ckpt_path`` names a checkpoint."""
    checkpointing.train_and_save(tmp_path / "teacher.ckpt")
    ours, stock = training.on_both(train_with_a_teacher, tmp_path, tmp_path / "teacher.ckpt")
    assert ours == stock == [0, 0]


STEPS = 4  # of an epoch
EPOCHS = 10  # so that the ranks have time to agree on a stop


class CommandRun(NamedTuple):
    """The steps at which a run began and ended."""

    first_step: int
    last_step: int


def run_command(
    kind: training.Kind, directory: Path, kept: Path, *callbacks: L.Callback
) -> CommandRun:
    """Run one command line, from its newest file on."""
    begun: list[int] = []
    begin = training.At("on_train_start", lambda trainer: begun.append(trainer.global_step))
    saver = ModelCheckpoint(kept, save_last=True)
    io = RankZeroCheckpointIO()
    options = {"max_epochs": EPOCHS, "default_root_dir": directory}
    trainer = checkpointing.trainer_for(kind, directory, io, [begin, saver, *callbacks], **options)
    with suppress(SystemExit):
        trainer.fit(Net(), ckpt_path="last")
    return CommandRun(begun[0], trainer.global_step)


def run_until_stopped(kind: training.Kind, directory: Path, kept: Path) -> CommandRun:
    """Send SIGTERM to rank 1 in the second epoch."""
    stop = signalled("on_train_batch_end", STEPS + 1, ranks=[1])
    return run_command(kind, directory, kept, stop)


def test_last_continues_after_a_preemption(tmp_path: Path) -> None:
    """The same command line, run again, resumes from the stop checkpoint, also if its
    time is that of `last.ckpt`, as in a store that rounds times to seconds.
    """
    kept = tmp_path / "kept"
    stopped, _ = training.on_ranks("ours", run_until_stopped, tmp_path, kept)
    assert stopped.first_step == 0
    assert stopped.last_step > STEPS + 1
    for file in kept.rglob("*.ckpt"):
        os.utime(file, (0, 0))
    resumed, _ = training.on_ranks("ours", run_command, tmp_path, kept)
    assert resumed == CommandRun(first_step=stopped.last_step, last_step=EPOCHS * STEPS)


def refused_command(kind: training.Kind, directory: Path, kept: Path) -> str:
    """Return the error of a command that resumes."""
    with pytest.raises(CheckpointError) as caught:
        run_command(kind, directory, kept)
    return f"{caught.type.__name__}: {caught.value}"


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def alter(path: Path) -> None:
    flip(path, "data/1")


def make_unreadable(path: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/self/mem")  # where nothing is mapped, reading is an error


DAMAGED = (
    "DamagedCheckpointError: checkpoint {} is damaged: ",
    "use an earlier checkpoint (with ckpt_path='last', delete this file)",
)
UNREADABLE = ("CheckpointError: checkpoint {} could not be read: OSError: ", "")


@pytest.mark.parametrize(
    ("damage", "error"), [(truncate, DAMAGED), (alter, DAMAGED), (make_unreadable, UNREADABLE)]
)
def test_a_newest_file_that_cannot_be_read_is_an_error(
    damage: Callable[[Path], None], error: tuple[str, str], tmp_path: Path
) -> None:
    """Every rank names the file. Once it is deleted, the same command continues with the one
    before, also if that has a version in its name.
    """
    kept = tmp_path / "kept"
    stopped, _ = training.on_ranks("ours", run_until_stopped, tmp_path, kept)
    [newest] = kept.glob("*/last-preempted.ckpt")
    damage(newest)
    (kept / "last.ckpt").rename(kept / "last-v1.ckpt")
    own, of_rank_1 = training.on_ranks("ours", refused_command, tmp_path, kept)
    assert of_rank_1 == own
    assert own.startswith(error[0].format(newest))
    assert error[1] in own
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


def refused_by_a_server(kind: training.Kind, directory: Path, url: str) -> str:
    """Return the error of a run that resumes from the newest file at a URL."""
    timeout = aiohttp.ClientTimeout(total=1)
    fsspec.config.conf["http"] = {"client_kwargs": {"timeout": timeout}}
    saver = ModelCheckpoint(url, save_last=True)
    trainer = checkpointing.trainer_for(kind, directory, None, [saver], max_epochs=1)
    with pytest.raises(CheckpointError) as caught:
        trainer.fit(Net(), ckpt_path="last")
    return f"{caught.type.__name__}: {caught.value}"


def count_connections(server: socket.socket) -> int:
    server.setblocking(False)
    connections = 0
    with suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            connections += 1
    return connections


def test_a_server_that_never_replies_gets_one_request(tmp_path: Path) -> None:
    """Further requests could take minutes, so all ranks raise the error of rank 0's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/run"
        error, of_rank_1 = training.on_ranks("ours", refused_by_a_server, tmp_path, url)
        assert count_connections(server) == 1
    assert of_rank_1 == error
    assert error.startswith(f"CheckpointError: cannot search {url} for checkpoints: ")
    assert "check that it can be reached, or pass the path of a checkpoint" in error
