"""A call that some ranks do not make, or make too late, ends with an error that names
them.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.errors import RankAbsentError, RankFailedError
from lightning_ddp_ext.rendezvous.process_context import current
from tests.harness import ranks, training
from tests.harness.ranks import Outcome, stories
from tests.harness.training import Net

PLACE = r"\(.*test_lone_calls.py:\d+\)"
TRAINING = r"\(.*harness/training.py:\d+\)"  # the line of ``fit``
STEPS = 4  # of an epoch of ``Net`` on two ranks
TIMEOUT = 2.0  # of a collective, in seconds
ANSWER = 3.0  # seconds after which a silent rank counts as hung

Elsewhere = Callable[[L.Trainer], object]


def save_after(step: int, path: Path, ranks_that_save: list[int]) -> training.At:
    save = partial(L.Trainer.save_checkpoint, filepath=path)
    return training.At("on_train_batch_end", save, earlier=step - 1, ranks=ranks_that_save)


@pytest.mark.parametrize(("saving", "absent"), [([2], "[01]"), ([0, 1], "2")])
def test_a_save_on_some_ranks_names_one_that_did_not_make_it(
    saving: list[int], absent: str, tmp_path: Path
) -> None:
    """`trainer.save_checkpoint` under `if rank == 0` raises on all ranks immediately,
    instead of hanging.
    """
    path = tmp_path / "it.ckpt"
    sentence = rf"began saving {path} .*rank {absent} \(host .*make this call"
    for outcome in training.fit_on(3, tmp_path, Net(), save_after(1, path, saving)):
        assert outcome.failure.type_name == "RankAbsentError", outcome.story()
        assert re.search(sentence, outcome.failure.message)


def test_a_save_after_the_last_step_names_the_rank_that_finished(tmp_path: Path) -> None:
    """The error also names a rank that finished without the call."""
    save = save_after(STEPS, tmp_path / "it.ckpt", [0])
    saving, _ = training.fit_on(2, tmp_path, Net(), save, max_epochs=1)
    assert "rank 1 (host" in saving.failure.message


def validate_elsewhere(trainer: L.Trainer) -> None:
    trainer.validate(Net())


def save_after_fit(
    rank: int, world_size: int, directory: Path, model: Net, path: Path, elsewhere: Elsewhere
) -> None:
    trainer = training.fit("ours", directory, model, max_epochs=1)
    if rank == 0:
        trainer.save_checkpoint(path)
    else:
        elsewhere(trainer)


@pytest.mark.parametrize(
    ("elsewhere", "sentence"),
    [
        (str, rf"finished and exited, but this rank still needs it for saving \S+ {PLACE}; make"),
        (
            validate_elsewhere,
            rf"different calls: .*rank 0 \(host \S+, pid \d+\) began saving \S+ {PLACE}",
        ),
    ],
    ids=["exits", "validates"],
)
def test_a_save_on_rank_0_after_fit_writes_the_file(
    elsewhere: Elsewhere, sentence: str, tmp_path: Path
) -> None:
    """Training can continue from it, and the error names the save. With stock, the file
    is also there.
    """
    model = Net()
    path = tmp_path / "it.ckpt"
    saving, _ = ranks.launch_ranks(save_after_fit, 2, tmp_path, model, path, elsewhere)
    assert re.search(sentence, saving.failure.message), saving.story()
    assert saving.exit_code == 1

    (tmp_path / "store").unlink(missing_ok=True)
    continued = training.fit_on(2, tmp_path, model, ckpt_path=path)
    whole = training.fit_on(2, tmp_path, model)
    for ours, uninterrupted in zip(continued, whole, strict=True):
        training.assert_same(ours.result, uninterrupted.result)


class KillingIO(TorchCheckpointIO):
    """Kills rank 1 as soon as the file is there, and returns when this is known."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.writes = 0

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)
        self.writes += 1
        os.kill(self.pid, signal.SIGKILL)
        context = current()
        assert context is not None
        context.peers.wait(30)


def save_and_lose_a_rank(rank: int, world_size: int, directory: Path) -> int:
    trainer = training.fit("ours", directory, Net(), max_epochs=1)
    pids = trainer.strategy.all_gather(torch.tensor(os.getpid())).tolist()
    io = KillingIO(pids[1])
    trainer.strategy.checkpoint_io = io
    with suppress(RankFailedError):
        trainer.save_checkpoint(directory / "it.ckpt")
    return io.writes


def test_a_save_after_which_a_rank_dies_is_not_made_again(tmp_path: Path) -> None:
    """The file is there, and no call is left that needs the other rank."""
    saving, _ = ranks.launch_ranks(save_and_lose_a_rank, 2, tmp_path)
    assert saving.result == 1, saving.story()


class Unlogged(Net):
    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.loss(batch)


def stop(trainer: L.Trainer) -> None:
    trainer.should_stop = True


class EndsEarly(Unlogged):
    """Rank 1 ends the epoch before its second batch."""

    def on_train_batch_start(self, batch: Any, index: int) -> int:
        return -1 if self.global_rank == 1 and index == 1 else 0


def test_a_rank_that_stops_training_alone_is_told_how_to_stop_all(tmp_path: Path) -> None:
    """The error names the cause, instead of a call that the user does not make."""
    stop_on_rank_1 = training.At("on_train_epoch_end", stop, ranks=[1])
    for outcome in training.fit_on(2, tmp_path, Unlogged(), stop_on_rank_1):
        assert outcome.failure.type_name == "RankAbsentError", outcome.story()
        assert re.search(
            r"rank 1 began the final barrier of the Trainer's run, but rank 0 \(host .*\) continued"
            r" without it; if only some ranks set trainer.should_stop",
            outcome.failure.message,
        )


def test_a_rank_that_ends_an_epoch_alone_is_told_the_cause(tmp_path: Path) -> None:
    """The error names the hook by which Lightning ends it."""
    for outcome in training.fit_on(2, tmp_path, EndsEarly(), limit_val_batches=0):
        assert outcome.failure.type_name == "RankAbsentError", outcome.story()
        assert "or return -1 from on_train_batch_start, let every rank" in outcome.failure.message


class LoggedOnRankZero(Unlogged):
    def training_step(self, batch: Any, index: int) -> Tensor:
        if self.global_rank == 0:
            self.log("on_rank_0", 1.0, rank_zero_only=True)
        return super().training_step(batch, index)


@pytest.mark.parametrize(
    "callback",
    [
        ModelCheckpoint(monitor="on_rank_0", every_n_train_steps=1, save_top_k=2),
        EarlyStopping("on_rank_0", strict=False, check_on_train_epoch_end=True),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_a_value_monitored_on_one_rank_is_named(callback: L.Callback, tmp_path: Path) -> None:
    """The error names the callback that decides by it, and the remedy."""
    what = rf"a decision of {type(callback).__name__} {TRAINING}"
    sentence = rf"rank 0 .*began {what}.*; log 'on_rank_0' on every rank"
    saves = isinstance(callback, ModelCheckpoint)
    options = {"enable_checkpointing": saves, "default_root_dir": tmp_path}
    for outcome in training.fit_on(2, tmp_path, LoggedOnRankZero(), callback, **options):
        assert outcome.failure.type_name == "RankAbsentError", outcome.story()
        assert re.search(sentence, outcome.failure.message), outcome.story()


def read_log_dir(trainer: L.Trainer) -> object:
    return trainer.log_dir


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_end", "on_train_end"])
def test_log_dir_read_on_one_rank_is_named(hook: str, tmp_path: Path) -> None:
    """The error has the line, before another collective of the model mixes up its data."""
    for outcome in training.fit_on(2, tmp_path, Net(), training.At(hook, read_log_dir, ranks=[0])):
        assert outcome.failure.type_name == "RankAbsentError", outcome.story()
        assert re.search(
            rf"rank 0 .*began a broadcast from rank 0 {PLACE}", outcome.failure.message
        )


def exit_after_a_barrier(rank: int, world_size: int, directory: Path) -> None:
    """Enter a barrier; rank 0 does so last, while its channel's thread is working."""
    trainer = training.fit("ours", directory, Net(), max_epochs=1)
    context = current()
    assert context is not None
    channel = context.peers.channel
    if rank == 1:
        # Called once rank 0 is late, so the work arrives there after the call of this rank.
        send_work_once = cache(partial(channel.send, "work", {}))
        training.limit_collectives(0.1)
        context.barriers.enter("barrier 'end'", if_late=send_work_once)
        return
    is_working = threading.Event()

    def work() -> None:
        is_working.set()
        time.sleep(0.5)  # the work itself; the test waits for nothing meanwhile

    channel.on_message("work", lambda _: channel.call(work))
    is_working.wait()
    trainer.strategy.barrier("end")
    os._exit(0)


def test_a_rank_that_exits_immediately_after_a_barrier_is_not_missed(tmp_path: Path) -> None:
    """Every rank has passed the barrier, so none fails, even if rank 0 exits without
    any clean-up.
    """
    outcomes = ranks.launch_ranks(exit_after_a_barrier, 2, tmp_path)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], stories(outcomes)


def late_at_a_barrier(rank: int, world_size: int, directory: Path, late: int) -> None:
    trainer = training.fit("ours", directory, Net(), max_epochs=1)
    training.limit_collectives(TIMEOUT)
    if rank == late:
        ranks.hold("elsewhere")
    trainer.strategy.barrier("end")


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_for_a_barrier_is_named(late: int, tmp_path: Path) -> None:
    """The waiting rank raises an error with its name, even if it is rank 0, which keeps
    the record.
    """
    with ranks.RankProcesses(late_at_a_barrier, 2, tmp_path, late) as processes:
        (outcome,) = processes.wait(1 - late)
    sentence = (
        rf"rank {1 - late} began barrier 'end' .*, but rank {late} \(host .*did not do so in time"
    )
    assert re.search(sentence, outcome.story())


# Ranks that wait in vain in a collective name the rank that they waited for.


class Late(Net):
    """In its second step all ranks wait for the test; then one may stay there.

    Args:
        late_rank: the rank that stays, if any.
        in_own_collective: whether the others wait for it in a collective of the user's.
    """

    def __init__(self, late_rank: int | None, *, in_own_collective: bool = False) -> None:
        super().__init__()
        self.late_rank = late_rank
        self.in_own_collective = in_own_collective

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index == 1:
            ranks.hold("in step")
            training.limit_collectives(TIMEOUT)
            if self.global_rank == self.late_rank:
                ranks.hold("late")
            if self.in_own_collective:
                dist.all_reduce(torch.ones(1))
        return self.loss(batch)


def fit_late(rank: int, world_size: int, url: str, model: Net, process_group_backend: str) -> None:
    strategy = DDPExtStrategy(
        url, timeout=30, process_group_backend=training.backend(process_group_backend)
    )
    strategy._rendezvous.timeouts = replace(strategy._rendezvous.timeouts, answer=ANSWER)
    trainer = training.make_trainer(strategy, devices=world_size, limit_val_batches=0)
    trainer.fit(model)


def assert_named(
    outcomes: list[Outcome], culprit: int, kind: type[RankFailedError], sentence: str
) -> None:
    """Assert that each rank raised an error of this kind, which names the culprit."""
    for outcome in outcomes:
        error = outcome.failure.exception
        assert type(error) is kind, outcome.story()
        assert (error.rank, outcome.exit_code) == (culprit, 1), outcome.story()
        assert re.search(sentence, str(error)), outcome.story()


SILENT = (
    r"^rank \d \(host .*, pid \d+\) has not answered; "
    rf"(rank \d has waited .*{TIMEOUT:g} s|the connections of rank \d were closed in a collective)"
    r"; every rank stops$"
)
ELSEWHERE = (
    r"in a collective.*, but rank 1 \(host .*, pid \d+\) is in"
    r" .*rank_process.py:\d+;"  # where ``hold`` waits
    r" make sure that"
)


def test_a_stopped_process_is_named() -> None:
    """The other ranks name rank 0 if it was stopped, although it relays messages and
    serves the store.
    """
    url = f"tcp://127.0.0.1:{ranks.free_port()}"
    with ranks.RankProcesses(fit_late, 3, url, Late(None), "gloo") as processes:
        for rank in range(3):
            processes.wait_for("in step", rank)
        processes.kill(0, signal.SIGSTOP)
        for rank in range(3):
            processes.release(rank)
        outcomes = processes.wait(1, 2)
    assert_named(outcomes, 0, RankAbsentError, SILENT)


@pytest.mark.parametrize(
    ("in_own_collective", "backend"),
    [(True, "gloo"), (False, "nccl_stand_in")],
    ids=["all_reduce", "NCCL"],
)
def test_a_rank_that_does_something_else_is_named(
    in_own_collective: bool, backend: str, tmp_path: Path
) -> None:
    """The others name it with file and line, and later it does so itself, before
    torch's own limit for NCCL.
    """
    url = f"file://{tmp_path}/store"
    model = Late(1, in_own_collective=in_own_collective)
    with ranks.RankProcesses(fit_late, 3, url, model, backend) as processes:
        for rank in range(3):
            processes.wait_for("in step", rank)
        for rank in range(3):
            processes.release(rank)
        outcomes = processes.wait(0, 2)
        processes.release(1)
        outcomes += processes.wait(1)
    assert_named(outcomes, 1, RankAbsentError, ELSEWHERE)
