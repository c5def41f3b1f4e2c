"""A call that some ranks do not make, or make too late, ends with an error that names
them.
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
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext import DDPExtStrategy, RankAbsentError, RankFailedError
from tests.harness import ranks, training

PLACE = r"\(.*test_lone_calls.py:\d+\)"
TIMEOUT = 2.0  # of a collective, in seconds
ANSWER = 3.0  # seconds after which a silent rank counts as hung

Elsewhere = Callable[[L.Trainer], object]


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
        assert outcome.failure.type_name == "RankAbsentError", outcome.story()
        assert re.search(sentence, outcome.failure.message)


def validate_elsewhere(trainer: L.Trainer) -> None:
    trainer.validate(training.Net())


def save_after_fit(
    rank: int, world_size: int, directory: Path, path: Path, elsewhere: Elsewhere
) -> None:
    trainer = training.fit("ours", directory, training.Net(), max_epochs=1)
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
    """The error names the save. With stock, the file is also there."""
    path = tmp_path / "it.ckpt"
    saving, _ = ranks.launch_ranks(save_after_fit, 2, tmp_path, path, elsewhere)
    assert re.search(sentence, saving.failure.message), saving.story()
    assert saving.exit_code == 1
    assert torch.load(path, weights_only=False)["global_step"] == 4


def exit_after_a_barrier(rank: int, world_size: int, directory: Path) -> None:
    """Enter a barrier; rank 0 then ends its process without any clean-up."""
    trainer = training.fit("ours", directory, training.Net(), max_epochs=1)
    trainer.strategy.barrier("end")
    if rank == 0:
        os._exit(0)


def test_a_rank_that_exits_immediately_after_a_barrier_is_not_missed(tmp_path: Path) -> None:
    """Every rank has passed the barrier, so none fails."""
    ranks.run_ranks(exit_after_a_barrier, 2, tmp_path)


def late_at_a_barrier(rank: int, world_size: int, directory: Path, late: int) -> None:
    trainer = training.fit("ours", directory, training.Net(), max_epochs=1)
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


class Late(training.Net):
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


def fit_late(
    rank: int, world_size: int, url: str, model: training.Net, process_group_backend: str
) -> None:
    strategy = DDPExtStrategy(
        url, timeout=30, process_group_backend=training.backend(process_group_backend)
    )
    training.change_timeouts(strategy, answer=ANSWER)
    trainer = training.make_trainer(strategy, devices=world_size, limit_val_batches=0)
    trainer.fit(model)


def assert_named(
    outcomes: list[ranks.Outcome], culprit: int, kind: type[RankFailedError], sentence: str
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
    r" .*ranks.py:\d+;"  # where ``hold`` waits
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
