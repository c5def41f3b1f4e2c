"""Whatever happens to a rank on a GPU, the others name it, end in time without SIGABRT,
and save nothing wrong.

What this needs of NCCL and CUDA is also shown with one rank: recorders, aborts, and
graphs.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback, OnExceptionCheckpoint
from torch import Tensor

from lightning_ddp_ext import HangWatchdog
from lightning_ddp_ext.errors import RankAbsentError, RankDiedError, RankFailedError, RankHungError
from lightning_ddp_ext.rendezvous.process_context import current, leave
from lightning_ddp_ext.supervision.flight_recorder import (
    GroupProgress,
    groups_in_collectives,
    read_progress,
)
from tests.gpu import placement as places
from tests.gpu.placement import GPU, IS_GPU, Placement
from tests.harness import training
from tests.harness.outcomes import stories
from tests.harness.training import Net
from tests.integration.rescuing import NAME
from tests.supervision import model as supervision

pytestmark = pytest.mark.gpu

# Seconds from a fault to the other rank's error; a GPU that two ranks share may be
# slow.
BOUND = 60.0
POLLED_EVERY = 0.05  # seconds
BEFORE = 2  # steps before the fault


def read_beyond_the_end() -> None:
    """Fail in a kernel, after which this process cannot use its GPU; on a CPU this is
    an ordinary error.
    """
    torch.ones(2, device=GPU)[torch.tensor([5], device=GPU)].cpu()


@dataclass(frozen=True)
class Fault:
    """What rank 1 does, and what rank 0 raises because of it."""

    strike: Callable[[], None]
    error: type[RankFailedError]
    message: str
    exit_codes: tuple[int, ...] = (1,)  # of rank 1


FAULTS = {
    "raises": Fault(
        supervision.boom, RankFailedError, "failed, so this rank stops: BoomError: no such layer"
    ),
    "dies": Fault(
        supervision.die, RankDiedError, "died: its process ended unexpectedly", (-signal.SIGKILL,)
    ),
    "hangs": Fault(
        supervision.wait_for_ever,
        RankHungError,
        r"never entered \w+ #\d+ .*; it is in training_step, .*\.py:\d+",
    ),
    "is late": Fault(
        supervision.wait_for_ever,
        RankAbsentError,
        r"in a collective for its timeout of 3 s, but rank 1 .*\.py:\d+",
    ),
    # torch's watchdog for NCCL leaves the error to Python: no SIGABRT.
    "asserts": Fault(
        read_beyond_the_end,
        RankFailedError,
        "failed, so this rank stops: .*(device-side assert|out of bounds)",
    ),
}


class Faulty(Net):
    """Has a fault on rank 1 in its third step; limits start when the GPU's libraries
    are loaded.
    """

    def __init__(self, fault: str, directory: Path) -> None:
        super().__init__()
        self.fault = fault
        self.directory = directory

    def on_fit_start(self) -> None:
        spare = Net().to(self.device)
        batch = [torch.ones(3, columns, device=self.device) for columns in (4, 1)]
        spare.loss(batch).backward()
        spare.layers[0].weight.grad.cpu()  # waits for the device

    def training_step(self, batch: Any, index: int) -> Any:
        if index == BEFORE - 1 and self.fault == "is late":
            training.limit_collectives(3.0)
        if index == BEFORE and self.global_rank == 1:
            (self.directory / "struck").write_text(str(time.monotonic()))
            FAULTS[self.fault].strike()
        return super().training_step(batch, index)


def go_wrong(rank: int, world_size: int, placement: Placement, directory: Path, fault: str) -> None:
    callbacks: list[L.Callback] = [OnExceptionCheckpoint(directory, "rest")]
    if fault == "hangs":
        callbacks.append(HangWatchdog(5, directory=directory))
    options = {"callbacks": callbacks, "enable_checkpointing": True, "num_sanity_val_steps": 0}
    trainer = placement.trainer(directory, strategy={"timeout": 600}, **options)
    timeouts = trainer.strategy.rendezvous.timeouts
    grace = dict.fromkeys(timeouts.grace, 10.0)
    trainer.strategy.rendezvous.timeouts = replace(timeouts, grace=grace)
    trainer.fit(Faulty(fault, directory))


@pytest.mark.parametrize("fault", FAULTS)
def test_messages_name_the_rank_that_fails(
    placement: Placement, fault: str, tmp_path: Path
) -> None:
    """A rank that raises, dies, hangs, is late or fails in a kernel: the other names
    it, and saves no partial sums.
    """
    first, second = placement.launch(go_wrong, tmp_path, fault, time_limit=180)
    expected = FAULTS[fault]
    story = stories([first, second])
    assert first.exit_code == 1, story
    assert second.exit_code in expected.exit_codes, story
    assert first.error is not None
    assert isinstance(first.error.exception, expected.error), story
    assert re.search(expected.message, first.error.message), story
    assert first.error.exception.rank == 1
    assert first.error.at - float((tmp_path / "struck").read_text()) < BOUND, story
    assert (tmp_path / "rest.ckpt").exists() == (placement.backend == "gloo"), story


class Interrupted(places.Wide):
    """Has gradients in several buckets; its last one, of the first layer, never gets a
    sum in the third step.

    Rank 1 is killed after all earlier buckets have been summed. Rank 0 holds its device
    for some seconds there.
    """

    def __init__(self, rank: int, seconds: float) -> None:
        super().__init__()
        self.rank = rank
        self.seconds = seconds
        self.layers[0].weight.register_hook(self.strike)

    def strike(self, gradient: Tensor) -> None:
        if self.trainer.global_step != BEFORE:
            return
        if self.rank == 1:
            if IS_GPU:
                torch.cuda.synchronize()
            supervision.die()
        places.hold_device(self.seconds)


def train_wide(
    rank: int, world_size: int, placement: Placement, directory: Path, seconds: float
) -> None:
    """Save the weights after each step; rank 1 is killed in the third one."""
    L.seed_everything(1)
    model = Interrupted(rank, seconds)

    def save_weights(trainer: L.Trainer, *_: Any) -> None:
        if rank == 0:
            torch.save(training.weights(model), directory / f"{trainer.global_step}.pt")

    options = {"rescue_checkpoint": directory / NAME, "bucket_cap_mb": 1}
    callbacks = [LambdaCallback(on_train_batch_end=save_weights)]
    placement.trainer(directory, strategy=options, callbacks=callbacks, num_sanity_val_steps=0).fit(
        model
    )


@pytest.mark.parametrize("seconds", [0, 4], ids=["short", "over 3 s"])
def test_partial_sums_are_not_saved(placement: Placement, seconds: float, tmp_path: Path) -> None:
    """A rank killed between two buckets of a backward pass: the rescue has the weights
    of the last finished step.
    """
    first, second = placement.launch(train_wide, tmp_path, seconds, time_limit=120)
    assert (first.exit_code, second.exit_code) == (1, -signal.SIGKILL), first.story()
    assert first.error is not None
    assert isinstance(first.error.exception, RankDiedError), first.story()
    assert (tmp_path / NAME).exists(), first.story()
    rescued = torch.load(tmp_path / NAME, weights_only=True, map_location="cpu")
    finished = torch.load(tmp_path / f"{BEFORE}.pt", weights_only=True, map_location="cpu")
    assert rescued["global_step"] == BEFORE
    training.assert_same(dict(rescued["state_dict"]), finished)


def fit(placement: Placement, directory: Path) -> dict[str, Tensor]:
    """Train from the same weights as in each call, and return those after it."""
    torch.manual_seed(1)
    model = Net()
    placement.trainer(directory).fit(model)
    return training.weights(model)


def abort_and_train_again(
    rank: int, world_size: int, placement: Placement, directory: Path
) -> tuple[list[str], list[GroupProgress], float]:
    """Abort an all-reduce that waits for the device; return what was unfinished before
    that, and the timeout.
    """
    learned = fit(placement, directory)
    context = current()
    assert context is not None
    limit = context.groups.timeout.total_seconds()
    value = torch.ones(3, device=GPU)
    places.hold_device(3.0 if IS_GPU else 0.0)
    dist.all_reduce(value)
    waits = groups_in_collectives()
    pending = read_progress()
    aborting = threading.Thread(target=context.groups.abort)
    aborting.start()
    aborting.join(60)
    assert not aborting.is_alive()
    if IS_GPU:
        torch.cuda.synchronize()
    context.close_group()
    leave()
    assert not dist.is_initialized()
    for _ in range(2):  # the second Trainer uses the group of the first
        training.assert_same(fit(placement, directory), learned)
    return waits, pending, limit


def test_an_all_reduce_that_waits_is_recorded_and_can_be_aborted(tmp_path: Path) -> None:
    """Flight Recorder, abort from a thread, closing, joining again and a second
    Trainer, with one rank.
    """
    [(waits, found, limit)] = places.ALONE.run(abort_and_train_again, tmp_path)
    [progress] = [each for each in found if each.label == ""]
    number = progress.entered
    assert progress.describe(number).startswith(f"all_reduce #{number} [[3]]")
    assert progress.collective(number).place.startswith(__file__)
    assert progress.members == [0]
    assert limit <= progress.limit <= limit + 60
    assert 0.0 <= progress.seconds < 60
    if IS_GPU:  # gloo has finished by then
        assert any(wait.startswith("_dump_nccl_trace ") for wait in waits), waits
        assert progress.pending == number


def capture_while_polled(
    rank: int, world_size: int, placement: Placement, directory: Path
) -> Tensor:
    fit(placement, directory)
    is_over = threading.Event()
    polls = threading.Semaphore(0)

    def poll() -> None:
        while not is_over.wait(POLLED_EVERY):
            groups_in_collectives()
            polls.release()

    polling = threading.Thread(target=poll)
    polling.start()
    x = torch.ones(3, device=GPU)
    graph: Any = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="global"):
            while polls.acquire(blocking=False):
                pass
            y = 2 * x
            assert all(polls.acquire(timeout=60) for _ in range(3))
    finally:
        is_over.set()
        polling.join()
    x.fill_(4)
    graph.replay()
    return y.cpu()


def test_a_cuda_graph_is_captured_while_the_recorder_is_read(tmp_path: Path) -> None:
    """Capture of a CUDA graph in "global" mode, while the Flight Recorder is read every
    50 ms.
    """
    if not IS_GPU:
        pytest.skip("a CPU captures no graphs")
    [found] = places.ALONE.run(capture_while_polled, tmp_path)
    training.assert_same(found, torch.full((3,), 8.0))
