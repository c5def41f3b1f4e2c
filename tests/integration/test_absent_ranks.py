"""A call that some ranks do not make, or make too late, ends with an error that names them,
instead of a wait without end.
"""

import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_ddp_ext import DDPExtStrategy, RankAbsentError
from tests.harness import ranks, training

PLACE = r"\S+/test_absent_ranks\.py:\d+"  # the file and line of a call
TIMEOUT = 2.0  # of a collective, in seconds
ANSWER = 6.0  # seconds after which a silent rank counts as hung

Call = Callable[[L.Trainer], object]

# Saves.


@pytest.mark.parametrize(("saving", "absent"), [([2], "[01]"), ([0, 1], "2")])
def test_a_save_on_some_ranks_names_one_that_did_not_make_it(
    saving: list[int], absent: str, tmp_path: Path
) -> None:
    """`trainer.save_checkpoint` under `if rank == 0` raises on all ranks immediately,
    instead of hanging.
    """
    path = tmp_path / "it.ckpt"
    save = training.At(
        "on_train_batch_end", partial(L.Trainer.save_checkpoint, filepath=path), ranks=saving
    )
    sentence = rf"began saving {path} .*rank {absent} \(host .*make this call"
    for outcome in training.fit_on(3, tmp_path, training.Net(), save):
        assert re.search(sentence, ranks.message_of(outcome, RankAbsentError)), outcome.story()


def exit_without_saving(trainer: L.Trainer) -> None:
    """Return, after which the script ends."""


def validate(trainer: L.Trainer) -> None:
    trainer.validate(training.Net())


def save_on_rank_0_after_fit(
    rank: int, world_size: int, directory: Path, path: Path, act_on_rank_1: Call
) -> None:
    trainer = training.fit("ours", directory, training.Net(), max_epochs=1)
    if rank == 0:
        trainer.save_checkpoint(path)
    else:
        act_on_rank_1(trainer)


@pytest.mark.parametrize(
    ("act_on_rank_1", "sentence"),
    [
        (
            exit_without_saving,
            rf"finished and exited, but this rank still needs it for saving \S+ \({PLACE}\); make",
        ),
        (
            validate,
            rf"different calls: .*rank 0 \(host \S+, pid \d+\) began saving \S+ \({PLACE}\)",
        ),
    ],
)
def test_a_save_on_rank_0_after_fit_writes_the_file(
    act_on_rank_1: Call, sentence: str, tmp_path: Path
) -> None:
    """Rank 0 raises an error that names the save. The file is complete, as with stock."""
    path = tmp_path / "it.ckpt"
    saving, _ = ranks.launch_ranks(save_on_rank_0_after_fit, 2, tmp_path, path, act_on_rank_1)
    assert re.search(sentence, saving.failure.message), saving.story()
    assert saving.exit_code == 1
    assert torch.load(path, weights_only=False)["global_step"] == 4


# Barriers.


def exit_on_rank_0_after_a_barrier(rank: int, world_size: int, directory: Path) -> None:
    """Enter a barrier; rank 0 then ends its process without any clean-up."""
    training.fit("ours", directory, training.Net(), max_epochs=1).strategy.barrier("end")
    if rank == 0:
        os._exit(0)


def test_a_rank_that_exits_immediately_after_a_barrier_is_not_missed(tmp_path: Path) -> None:
    """Every rank has passed the barrier, so none fails."""
    outcomes = ranks.launch_ranks(exit_on_rank_0_after_a_barrier, 2, tmp_path)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], ranks.stories(outcomes)


def enter_barrier_late(rank: int, world_size: int, directory: Path, late_rank: int) -> None:
    """Enter a barrier; one rank waits for the test before it."""
    trainer = training.fit("ours", directory, training.Net(), max_epochs=1)
    training.limit_collectives(TIMEOUT)
    if rank == late_rank:
        ranks.hold("before the barrier")
    trainer.strategy.barrier("end")


@pytest.mark.parametrize("late_rank", [0, 1])
def test_a_rank_that_is_late_for_a_barrier_is_named(late_rank: int, tmp_path: Path) -> None:
    """The waiting rank raises an error with its name, even if it is rank 0, which keeps
    the record.
    """
    waiting_rank = 1 - late_rank
    with ranks.RankProcesses(enter_barrier_late, 2, tmp_path, late_rank) as processes:
        [waiting] = processes.wait(waiting_rank)
    sentence = (
        rf"rank {waiting_rank} began barrier 'end' .*,"
        rf" but rank {late_rank} \(host .*did not do so in time"
    )
    assert re.search(sentence, waiting.story())


# Collectives.


class WaitsInSecondStep(training.Net):
    """In its second step each rank waits for the test; then one rank may stay there.

    Args:
        late_rank: the rank that stays until the test releases it again; None for none.
        call: made by each rank after its wait; without a call, the ranks that go on wait
            for the late one in the backward pass.
    """

    def __init__(self, late_rank: int | None = None, call: Call | None = None) -> None:
        super().__init__()
        self.late_rank = late_rank
        self.call = call

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if index == 1:
            ranks.hold("in step")
            training.limit_collectives(TIMEOUT)
            if self.global_rank == self.late_rank:
                ranks.hold("late")
            if self.call is not None:
                self.call(self.trainer)
        return self.loss(batch)


def enter_barrier(trainer: L.Trainer) -> None:
    trainer.strategy.barrier("apart")


def reduce_ones(trainer: L.Trainer) -> None:
    torch.distributed.all_reduce(torch.ones(1))


def fit(rank: int, world_size: int, url: str, model: training.Net, backend: str) -> None:
    strategy = DDPExtStrategy(url, timeout=30, process_group_backend=training.backend(backend))
    training.change_timeouts(strategy, answer=ANSWER)
    training.make_trainer(strategy, devices=world_size, limit_val_batches=0).fit(model)


def assert_named(outcomes: list[ranks.Outcome], culprit: int, sentence: str) -> None:
    """Assert that each rank raised an error with this sentence, which names the culprit."""
    for outcome in outcomes:
        error = outcome.failure.exception
        assert type(error) is RankAbsentError, outcome.story()
        assert (error.rank, outcome.exit_code) == (culprit, 1), outcome.story()
        assert re.search(sentence, str(error)), outcome.story()


SILENT = (
    r"^rank \d \(host .*, pid \d+\) has not answered; "
    rf"(rank \d has waited .*{TIMEOUT:g} s|rank \d began barrier .*"
    r"|the connections of rank \d were closed in a collective)"
    r"; every rank stops$"
)
ELSEWHERE = (
    r"in a collective.*, but rank 1 \(host .*, pid \d+\) is in"
    r" .*rank_process.py:\d+;"  # where ``hold`` waits
    r" make sure that"
)


@pytest.mark.parametrize("call", [None, enter_barrier], ids=["backward", "barrier"])
def test_a_stopped_process_is_named(call: Call | None) -> None:
    """The other ranks name rank 0 if it was stopped, although it relays messages and
    serves the store.
    """
    url = f"tcp://127.0.0.1:{ranks.free_port()}"
    with ranks.RankProcesses(fit, 3, url, WaitsInSecondStep(call=call), "gloo") as processes:
        processes.wait_for_all("in step")
        processes.kill(0, signal.SIGSTOP)
        processes.release(*processes.pids)
        outcomes = processes.wait(1, 2)
    assert_named(outcomes, 0, SILENT)


@pytest.mark.parametrize(
    ("call", "backend"),
    [(reduce_ones, "gloo"), (None, "nccl_stand_in")],
    ids=["all_reduce", "NCCL"],
)
def test_a_rank_that_does_something_else_is_named(
    call: Call | None, backend: str, tmp_path: Path
) -> None:
    """The others name it with file and line, and later it does so itself, before
    torch's own limit for NCCL.
    """
    model = WaitsInSecondStep(late_rank=1, call=call)
    with ranks.RankProcesses(fit, 3, f"file://{tmp_path}/store", model, backend) as processes:
        processes.wait_for_all("in step")
        processes.release(*processes.pids)
        outcomes = processes.wait(0, 2)
        processes.release(1)
        outcomes += processes.wait(1)
    assert_named(outcomes, 1, ELSEWHERE)
